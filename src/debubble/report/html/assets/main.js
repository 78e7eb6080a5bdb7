// The page: boards filled, steps and pipelines chosen, light and dark.
const tip = document.getElementById("tip");
const boards = [];

function slotOf(view, title) {
  return { title, view, passes: view.passes, waits: view.waits, messages: view.messages, length: view.length };
}

function replaysOf(view) {
  const measured = { ...slotOf(view, "measured"), messages: null, words: "as it ran" };
  const others = view.replays.map((one) => ({
    title: one.name,
    words: one.words,
    view,
    passes: one.passes,
    length: one.length,
  }));
  return [measured, ...others];
}

// A legend entry for each kind and cause that a view has.
function drawLegend(place, views) {
  const kinds = new Set();
  const causes = new Set();
  for (const view of views) {
    for (const kind of view.passes.kind) kinds.add(kind);
    for (const cause of view.waits.cause) causes.add(cause);
  }
  for (const entry of place.querySelectorAll("[data-kind]")) {
    entry.hidden = !kinds.has(Number(entry.dataset.kind));
  }
  for (const entry of place.querySelectorAll("[data-cause]")) {
    entry.hidden = !causes.has(Number(entry.dataset.cause));
  }
}

// Nothing to choose is nothing to show.
function fillSelect(select, values, words) {
  select.replaceChildren(
    ...values.map((value) => {
      const option = document.createElement("option");
      option.value = value;
      option.textContent = words(value);
      return option;
    }),
  );
  select.closest("label").hidden = values.length < 2;
}

// Two lists, of pipelines and of their steps; `show` is told the view's number.
function choose(place, numbers, show) {
  const [pipelines, steps] = place.querySelectorAll("select");
  const of = (number) => DATA.views[number];
  const listSteps = () => {
    const mine = numbers.filter((number) => String(of(number).pipeline) === pipelines.value);
    fillSelect(steps, mine, (number) => (of(number).step === null ? "all" : `${of(number).step}`));
    show(Number(steps.value));
  };
  const known = [...new Set(numbers.map((number) => of(number).pipeline))];
  fillSelect(pipelines, known, (value) => `${value}`);
  pipelines.addEventListener("change", listSteps);
  steps.addEventListener("change", () => show(Number(steps.value)));
  listSteps();
  place.hidden = [...place.querySelectorAll("label")].every((label) => label.hidden);
}

function addButtons(place, board) {
  const acts = {
    in: () => board.range.zoom(0.6, 0.5),
    out: () => board.range.zoom(1 / 0.6, 0.5),
    back: () => board.range.pan(-0.3),
    on: () => board.range.pan(0.3),
    all: () => board.range.set(0, board.range.length),
  };
  for (const button of place.querySelectorAll("button[data-act]")) {
    button.addEventListener("click", acts[button.dataset.act]);
  }
}

function build(section) {
  const spec = DATA.boards[section.dataset.board];
  const board = new Board(section.querySelector("canvas.lanes"), tip);
  boards.push(board);
  addButtons(section, board);
  const note = section.querySelector(".mode");
  board.after = (exact, links) => {
    if (!note) return;
    const closer = spec.slots.length > 1 || links ? "" : " Zoom in to see messages.";
    const shares = "Each column shows shares of its time: work below, waits above.";
    const words = exact ? closer.trim() : `${shares}${closer}`;
    // Text that is set is laid out again, even where it is the same.
    if (note.textContent !== words) note.textContent = words;
    const work = section.querySelector(".legend [data-cause='0']");
    if (work.hidden !== exact) work.hidden = exact;
  };
  const curve = section.querySelector("canvas.memory");
  if (curve) {
    board.memory = new MemoryCurves(curve, board);
    boards.push(board.memory);
  }
  const chosen = spec.slots.map((slot) => slot.views[0]);
  const redraw = () => {
    const views = chosen.map(openView);
    board.show(spec.slots.map((slot, row) => slotOf(views[row], slot.title)));
    if (section.querySelector(".legend")) drawLegend(section.querySelector(".legend"), views);
    const three = document.querySelector("section[data-replays]");
    if (spec.replays && three) showReplays(three, views[0]);
    for (const part of document.querySelectorAll("[data-pipeline]")) {
      part.hidden = part.dataset.pipeline !== String(views[0].pipeline);
    }
  };
  const places = section.querySelectorAll(".choice");
  spec.slots.forEach((slot, row) => {
    choose(places[row], slot.views, (number) => {
      chosen[row] = number;
      redraw();
    });
  });
}

let replays = null;

function showReplays(section, view) {
  section.hidden = !view.replays.length;
  if (!view.replays.length) return;
  if (!replays) {
    replays = new Board(section.querySelector("canvas.lanes"), tip);
    boards.push(replays);
    addButtons(section, replays);
  }
  replays.show(replaysOf(view));
}

function redrawAll() {
  colours.clear();
  for (const board of boards) board.ask();
}

for (const section of document.querySelectorAll("section[data-board]")) build(section);
requestAnimationFrame(() => performance.mark("drawn"));
window.addEventListener("resize", redrawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  redrawAll();
});
