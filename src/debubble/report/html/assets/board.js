// A canvas with lanes on one time axis: drawn, zoomed, panned, asked.
const LEFT = 88;
const RIGHT = 34;
const AXIS = 22;
const MOST_LABELS = 700;
const MOST_LINKS = 900;

const colours = new Map();

// A colour of the style as it is now, light or dark; forgotten when that changes.
function colour(name) {
  if (!colours.has(name)) {
    const style = getComputedStyle(document.documentElement);
    colours.set(name, style.getPropertyValue(`--${name}`).trim());
  }
  return colours.get(name);
}

// What of the time is seen; everything drawn over it listens.
class Range {
  constructor(length) {
    this.listeners = [];
    this.reset(length);
  }

  reset(length) {
    this.length = length;
    this.from = 0;
    this.to = length;
    this.tell();
  }

  set(from, to) {
    const least = Math.min(this.length, 50);
    const span = Math.min(this.length, Math.max(least, to - from));
    this.from = Math.min(Math.max(0, from), this.length - span);
    this.to = this.from + span;
    this.tell();
  }

  zoom(factor, share) {
    const span = this.to - this.from;
    const at = this.from + share * span;
    this.set(at - share * span * factor, at + (1 - share) * span * factor);
  }

  pan(share) {
    const move = share * (this.to - this.from);
    this.set(this.from + move, this.to + move);
  }

  tell() {
    for (const listener of this.listeners) listener();
  }
}

function niceTicks(from, to, tick, count) {
  const raw = ((to - from) * tick) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= raw);
  const found = [];
  for (let ns = Math.ceil((from * tick) / step) * step; ns <= to * tick; ns += step) found.push(ns);
  const [unit, name] =
    to * tick >= 1e9 && step >= 1e7 ? [1e9, "s"] : step >= 1e4 ? [1e6, "ms"] : [1e3, "µs"];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9));
  return found.map((ns) => [ns / tick, `${(ns / unit).toFixed(digits)} ${name}`]);
}

// Fit a canvas to its place; its context counts in CSS pixels.
function fit(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(320, canvas.parentElement.clientWidth);
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
    canvas.style.height = `${height}px`;
  }
  // Pixels are written on every frame: kept where the processor is, they need no way to a GPU.
  const context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, width, height, ratio };
}

function drawAxis(context, range, tick, width, top, bottom) {
  const plot = width - LEFT - RIGHT;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "top";
  context.strokeStyle = colour("line");
  context.fillStyle = colour("muted");
  context.beginPath();
  for (const [moment, label] of niceTicks(range.from, range.to, tick, Math.max(2, plot / 110))) {
    const x = Math.round(LEFT + ((moment - range.from) / (range.to - range.from)) * plot) + 0.5;
    context.moveTo(x, top);
    context.lineTo(x, bottom + 4);
    if (x < width - RIGHT + 2) context.fillText(label, x, bottom + 6);
  }
  context.stroke();
}

