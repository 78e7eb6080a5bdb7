// Memory curves under a board, on its range: a line a rank, each named where it ends.
const MEMORY_HEIGHT = 150;
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

class MemoryCurves {
  constructor(canvas, board) {
    this.canvas = canvas;
    this.board = board;
    this.waiting = false;
    board.range.listeners.push(() => this.ask());
  }

  ask() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    const view = this.board.slots[0].view;
    this.canvas.parentElement.hidden = !view.memory.length;
    if (!view.memory.length) return;
    const { context, width, height } = fit(this.canvas, MEMORY_HEIGHT);
    const { range } = this.board;
    const plot = width - LEFT - RIGHT;
    const [top, bottom] = [8, height - AXIS];
    let most = 0;
    for (const curve of view.memory) for (const bytes of curve.bytes) most = Math.max(most, bytes);
    const y = (bytes) => bottom - (bytes / (most * 1.06)) * (bottom - top);
    context.fillStyle = colour("ground");
    context.fillRect(0, 0, width, height);
    drawAxis(context, range, view.tick, width, bottom, bottom + 1);
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = colour("muted");
    context.strokeStyle = colour("line");
    context.font = "11px system-ui, sans-serif";
    for (const share of [0, 0.5, 1]) {
      context.fillText(showBytes(most * share), LEFT - 8, y(most * share));
      context.beginPath();
      context.moveTo(LEFT, Math.round(y(most * share)) + 0.5);
      context.lineTo(width - RIGHT, Math.round(y(most * share)) + 0.5);
      context.stroke();
    }
    const ends = [];
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, plot, height);
    context.clip();
    context.lineWidth = 1.5;
    for (const curve of view.memory) {
      const x = (moment) => LEFT + ((moment - range.from) / (range.to - range.from)) * plot;
      context.strokeStyle = LINES[curve.lane % LINES.length];
      context.setLineDash(DASHES[(curve.lane >> 2) % DASHES.length]);
      context.beginPath();
      let level = curve.bytes[0];
      let last = -1;
      for (let i = 0; i < curve.time.length; i++) {
        const at = x(curve.time[i]);
        if (at > LEFT + plot) break;
        if (at > LEFT) {
          if (last < 0) context.moveTo(LEFT, y(level));
          last = i;
          context.lineTo(at, y(level));
          context.lineTo(at, y(curve.bytes[i]));
        }
        level = curve.bytes[i];
      }
      if (last < 0) context.moveTo(LEFT, y(level));
      context.lineTo(LEFT + plot, y(level));
      context.stroke();
      ends.push({ name: view.lanes[curve.lane].rank.slice(5), at: y(level) });
    }
    context.restore();
    context.setLineDash([]);
    this.drawEnds(context, ends, width, bottom);
    this.canvas.dataset.from = range.from;
    this.canvas.dataset.to = range.to;
  }

  // Names beside the ends of the lines, pushed apart where they would lie on each other.
  drawEnds(context, ends, width, bottom) {
    ends.sort((one, other) => one.at - other.at);
    context.textAlign = "left";
    context.fillStyle = colour("text");
    const room = Math.min(12, (bottom - 6) / Math.max(1, ends.length));
    context.font = `${Math.max(7, Math.min(11, Math.floor(room)))}px system-ui, sans-serif`;
    let last = -Infinity;
    const spare = ends.map((one, row) => Math.min(one.at, bottom - (ends.length - 1 - row) * room));
    spare.forEach((at, row) => {
      const y = Math.max(at, last + room, 6);
      context.fillText(ends[row].name, width - RIGHT + 6, y);
      last = y;
    });
  }
}
