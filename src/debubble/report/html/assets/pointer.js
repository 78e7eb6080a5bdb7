// Hands in → the range moved: drag pans, Ctrl and the wheel zoom, Shift and a drag mark a stretch.
const KEYS = {
  ArrowLeft: (range) => range.pan(-0.2),
  ArrowRight: (range) => range.pan(0.2),
  a: (range) => range.pan(-0.2),
  d: (range) => range.pan(0.2),
  w: (range) => range.zoom(0.7, 0.5),
  s: (range) => range.zoom(1 / 0.7, 0.5),
  "+": (range) => range.zoom(0.7, 0.5),
  "-": (range) => range.zoom(1 / 0.7, 0.5),
  0: (range) => range.set(0, range.length),
};

function listen(board) {
  const { canvas } = board;
  const plot = () => canvas.clientWidth - LEFT - RIGHT;
  const share = (event) => Math.max(0, Math.min(1, (event.offsetX - LEFT) / plot()));
  let held = null;
  canvas.addEventListener(
    "wheel",
    (event) => {
      const { range } = board;
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        range.zoom(Math.exp(Math.max(-50, Math.min(50, event.deltaY)) / 120), share(event));
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        range.pan(event.deltaX / plot());
      }
    },
    { passive: false },
  );
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held = { x: event.offsetX, from: board.range.from, to: board.range.to, marks: event.shiftKey };
    if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
    hideTip(board.tip);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) {
      showTip(board, event);
      return;
    }
    if (held.marks) return;
    const move = ((held.x - event.offsetX) / plot()) * (held.to - held.from);
    board.range.set(held.from + move, held.to + move);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held && held.marks && Math.abs(event.offsetX - held.x) > 3) {
      const [a, b] = [held.x, event.offsetX].map(
        (x) => held.from + ((x - LEFT) / plot()) * (held.to - held.from),
      );
      board.range.set(Math.min(a, b), Math.max(a, b));
    }
    held = null;
  });
  canvas.addEventListener("pointercancel", () => (held = null));
  canvas.addEventListener("pointerleave", () => hideTip(board.tip));
  canvas.addEventListener("dblclick", () => board.range.set(0, board.range.length));
  canvas.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey ? null : KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act(board.range);
  });
}

function hideTip(tip) {
  tip.hidden = true;
}

function showTip(board, event) {
  const lines = board.tell(event.offsetX, event.offsetY);
  const { tip } = board;
  if (!lines) {
    hideTip(tip);
    return;
  }
  tip.replaceChildren(
    ...lines.map((line) => {
      const row = document.createElement("div");
      row.textContent = line;
      return row;
    }),
  );
  tip.hidden = false;
  const { clientWidth: wide, clientHeight: tall } = document.documentElement;
  const x = Math.min(event.clientX + 14, wide - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < tall;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10}px`;
}