class Board {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.slots = [];
    this.range = new Range(1);
    this.range.listeners.push(() => this.ask());
    this.waiting = false;
    listen(this);
  }

  // Slots: {title, view, passes, waits, messages, length}, one under another on one axis.
  show(slots) {
    this.slots = slots;
    const lanes = slots.reduce((sum, slot) => sum + slot.view.lanes.length, 0);
    const room = slots.length > 1 ? 420 : 520;
    this.lane = Math.max(12, Math.min(slots.length > 1 ? 26 : 46, Math.floor(room / lanes)));
    this.titled = slots.length > 1 ? 28 : 6;
    this.range.reset(Math.max(...slots.map((slot) => slot.length)));
  }

  ask() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  // Passes must be a few pixels wide to be told apart.
  isExact(plot) {
    let most = 1;
    for (const { passes, view } of this.slots) {
      for (let lane = 0; lane < view.lanes.length; lane++) {
        const begin = firstAfter(passes, lane, this.range.from);
        most = Math.max(most, firstAfter(passes, lane, this.range.to) - begin);
      }
    }
    return plot / most >= 3;
  }

  draw() {
    if (!this.slots.length) return;
    const lanes = this.slots.reduce((sum, slot) => sum + slot.view.lanes.length, 0);
    const height = lanes * this.lane + this.slots.length * this.titled + AXIS + 6;
    const { context, width, ratio } = fit(this.canvas, height);
    const plot = width - LEFT - RIGHT;
    const scale = (plot * ratio) / (this.range.to - this.range.from);
    const exact = this.isExact(plot);
    if (!this.raster) this.raster = new Raster(context);
    const raster = this.raster;
    raster.resize(Math.round(plot * ratio), Math.round((height - AXIS) * ratio), ratio);
    raster.clear();
    this.tops = [];
    let y = 0;
    for (const slot of this.slots) {
      y += this.titled;
      for (let lane = 0; lane < slot.view.lanes.length; lane++) {
        const gap = this.lane > 20 ? 5 : 2;
        const top = Math.round((y + gap / 2) * ratio);
        const tall = Math.round((this.lane - gap) * ratio);
        const paint = exact ? raster.exact : raster.shares;
        paint.call(raster, top, tall, this.range.from, scale, slot.passes, slot.waits, lane);
        this.tops.push({ slot, lane, y });
        y += this.lane;
      }
    }
    context.fillStyle = colour("ground");
    context.fillRect(0, 0, width, height);
    raster.put(Math.round(LEFT * ratio), 0);
    drawAxis(context, this.range, this.slots[0].view.tick, width, y, y + 2);
    this.drawNames(context, width);
    const plotted = { plot, width, height: y };
    const links = this.drawLinks(context, plotted);
    if (exact) this.drawLabels(context, plotted);
    Object.assign(this.canvas.dataset, {
      mode: exact ? "exact" : "shares",
      from: this.range.from,
      to: this.range.to,
      links,
      drawn: Number(this.canvas.dataset.drawn || 0) + 1,
    });
    if (this.after) this.after(exact, links);
  }

  drawNames(context, width) {
    context.textBaseline = "middle";
    const tick = this.slots[0].view.tick;
    let title = null;
    for (const { slot, lane, y } of this.tops) {
      if (this.slots.length > 1 && slot !== title) {
        title = slot;
        context.textAlign = "left";
        context.fillStyle = colour("text");
        context.font = "600 12px system-ui, sans-serif";
        const name = `${slot.title}: ${showTime(slot.length * tick)}`;
        context.fillText(name, LEFT, y - this.titled / 2 + 1);
        const after = LEFT + context.measureText(name).width + 10;
        context.font = "12px system-ui, sans-serif";
        context.fillStyle = colour("muted");
        if (slot.words) context.fillText(slot.words, after, y - this.titled / 2 + 1);
        const end = LEFT + this.share(slot.length) * (width - LEFT - RIGHT);
        if (end <= width - RIGHT + 1 && end > LEFT) {
          context.strokeStyle = colour("text");
          context.setLineDash([4, 3]);
          context.beginPath();
          context.moveTo(end - 0.5, y);
          context.lineTo(end - 0.5, y + slot.view.lanes.length * this.lane);
          context.stroke();
          context.setLineDash([]);
        }
      }
      const names = slot.view.lanes[lane];
      context.textAlign = "right";
      context.fillStyle = colour("text");
      context.font = `${this.lane < 14 ? 10 : 12}px system-ui, sans-serif`;
      const both = this.lane >= 34;
      context.fillText(names.rank, LEFT - 8, y + this.lane / 2 - (both ? 7 : 0));
      if (both) {
        context.fillStyle = colour("muted");
        context.font = "11px system-ui, sans-serif";
        context.fillText(names.stages, LEFT - 8, y + this.lane / 2 + 8);
      }
    }
  }

  share(moment) {
    return (moment - this.range.from) / (this.range.to - this.range.from);
  }

  x(moment, plot) {
    return LEFT + this.share(moment) * plot;
  }

  // Names of passes: of the widest alone, where all would be too many.
  drawLabels(context, { plot, width }) {
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `${this.lane >= 20 ? 11 : 9}px system-ui, sans-serif`;
    const found = [];
    for (const { slot, lane, y } of this.tops) {
      const { passes } = slot;
      const chunked = slot.view.lanes[lane].stages.includes(",");
      for (let i = firstAfter(passes, lane, this.range.from); i < passes.first[lane + 1]; i++) {
        if (passes.start[i] > this.range.to) break;
        const begin = Math.max(LEFT, this.x(passes.start[i], plot));
        const end = Math.min(width - RIGHT, this.x(passes.end[i], plot));
        if (end - begin >= 14) found.push({ passes, i, chunked, begin, end, y });
      }
    }
    let least = 14;
    while (found.filter((one) => one.end - one.begin >= least).length > MOST_LABELS) least *= 1.3;
    for (const { passes, i, chunked, begin, end, y } of found) {
      const room = end - begin;
      if (room < least) continue;
      const { letter } = DATA.palette.kinds[passes.kind[i]];
      let text = `${passes.microbatch[i]}`;
      if (room > 26) text = `${letter}${text}`;
      if (room > 46 && chunked) text = `${passes.stage[i]}${text}`;
      context.fillStyle = colour(`ink-${letter}`);
      context.fillText(text, (begin + end) / 2, y + this.lane / 2 + 0.5);
    }
  }

  // Messages, from the lower or upper edge of one lane to the other's; none where they would be a mat.
  drawLinks(context, { plot, width }) {
    let drawn = 0;
    this.links = [];
    for (const slot of this.slots) {
      const { messages } = slot;
      if (!messages) continue;
      const rows = [];
      const most = Math.min(MOST_LINKS, (slot.view.lanes.length * plot) / 9);
      for (let i = 0; i < messages.start.length; i++) {
        if (messages.start[i] > this.range.to) break;
        if (messages.end[i] < this.range.from) continue;
        rows.push(i);
        if (rows.length > most) return 0;
      }
      const tops = this.tops.filter((one) => one.slot === slot);
      const band = (this.lane - (this.lane > 20 ? 5 : 2)) / 2;
      context.save();
      context.beginPath();
      context.rect(LEFT, 0, width - LEFT - RIGHT, this.canvas.clientHeight);
      context.clip();
      context.strokeStyle = colour("text");
      context.fillStyle = colour("text");
      context.globalAlpha = 0.75;
      context.lineWidth = 1;
      context.beginPath();
      for (const i of rows) {
        const down = messages.target[i] > messages.source[i] ? 1 : -1;
        const here = tops[messages.source[i]].y + this.lane / 2 + down * band;
        const there = tops[messages.target[i]].y + this.lane / 2 - down * band;
        const [a, b] = [this.x(messages.start[i], plot), this.x(messages.end[i], plot)];
        context.moveTo(a, here);
        context.lineTo(b, there);
        context.moveTo(b - 2.5, there - down * 4);
        context.lineTo(b, there);
        context.lineTo(b + 2.5, there - down * 4);
        this.links.push({ slot, i, a, here, b, there });
        drawn++;
      }
      context.stroke();
      context.restore();
    }
    return drawn;
  }

  // What lies under the pointer, in words; nothing where there is nothing.
  tell(px, py) {
    const plot = this.canvas.clientWidth - LEFT - RIGHT;
    if (px < LEFT || px > LEFT + plot) return null;
    const place = this.tops.find((one) => py >= one.y && py < one.y + this.lane);
    if (!place) return null;
    const { slot, lane, y } = place;
    const { view } = slot;
    const moment = this.range.from + ((px - LEFT) / plot) * (this.range.to - this.range.from);
    const at = `at ${showTime(moment * view.tick)}`;
    const near = (this.links || []).find((one) => distance(one, px, py) < 4);
    const row = spanAt(slot.passes, lane, moment);
    const wait = slot.waits ? spanAt(slot.waits, lane, moment) : -1;
    const middle = Math.abs(py - y - this.lane / 2) < this.lane / 4;
    if (near && row < 0 && wait < 0) return tellLink(near);
    const rank = view.lanes[lane].rank;
    if (wait >= 0 && (row < 0 || middle)) {
      const { waits } = slot;
      const long = showTime((waits.end[wait] - waits.start[wait]) * view.tick);
      const cause = DATA.palette.causes[waits.cause[wait]];
      const whom = waits.names[waits.whom[wait]];
      return [`${rank} waits ${long}${whom ? ` for ${whom}` : ""}`, `${cause.name}: ${cause.words}`, at];
    }
    if (row >= 0) {
      const { passes } = slot;
      const look = DATA.palette.kinds[passes.kind[row]];
      const long = showTime((passes.end[row] - passes.start[row]) * view.tick);
      return [
        `${look.letter}${passes.microbatch[row]}: ${look.words}, ${long}`,
        `${rank}, stage ${passes.stage[row]}, microbatch ${passes.microbatch[row]}`,
        at,
      ];
    }
    return near ? tellLink(near) : null;
  }
}

function tellLink({ slot, i }) {
  const { messages, view } = slot;
  const [source, target] = [view.lanes[messages.source[i]].rank, view.lanes[messages.target[i]].rank];
  const long = showTime((messages.end[i] - messages.start[i]) * view.tick);
  const size = messages.bytes[i] > 0 ? `, ${showBytes(messages.bytes[i])}` : "";
  return [`${source} to ${target}: ${long}${size}`];
}

function distance({ a, here, b, there }, x, y) {
  const [dx, dy] = [b - a, there - here];
  const along = Math.max(0, Math.min(1, ((x - a) * dx + (y - here) * dy) / (dx * dx + dy * dy || 1)));
  return Math.hypot(x - a - along * dx, y - here - along * dy);
}
