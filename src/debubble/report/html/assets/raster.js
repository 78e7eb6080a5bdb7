// Spans in → pixels out: one image for all lanes, filled row by row, whatever the number of spans.
const NONE = 255;

// What kinds and causes look like now, as pixels.
function looks() {
  return {
    kinds: DATA.palette.kinds.map(({ letter, stripe }) => {
      const fill = colour(`fill-${letter}`);
      const [upper, lower] = ["top", "bottom"].map((one) => stripe === one || stripe === "both");
      return { plain: pack(fill, 0), odd: pack(fill, 0.14), dark: pack(fill, 0.5), upper, lower };
    }),
    causes: DATA.palette.causes.map(({ key, hatch }) => ({
      fill: pack(colour(`fill-${key}`), 0),
      ink: pack(colour(`ink-${key}`), 0),
      hatch,
    })),
  };
}

// A colour as the pixels of an image hold it, some way towards black.
function pack(colour, way) {
  const part = (from) => Math.round(parseInt(colour.slice(from, from + 2), 16) * (1 - way));
  return ((255 << 24) | (part(5) << 16) | (part(3) << 8) | part(1)) >>> 0;
}

class Raster {
  constructor(context) {
    this.context = context;
  }

  resize(width, height, ratio) {
    this.ratio = ratio;
    if (this.image && this.image.width === width && this.image.height === height) return;
    this.image = this.context.createImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.width = width;
    this.kind = new Uint8Array(width);
    this.shade = new Uint8Array(width);
    this.cause = new Uint8Array(width);
    this.plain = new Uint32Array(width);
    this.upper = new Uint32Array(width);
    this.lower = new Uint32Array(width);
    this.hatched = new Uint32Array(width);
    // Which bit of a hatch's row each column shows.
    this.bit = Uint8Array.from({ length: width }, (_, x) => 1 << ((x / ratio) & 7));
  }

  clear() {
    Object.assign(this, looks());
    this.ground = pack(colour("ground"), 0);
    this.pixels.fill(this.ground);
  }

  put(x, y) {
    this.context.putImageData(this.image, x, y);
  }

  // Every pass and every wait where it is: passes tall, waits a band in the middle of the lane.
  exact(top, height, from, scale, passes, waits, lane) {
    const { kind, shade, cause, width } = this;
    kind.fill(NONE);
    shade.fill(0);
    cause.fill(NONE);
    const until = from + width / scale;
    const wide = 4 * this.ratio;
    for (let i = firstAfter(passes, lane, from), stop = passes.first[lane + 1]; i < stop; i++) {
      if (passes.start[i] > until) break;
      const x = Math.max(0, Math.floor((passes.start[i] - from) * scale));
      const end = Math.min(width, Math.max(x + 1, Math.floor((passes.end[i] - from) * scale)));
      kind.fill(passes.kind[i], x, end);
      shade.fill(passes.microbatch[i] & 1, x, end);
      if (end - x >= wide) shade[end - 1] = 2;
    }
    if (waits) {
      for (let i = firstAfter(waits, lane, from), stop = waits.first[lane + 1]; i < stop; i++) {
        if (waits.start[i] > until) break;
        const x = Math.max(0, Math.floor((waits.start[i] - from) * scale));
        const end = Math.min(width, Math.floor((waits.end[i] - from) * scale));
        if (kind[x] === NONE) cause.fill(waits.cause[i], x, Math.max(x + 1, end));
        // A gap inside a pass is shown once it is wider than the pixels it would take.
        else if ((waits.end[i] - waits.start[i]) * scale >= 2) cause.fill(waits.cause[i], x, end);
      }
    }
    this.paintPasses(top, height);
    if (waits) this.paintWaits(top, height);
  }

