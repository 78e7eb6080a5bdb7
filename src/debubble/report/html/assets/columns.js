// Text of the page in → typed arrays out, opened when a step is first shown.
const DATA = JSON.parse(document.getElementById("data").textContent);
const opened = new Map();

function unpack(text, Kind) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Kind(bytes.buffer);
}

// Spans sorted by lane and start; `first` says where each lane begins, `reach` the latest end so far.
function openSpans(counts, columns) {
  const start = unpack(columns.start, Uint32Array);
  const end = unpack(columns.end, Uint32Array);
  const first = new Int32Array(counts.length + 1);
  const reach = new Uint32Array(end);
  counts.forEach((count, lane) => {
    first[lane + 1] = first[lane] + count;
    for (let i = first[lane] + 1; i < first[lane + 1]; i++) {
      if (reach[i] < reach[i - 1]) reach[i] = reach[i - 1];
    }
  });
  return { first, start, end, reach };
}

function openPasses(columns) {
  return {
    ...openSpans(columns.counts, columns),
    kind: unpack(columns.kind, Uint8Array),
    microbatch: unpack(columns.microbatch, Int32Array),
    stage: unpack(columns.stage, Int16Array),
  };
}

function openView(number) {
  if (opened.has(number)) return opened.get(number);
  const view = DATA.views[number];
  const { waits, messages } = view;
  const passes = openPasses(view.passes);
  const found = {
    pipeline: view.pipeline,
    step: view.step,
    tick: view.tick_ns,
    length: view.length,
    lanes: view.lanes,
    passes,
    waits: {
      ...openSpans(waits.counts, waits),
      cause: unpack(waits.cause, Uint8Array),
      whom: unpack(waits.whom, Uint32Array),
      names: waits.names,
    },
    messages: {
      source: unpack(messages.source, Uint16Array),
      target: unpack(messages.target, Uint16Array),
      start: unpack(messages.start, Uint32Array),
      end: unpack(messages.end, Uint32Array),
      bytes: unpack(messages.bytes, Float32Array),
    },
    memory: view.memory.map((one) => ({
      lane: one.lane,
      time: unpack(one.time, Uint32Array),
      bytes: unpack(one.bytes, Float32Array),
      limit: one.limit,
    })),
    // The same passes in the same order, at other times.
    replays: view.replays.map((one) => ({
      ...one,
      passes: { ...passes, ...openSpans(view.passes.counts, one) },
    })),
  };
  opened.set(number, found);
  return found;
}

// The first span of a lane that is not over at a moment.
function firstAfter(spans, lane, moment) {
  let low = spans.first[lane];
  let high = spans.first[lane + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans.reach[middle] > moment) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The span of a lane at a moment, or -1.
function spanAt(spans, lane, moment) {
  const stop = spans.first[lane + 1];
  for (let i = firstAfter(spans, lane, moment); i < stop && spans.start[i] <= moment; i++) {
    if (spans.end[i] > moment) return i;
  }
  return -1;
}

function showTime(ns) {
  const three = (value) => (value >= 100 ? value.toFixed(0) : value.toPrecision(3));
  if (ns >= 1e9) return `${three(ns / 1e9)} s`;
  if (ns >= 1e6) return `${three(ns / 1e6)} ms`;
  if (ns >= 1e3) return `${three(ns / 1e3)} µs`;
  return `${Math.round(ns)} ns`;
}

function showBytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (count >= 1000 && place < units.length - 1) {
    count /= 1024;
    place++;
  }
  return `${count >= 100 || place === 0 ? count.toFixed(0) : count.toPrecision(3)} ${units[place]}`;
}