  paintPasses(top, height) {
    const { kind, shade, plain, upper, lower, width, pixels, ground, kinds } = this;
    const stripe = Math.max(1, Math.min(Math.round(3 * this.ratio), height >> 2));
    for (let x = 0; x < width; x++) {
      if (kind[x] === NONE) plain[x] = upper[x] = lower[x] = ground;
      else {
        const look = kinds[kind[x]];
        plain[x] = shade[x] === 2 ? look.dark : shade[x] ? look.odd : look.plain;
        upper[x] = look.upper ? look.dark : plain[x];
        lower[x] = look.lower ? look.dark : plain[x];
      }
    }
    for (let y = 0; y < height; y++) {
      const row = y < stripe ? upper : y < height - stripe ? plain : lower;
      pixels.set(row, (top + y) * width);
    }
  }

  paintWaits(top, height) {
    const { cause, plain, hatched, width, pixels, ratio, causes, bit } = this;
    const inset = Math.round(height * 0.25);
    for (let step = 0; step < 8; step++) {
      let painted = false;
      for (let y = inset; y < height - inset; y++) {
        if (((y / ratio) & 7) !== step) continue;
        if (!painted) {
          for (let x = 0; x < width; x++) {
            if (cause[x] === NONE) hatched[x] = plain[x];
            else {
              const look = causes[cause[x]];
              hatched[x] = look.hatch[step] & bit[x] ? look.ink : look.fill;
            }
          }
          painted = true;
        }
        pixels.set(hatched, (top + y) * width);
      }
    }
  }

  // Where spans are thinner than pixels: what share of each bin was work, and of which causes waits.
  shares(top, height, from, scale, passes, waits, lane) {
    const { width, pixels, ratio, causes, bit, ground } = this;
    const size = Math.max(2, Math.round(4 * ratio));
    const bins = Math.ceil(width / size);
    const levels = causes.length;
    if (!this.share || this.share.length !== bins * levels) {
      this.share = new Float32Array(bins * levels);
    }
    const share = this.share.fill(0);
    const perBin = scale / size;
    const until = from + width / scale;
    const add = (begin, end, level) => {
      const low = Math.max(0, (begin - from) * perBin);
      const high = Math.min(bins, (end - from) * perBin);
      let bin = Math.floor(low);
      if (high <= bin + 1) {
        if (high > low) share[bin * levels + level] += high - low;
        return;
      }
      share[bin * levels + level] += bin + 1 - low;
      for (bin++; bin + 1 < high; bin++) share[bin * levels + level] += 1;
      share[bin * levels + level] += high - bin;
    };
    for (let i = firstAfter(passes, lane, from), stop = passes.first[lane + 1]; i < stop; i++) {
      if (passes.start[i] > until) break;
      add(passes.start[i], passes.end[i], 0);
    }
    if (waits) {
      for (let i = firstAfter(waits, lane, from), stop = waits.first[lane + 1]; i < stop; i++) {
        if (waits.start[i] > until) break;
        add(waits.start[i], waits.end[i], waits.cause[i]);
      }
    }
    // Work is most of it and plain: laid down in whole rows, and the rest put over it.
    pixels.fill(causes[0].fill, top * width, (top + height) * width);
    for (let bin = 0; bin < bins; bin++) {
      const left = bin * size;
      const right = Math.min(width, left + size);
      let below = Math.min(1, share[bin * levels]);
      let bottom = height - Math.round(below * height);
      for (let level = 1; level < levels && bottom > 0; level++) {
        const amount = share[bin * levels + level];
        if (amount <= 0) continue;
        const look = causes[level];
        below = Math.min(1, below + amount);
        const upper = height - Math.round(below * height);
        for (let y = upper; y < bottom; y++) {
          const bits = look.hatch[(y / ratio) & 7];
          const at = (top + y) * width;
          for (let x = left; x < right; x++) {
            pixels[at + x] = bits & bit[x] ? look.ink : look.fill;
          }
        }
        bottom = upper;
      }
      for (let y = 0; y < bottom; y++) {
        pixels.fill(ground, (top + y) * width + left, (top + y) * width + right);
      }
    }
  }
}
