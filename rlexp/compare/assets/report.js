/* The report page draws what page.py has put into it. Names and messages are text: `element` makes text nodes of them,
   and nothing here writes markup. Arrays are decoded when they are first needed. */
(() => {
"use strict";

const MISSING = "–";
const MOST_ROWS = 12; // of runs beside the charts
const byId = (id) => document.getElementById(id);
const head = JSON.parse(byId("report-head").textContent);
const { runs, metrics } = head;
const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

/* ---- Elements ---------------------------------------------------------------------------------------------------- */

function fill(node, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (!known(value) || value === false) continue;
    if (key === "style") for (const [name, each] of Object.entries(value)) node.style.setProperty(name, each);
    else if (typeof value === "function") node.addEventListener(key, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter(known));
  return node;
}

const element = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
const drawing = (tag, properties = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
const span = (kind, ...children) => element("span", { class: kind }, ...children);
const cell = (kind, ...children) => element("td", { class: kind }, ...children);
const column = (kind, ...children) => element("th", { scope: "col", class: kind }, ...children);
const button = (kind, properties, ...children) =>
  element("button", { type: "button", class: kind, ...properties }, ...children);
const listing = (texts) => element("ul", {}, ...texts.map((text) => element("li", {}, text)));
const headRow = (titles, numbers = []) => element("thead", {},
  element("tr", {}, ...titles.map((title, place) => column(numbers.includes(place) ? "number" : null, title))));

const ICONS = {
  check: "M4 12.5l5.5 5.5L20 6.5",
  cross: "M6 6l12 12M18 6L6 18",
  question: "M8.5 9a3.5 3.5 0 1 1 5 3.2c-1 .5-1.5 1.1-1.5 2.3M12 18.4v.1",
  dash: "M5 12h14",
  dot: "M12 7a5 5 0 1 1 0 10a5 5 0 1 1 0-10",
  square: "M7 7h10v10H7z",
  skip: "M12 4a8 8 0 1 0 0 16a8 8 0 1 0 0-16M6.5 17.5l11-11",
};
const icon = (name) =>
  drawing("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, drawing("path", { d: ICONS[name] }));

/* ---- Numbers for people ------------------------------------------------------------------------------------------ */

const isBytes = (name) => /bytes$/.test(name);

function infinite(value) {
  return value > 0 ? "∞" : "−∞";
}

/* Seven digits: as many as float32 has. */
function digits(value) {
  if (!known(value)) return MISSING;
  if (!Number.isFinite(value)) return infinite(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 && Number.isInteger(value)) return value.toLocaleString("en-US").replaceAll(",", "\u2009");
  return size < 1e-4 || size >= 1e7 ? value.toExponential(6) : value.toPrecision(7);
}

function tiny(value) {
  if (!known(value)) return MISSING;
  if (value === 0) return "0";
  return Number.isFinite(value) ? value.toExponential(1) : infinite(value);
}

function scaled(value, steps, units) {
  if (!known(value)) return MISSING;
  if (!Number.isFinite(value)) return infinite(value);
  let place = 0;
  let shown = value;
  // 999.7 would be rounded to 1000: it takes the next unit.
  while (place < units.length - 1 && Math.abs(shown) >= 999.5) {
    shown /= steps;
    place += 1;
  }
  const text = place === 0 && Number.isInteger(shown) ? String(shown) : Number(shown.toPrecision(3)).toString();
  return text + units[place];
}

const count = (value) => scaled(value, 1000, ["", "k", "M", "G", "T"]);
const bytes = (value) => scaled(value, 1000, [" B", " kB", " MB", " GB", " TB"]);
const percent = (value) => (known(value) ? `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %` : MISSING);
const rate = (value) => (known(value) ? `${count(value)} tok/s` : MISSING);

function seconds(value) {
  if (!known(value)) return MISSING;
  if (value < 1) return `${Number((1000 * value).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  return value < 7200 ? `${Number((value / 60).toPrecision(3))} min` : `${Number((value / 3600).toPrecision(3))} h`;
}

const figure = (metric, value) => (isBytes(metric.name) && known(value) ? bytes(value) : digits(value));

/* ---- Arrays ------------------------------------------------------------------------------------------------------ */

function decode(id) {
  const block = byId(id);
  if (block === null) return null;
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(block.textContent).buffer;
  const raw = atob(block.textContent);
  const data = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) data[i] = raw.charCodeAt(i);
  return data.buffer;
}

function remembered(make) {
  const kept = new Map();
  return (key) => {
    if (!kept.has(key)) kept.set(key, make(key));
    return kept.get(key);
  };
}

/* Steps, floor, and each run's values and differences, null where there are none. */
const arraysOf = remembered((number) => {
  const metric = metrics[number];
  const buffer = decode(`metric-${number}`);
  const size = 4 * metric.drawn;
  let offset = size;
  const next = (there) => {
    if (!there) return null;
    offset += size;
    return new Float32Array(buffer, offset - size, metric.drawn);
  };
  const steps = new Int32Array(buffer, 0, metric.drawn);
  const floor = next(metric.floor);
  return { steps, floor, values: metric.values.map(next), differences: metric.differences.map(next) };
});

/* Of tokens and of time, the knots at which they are known; null for what does not go on from the first to the last. */
const clockOf = remembered((number) => {
  const buffer = decode(`clock-${number}`);
  if (buffer === null) return { tokens: null, time: null };
  const size = buffer.byteLength / 24;
  const steps = new Float64Array(buffer, 0, size);
  const knotsOf = (values) => {
    const there = [...values.keys()].filter((place) => Number.isFinite(values[place]));
    if (!there.length || (there.length > 1 && values[there.at(-1)] <= values[there[0]])) return null;
    return { steps: there.map((place) => steps[place]), values: there.map((place) => values[place]) };
  };
  return {
    tokens: knotsOf(new Float64Array(buffer, 8 * size, size)),
    time: knotsOf(new Float64Array(buffer, 16 * size, size)),
  };
});

/* The last place in `sorted` whose value is at most `wanted`; −1 before the first. */
function placeOf(sorted, wanted) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= wanted) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/* Tokens or seconds at a step, straight between the knots and beyond the last as between the last two. */
function reading({ steps, values }, step) {
  if (steps.length === 1) return values[0];
  const place = Math.min(Math.max(placeOf(steps, step), 0), steps.length - 2);
  const share = (step - steps[place]) / (steps[place + 1] - steps[place]);
  return values[place] + share * (values[place + 1] - values[place]);
}

/* ---- What is chosen ---------------------------------------------------------------------------------------------- */

/* The address's part after # keeps it: through the reloads of --watch, and in a link. */
const chosen = { metric: 0, axis: "step", hidden: new Set(), allKeys: false, paused: false };

function recall() {
  const kept = new URLSearchParams(location.hash.slice(1));
  const named = metrics.findIndex((metric) => metric.name === kept.get("metric"));
  const usual = metrics.findIndex((metric) => metric.name === "train/loss");
  const compared = metrics.findIndex((metric) => metric.compared);
  chosen.metric = [named, usual, compared, 0].find((place) => place >= 0);
  chosen.axis = axisChoices().includes(kept.get("x")) ? kept.get("x") : "step";
  const hidden = kept.getAll("hide");
  chosen.hidden = new Set(runs.map((_, place) => place).filter((place) => hidden.includes(runs[place].name)));
  chosen.allKeys = kept.has("keys");
  chosen.paused = kept.has("paused");
}

function remember() {
  const kept = new URLSearchParams();
  if (metrics.length) kept.set("metric", metrics[chosen.metric].name);
  if (chosen.axis !== "step") kept.set("x", chosen.axis);
  for (const run of chosen.hidden) kept.append("hide", runs[run].name);
  if (chosen.allKeys) kept.set("keys", "all");
  if (chosen.paused) kept.set("paused", "yes");
  history.replaceState(null, "", `#${kept}`);
}

const hasClock = (axis) => runs.some((_, run) => clockOf(run)[axis] !== null);
const axisChoices = remembered(() => ["step", ...["tokens", "time"].filter(hasClock)]);

/* ---- Colours and lines ------------------------------------------------------------------------------------------- */

/* Okabe and Ito's colours, darkened or lightened to stand out from the page. */
const FEW = {
  light: ["#0072B2", "#D55E00", "#009E73", "#BC5A93", "#C98A00", "#3D9BD3", "#7A6A00", "#55606B"],
  dark: ["#4DA6E0", "#F28A45", "#2FC79C", "#E39CC8", "#F0B93A", "#94D0F5", "#D8CB55", "#B4BEC8"],
};
const DASHES = [[], [9, 5], [3, 3], [13, 4, 3, 4], [6, 6], [2, 5]];

const isDark = () => !matchMedia("print").matches && matchMedia("(prefers-color-scheme: dark)").matches;
const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const curved = runs.map((_, run) => metrics.some((metric) => metric.values[run]));
const drawnRuns = runs.map((_, run) => run).filter((run) => curved[run]);
const bases = drawnRuns.filter((run) => runs[run].baseline);
const others = drawnRuns.filter((run) => !runs[run].baseline);

/* A baseline is drawn first and widest, the others over it, thinner and dashed: what lies beneath is still seen. */
const drawOrder = [...bases, ...others];

function colour(run) {
  const place = drawOrder.indexOf(run);
  if (place < 0) return tone("muted");
  if (drawnRuns.length <= 8) return FEW[isDark() ? "dark" : "light"][place];
  const lightness = (isDark() ? [66, 76, 58] : [38, 48, 30])[place % 3];
  return `hsl(${Math.round((205 + place * 137.508) % 360)} 68% ${lightness}%)`;
}

function pen(run) {
  // Many lines are one pixel wide: without a GPU, wider ones take three times as long to draw.
  const crowd = drawnRuns.length > 8;
  if (runs[run].baseline) return { width: crowd ? 4 : 7, dash: [] };
  const place = others.indexOf(run);
  return { width: crowd ? 1 : Math.max(1.5, 3.2 - 0.7 * place), dash: DASHES[place % DASHES.length] };
}

/* ---- Curves of one metric along one axis ------------------------------------------------------------------------- */

const TIME_UNITS = [[7200, 3600, "h"], [180, 60, "min"], [0, 1, "s"]];

/* The points of each run: its x, and which of the drawn steps they are. */
function pointsOf(arrays, axis) {
  return runs.map((_, run) => {
    const values = arrays.values[run];
    const clock = axis === "step" ? null : clockOf(run)[axis];
    if (values === null || (axis !== "step" && clock === null)) return null;
    const points = { x: [], at: [] };
    let last = -Infinity;
    for (let at = 0; at < values.length; at += 1) {
      if (Number.isNaN(values[at])) continue;
      const x = clock ? reading(clock, arrays.steps[at]) : arrays.steps[at];
      if (x <= last) continue;
      points.x.push(x);
      points.at.push(at);
      last = x;
    }
    return points;
  });
}

/* All x there are, sorted, each once. */
function union(points) {
  const all = Float64Array.from(points.flatMap((each) => (each === null ? [] : each.x))).sort();
  return Array.from(all).filter((x, place) => place === 0 || x !== all[place - 1]);
}

/* A gap longer than thrice a run's own usual one is drawn as a gap; shorter ones are how seldom it was measured. */
function longGap(points) {
  const gaps = points.at.slice(1).map((at, place) => at - points.at[place]).sort((a, b) => a - b);
  return gaps.length ? 3 * gaps[gaps.length >> 1] : Infinity;
}

/* A line for uPlot: undefined where only another run has its x, null where the line breaks (at a value that cannot be
   drawn, or in a long gap), and the points that stand alone, which a line would not show. */
function lineOf(xs, places, points, valueAt) {
  const line = new Array(xs.length).fill(undefined);
  const lone = [];
  const gap = longGap(points);
  let piece = 0; // points in the piece of line so far
  let previous = -1; // the place of the last of them
  let before = -Infinity; // the run's point before this one
  const end = () => {
    if (piece === 1) lone.push(previous);
    piece = 0;
  };
  points.at.forEach((at, number) => {
    const value = valueAt(at);
    const place = places[number];
    if (value === null || at - before > gap) end();
    before = at;
    if (value === null) {
      line[place] = null;
      return;
    }
    if (piece === 0 && previous >= 0) line.fill(null, previous + 1, place);
    line[place] = value;
    piece += 1;
    previous = place;
  });
  end();
  return { line, lone, size: points.at.length };
}

/* The places of sorted `some` in sorted `all`. */
function placesIn(all, some) {
  let place = 0;
  return some.map((x) => {
    while (all[place] < x) place += 1;
    return place;
  });
}

const finiteOrNull = (value) => (Number.isFinite(value) ? value : null);

function curvesOf(number, axis) {
  const metric = metrics[number];
  const arrays = arraysOf(number);
  const points = pointsOf(arrays, axis);
  let divisor = 1;
  let unit = "";
  if (axis === "time") {
    const longest = Math.max(0, ...points.map((each) => (each && each.x.length ? each.x.at(-1) : 0)));
    [, divisor, unit] = TIME_UNITS.find(([least]) => longest >= least);
    for (const each of points) if (each !== null) each.x = each.x.map((x) => x / divisor);
  }
  const xs = union(points);
  const curves = runs.map((_, run) => {
    if (points[run] === null) return null;
    const places = placesIn(xs, points[run].x);
    const values = arrays.values[run];
    return { ...lineOf(xs, places, points[run], (at) => finiteOrNull(values[at])), places, points: points[run] };
  });
  return { metric, arrays, axis, xs, curves, unit, differences: differencesOf(metric, arrays, xs, curves) };
}

/* Differences as powers of ten. Exact zeros have none: they are kept apart, for the row at the bottom. */
function differencesOf(metric, arrays, xs, curves) {
  if (!metric.compared) return null;
  const lines = curves.map((curve, run) => {
    const difference = arrays.differences[run];
    if (curve === null || difference === null) return null;
    const power = (at) => (difference[at] > 0 && Number.isFinite(difference[at]) ? Math.log10(difference[at]) : null);
    const made = lineOf(xs, curve.places, curve.points, power);
    const zeros = curve.places.filter((_, number) => difference[curve.points.at[number]] === 0);
    let low = Infinity;
    let high = -Infinity;
    for (const power of made.line) {
      if (!known(power)) continue;
      low = Math.min(low, power);
      high = Math.max(high, power);
    }
    return { ...made, zeros, low, high };
  });
  if (!lines.some((line) => line !== null && (line.zeros.length || line.high > -Infinity))) return null;
  return { lines, ...floorOf(arrays, xs, curves) };
}

/* The noise floor, along the first run that is drawn (a baseline, if there is one). */
function floorOf(arrays, xs, curves) {
  const along = drawOrder.find((run) => curves[run] !== null);
  if (arrays.floor === null || along === undefined) return { floor: null, floorLow: Infinity, floorHigh: -Infinity };
  const floor = new Array(xs.length).fill(undefined);
  let [floorLow, floorHigh] = [Infinity, -Infinity];
  const { places, points } = curves[along];
  places.forEach((place, number) => {
    const value = arrays.floor[points.at[number]];
    if (!Number.isFinite(value)) return;
    floor[place] = value > 0 ? Math.log10(value) : -Infinity;
    if (value > 0) [floorLow, floorHigh] = [Math.min(floorLow, floor[place]), Math.max(floorHigh, floor[place])];
  });
  return { floor, floorLow, floorHigh };
}

/* The decades that are shown, the same at every zoom. */
function decades(differences) {
  const there = differences.lines.filter((line) => line !== null);
  let low = Math.min(differences.floorLow, ...there.map((line) => line.low));
  let high = Math.max(differences.floorHigh, ...there.map((line) => line.high));
  if (low > high) [low, high] = [-16, -12]; // nothing but zeros
  low = Math.floor(low);
  const ceiling = Math.max(Math.ceil(high), low + 2);
  // The topmost point keeps clear of the edge.
  const top = Math.max(ceiling, high + (ceiling - low) / 20);
  return { low, high: ceiling, top, zeros: there.some((line) => line.zeros.length > 0) };
}

/* ---- Charts ------------------------------------------------------------------------------------------------------ */

let now = null; // the curves that are drawn
let charts = {}; // overlay, difference
let zoom = null; // {min, max} along x, or all of it

const narrow = () => innerWidth <= 600;
const leftWidth = () => (narrow() ? 58 : 76);
const pixels = (size) => size * devicePixelRatio;
const fontOf = (size) => `${size}px system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif`;

function axisNumber(metric, value, step) {
  if (isBytes(metric.name)) return bytes(value);
  const size = Math.abs(value);
  if (size >= 1e5 && step >= 100) return count(value);
  if (value !== 0 && (size >= 1e5 || step < 1e-7)) {
    return value.toExponential(Math.max(0, Math.min(6, Math.ceil(Math.log10(size / step)))));
  }
  return value.toFixed(Math.min(9, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9))));
}

/* Steps and tokens are whole numbers: 1, 2, 5, 10, 20 … between two marks. */
const WHOLE = Array.from({ length: 14 }, (_, power) => [1, 2, 5].map((each) => each * 10 ** power)).flat();

/* Marks that differ look different, however near they are: 10.02k and 10.04k. */
function wholeNumbers(splits, step) {
  const most = Math.max(...splits.map(Math.abs));
  const [unit, suffix] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([least]) => most >= least) ?? [1, ""];
  const decimals = Math.max(0, Math.ceil(Math.log10(unit / step) - 1e-9));
  return splits.map((x) => (x === 0 ? "0" : (x / unit).toFixed(decimals) + suffix));
}

const AXIS_TITLES = { step: "optimizer step", tokens: "tokens", time: "time" };

function axes(titled, vertical) {
  const { axis, unit } = now;
  const common = {
    stroke: tone("muted"),
    font: fontOf(11),
    labelFont: fontOf(12),
    grid: { stroke: tone("grid"), width: 1 },
    ticks: { stroke: tone("line"), width: 1, size: 4 },
    border: { show: true, stroke: tone("line"), width: 1 },
  };
  const times = (splits) => splits.map((x) => String(Number(x.toPrecision(8))));
  const title = { label: AXIS_TITLES[axis] + (unit ? ` (${unit})` : ""), labelSize: 20, labelGap: 0 };
  const marks = (_, splits, __, ___, step) => (axis === "time" ? times(splits) : wholeNumbers(splits, step));
  const horizontal = { size: 30, space: 64, values: marks };
  return [
    { ...common, ...horizontal, ...(titled ? title : {}), ...(axis === "time" ? {} : { incrs: WHOLE }) },
    { ...common, size: leftWidth(), gap: 6, ...vertical },
  ];
}

function shared(node, height) {
  const few = drawOrder.length <= MOST_ROWS;
  return {
    width: Math.max(node.clientWidth, 200),
    height,
    padding: [10, 14, 0, 0],
    legend: { show: false },
    // The other chart follows the mouse; zooming is passed on by `follow`, which the keys use too.
    cursor: {
      sync: { key: "report", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      drag: { x: true, y: false, dist: 4 },
      points: { show: few, size: 6 },
    },
    hooks: { setScale: [follow], setCursor: [cursorMoved] },
  };
}

/* Points where the run was measured seldom enough for them to stand apart, and those without a neighbour. */
function pointsFor(made) {
  const share = (first, last) => (made.size * (last - first + 1)) / now.xs.length;
  return {
    size: drawOrder.length > MOST_ROWS ? 3 : 5,
    show: (u, _, first, last) => share(first, last) * 14 < u.bbox.width / devicePixelRatio,
    filter: (_, series, show) => (show || made.lone.length === 0 ? null : made.lone),
  };
}

function seriesOf(run, made, width, dash) {
  const stroke = colour(run);
  const show = !chosen.hidden.has(run);
  const alpha = width > 3.5 ? 0.5 : 1; // what is drawn over a wide baseline is seen better
  return { stroke, width, dash, show, alpha, points: { ...pointsFor(made), stroke, fill: stroke } };
}

function drawOverlay() {
  const node = byId("overlay");
  const drawn = drawOrder.filter((run) => now.curves[run] !== null);
  const numbers = (_, splits, __, ___, step) => splits.map((value) => axisNumber(now.metric, value, step));
  const options = {
    ...shared(node, narrow() ? 240 : 340),
    scales: { x: { time: false, range: wholeOrOne }, y: {} },
    axes: axes(now.differences === null, { values: numbers, space: 36 }),
    series: [{}, ...drawn.map((run) => seriesOf(run, now.curves[run], pen(run).width, pen(run).dash))],
  };
  node.replaceChildren();
  charts.overlay = new uPlot(options, [now.xs, ...drawn.map((run) => now.curves[run].line)], node);
  charts.overlay.runs = drawn; // of its series, from `first` on
  charts.overlay.first = 1;
}

/* One step alone stands in the middle. */
function wholeOrOne(_, min, max) {
  return min === max ? [min - 1, max + 1] : [min, max];
}

/* Whole decades, at most about eight, and the row of zeros. */
function decadeMarks(shown, row) {
  const every = Math.ceil((shown.high - shown.low) / 8);
  const splits = [];
  for (let power = shown.high; power >= shown.low; power -= every) splits.unshift(power);
  if (shown.zeros) splits.unshift(shown.low - row / 2);
  const labels = splits.map((power) => (power < shown.low ? "0" : power === 0 ? "1" : `1e${power}`));
  return { splits: () => splits, values: () => labels };
}

function drawDifference() {
  const { differences } = now;
  if (differences === null) return;
  const node = byId("difference");
  const height = narrow() ? 250 : 300;
  const shown = decades(differences);
  // The row of zeros takes a fixed height: so many decades of the axis.
  const row = shown.zeros ? ((shown.top - shown.low) * 26) / (height - 110) : 0;
  const bottom = shown.low - row;
  const drawn = drawOrder.filter((run) => differences.lines[run] !== null);
  const width = drawn.length > 8 ? 1 : 1.6;
  const curves = drawn.map((run) => seriesOf(run, differences.lines[run], width, []));
  const floor = differences.floor ?? [];
  const floorLine = now.xs.map((_, place) => (floor[place] === -Infinity ? shown.low : floor[place]));
  // uPlot ranges an axis only where some series has values: `always` has, when all runs are hidden or all is zero.
  const always = { stroke: "transparent", paths: () => null, points: { show: false } };
  // The floor's area lies below the curves, its line above them.
  const floorArea = { ...always, paths: undefined, width: 0, fill: tone("floor"), fillTo: () => shown.low };
  const floorEdge = { stroke: tone("floor-line"), width: 1.5, dash: [5, 4], points: { show: false } };
  const common = shared(node, height);
  const drawClear = [(u) => shown.zeros && drawZeroRow(u, shown.low, bottom)];
  const options = {
    ...common,
    scales: { x: { time: false, range: wholeOrOne }, y: { range: () => [bottom, shown.top] } },
    axes: axes(true, decadeMarks(shown, row)),
    series: [{}, always, floorArea, ...curves, floorEdge],
    hooks: { ...common.hooks, drawClear, draw: [(u) => drawMarks(u, drawn, shown.low, bottom)] },
  };
  const lines = drawn.map((run) => differences.lines[run].line);
  node.replaceChildren();
  charts.difference = new uPlot(options, [now.xs, now.xs.map(() => shown.low), floorLine, ...lines, floorLine], node);
  charts.difference.runs = drawn;
  charts.difference.first = 3;
}

function drawZeroRow(u, low, bottom) {
  const top = u.valToPos(low, "y", true);
  u.ctx.fillStyle = tone("zero");
  u.ctx.fillRect(u.bbox.left, top, u.bbox.width, u.valToPos(bottom, "y", true) - top);
}

/* Words within a chart, readable over its lines. */
function label(u, text, x, y, align) {
  const { ctx } = u;
  ctx.font = fontOf(pixels(11));
  ctx.textAlign = align;
  ctx.textBaseline = "middle";
  const width = ctx.measureText(text).width + pixels(8);
  ctx.globalAlpha = 0.85;
  ctx.fillStyle = tone("page");
  ctx.fillRect(align === "left" ? x - pixels(4) : x + pixels(4) - width, y - pixels(15), width, pixels(14));
  ctx.globalAlpha = 1;
  ctx.fillStyle = tone("ink");
  ctx.fillText(text, x, y - pixels(7.5));
}

/* What lines cannot show: exact zeros, where the floor is, and the largest difference. */
function drawMarks(u, drawn, low, bottom) {
  const { ctx } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  ctx.clip();
  ctx.setLineDash([]);
  drawZeros(u, drawn.filter((run) => now.differences.lines[run].zeros.length), low, bottom);
  nameFloor(u, low);
  ringWorst(u, low);
  ctx.restore();
}

/* A mark for each zero; the runs lie in lanes, so that one does not hide another. */
function drawZeros(u, zeroed, low, bottom) {
  if (!zeroed.length) return;
  const visible = zeroed.filter((run) => !chosen.hidden.has(run));
  const top = u.valToPos(low, "y", true);
  const lanes = Math.min(Math.max(visible.length, 1), 8);
  const height = (u.valToPos(bottom, "y", true) - top - pixels(4)) / lanes;
  visible.forEach((run, number) => {
    u.ctx.fillStyle = colour(run);
    const y = top + pixels(2) + height * (number % lanes);
    let drawnAt = -Infinity;
    for (const place of now.differences.lines[run].zeros) {
      const x = Math.round(u.valToPos(now.xs[place], "x", true));
      if (x === drawnAt) continue;
      u.ctx.fillRect(x - pixels(1.25), y, pixels(2.5), Math.max(height - pixels(1), pixels(1)));
      drawnAt = x;
    }
  });
  label(u, "0 (equal to the bit)", u.bbox.left + pixels(6), top - pixels(1), "left");
}

function nameFloor(u, low) {
  const { floor } = now.differences;
  if (floor === null) return;
  let place = u.series[0].idxs[1];
  while (place >= 0 && !known(floor[place])) place -= 1;
  if (place < 0 || now.xs[place] < u.scales.x.min) return;
  const x = Math.min(u.valToPos(now.xs[place], "x", true), u.bbox.left + u.bbox.width);
  const y = u.valToPos(Math.max(floor[place], low), "y", true);
  const room = y - pixels(20) > u.bbox.top;
  label(u, "noise floor", x - pixels(6), y + pixels(room ? -3 : 19), "right");
}

function ringWorst(u, low) {
  const { worst } = now.metric;
  const place = worstPlace();
  if (place === null || chosen.hidden.has(worst.run) || !(worst.value > 0)) return;
  const { ctx } = u;
  const y = u.valToPos(Math.max(Math.log10(worst.value), low), "y", true);
  ctx.beginPath();
  ctx.arc(u.valToPos(now.xs[place], "x", true), y, pixels(6), 0, 2 * Math.PI);
  ctx.lineWidth = pixels(1.5);
  ctx.strokeStyle = tone("ink");
  ctx.stroke();
}

/* Where the largest difference stands along x, if that step is drawn. */
function worstPlace() {
  const { worst } = now.metric;
  const curve = worst ? now.curves[worst.run] : null;
  if (!curve) return null;
  const number = curve.points.at.findIndex((at) => now.arrays.steps[at] === worst.step);
  return number < 0 ? null : curve.places[number];
}

/* ---- Zoom and cursor --------------------------------------------------------------------------------------------- */

const bothCharts = () => [charts.overlay, charts.difference].filter(known);

/* Either chart is zoomed: the other goes along. */
function follow(u, key) {
  if (key !== "x" || !bothCharts().includes(u)) return;
  const { min, max } = u.scales.x;
  for (const other of bothCharts()) {
    if (other !== u && (other.scales.x.min !== min || other.scales.x.max !== max)) other.setScale("x", { min, max });
  }
  const [whole, end] = extent();
  zoom = min > whole || max < end ? { min, max } : null;
  byId("reset").disabled = zoom === null;
}

function extent() {
  return wholeOrOne(null, now.xs[0] ?? 0, now.xs.at(-1) ?? 1);
}

function zoomTo(min, max) {
  const [whole, end] = extent();
  const limits = { min: Math.max(min, whole), max: Math.min(max, end) };
  if (limits.max > limits.min) for (const u of bothCharts()) u.setScale("x", limits);
}

/* Nearer or further by a factor, about the cursor. */
function zoomBy(factor) {
  const u = charts.overlay;
  if (!u) return;
  const { min, max } = u.scales.x;
  const about = known(u.cursor.idx) && u.cursor.left >= 0 ? now.xs[u.cursor.idx] : (min + max) / 2;
  zoomTo(about - (about - min) * factor, about + (max - about) * factor);
}

function resetZoom() {
  zoomTo(...extent());
}

let awaited = false;

/* Many moves come in one frame: the table is filled once. */
function cursorMoved() {
  if (awaited) return;
  awaited = true;
  requestAnimationFrame(() => {
    awaited = false;
    if (now) fillReadout();
  });
}

function moveCursor(u, place) {
  const left = u.valToPos(now.xs[place], "x");
  u.setCursor({ left, top: u.over.clientHeight / 2 }, true, true);
  requestAnimationFrame(() => {
    const rows = [...byId("readout-body").rows].slice(0, 6).map((row) => row.innerText);
    byId("spoken").textContent = [byId("readout-title").textContent, ...rows].join("; ");
  });
}

function onKey(u, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const [first, last] = u.series[0].idxs;
  const from = u.cursor.left >= 0 && known(u.cursor.idx) ? u.cursor.idx : last;
  const stride = event.shiftKey ? 10 : 1;
  const moves = { ArrowLeft: from - stride, ArrowRight: from + stride, Home: first, End: last };
  const [nearer, further] = [() => zoomBy(0.5), () => zoomBy(2)];
  const actions = { "+": nearer, "=": nearer, "-": further, 0: resetZoom, Escape: resetZoom };
  if (event.key in moves) moveCursor(u, Math.min(Math.max(moves[event.key], first), last));
  else if (event.key in actions) actions[event.key]();
  else return;
  event.preventDefault();
}

function onTouch(u, event) {
  const [touch] = event.touches;
  const box = u.over.getBoundingClientRect();
  const left = Math.min(Math.max(touch.clientX - box.left, 0), box.width);
  u.setCursor({ left, top: touch.clientY - box.top }, true, true);
}

/* ---- The table beside the charts --------------------------------------------------------------------------------- */

/* Which of a run's points is meant at x: its own nearest, none beyond its ends. */
function pointAt(curve, x, place) {
  if (now.axis === "step") {
    const number = placeOf(curve.places, place);
    return number >= 0 && curve.places[number] === place ? number : null;
  }
  const { x: xs } = curve.points;
  const before = placeOf(xs, x);
  const spacing = xs.length > 1 ? (xs.at(-1) - xs[0]) / (xs.length - 1) : Infinity;
  const after = Math.min(before + 1, xs.length - 1);
  const nearest = before >= 0 && x - xs[before] <= xs[after] - x ? before : after;
  const best = before === xs.length - 1 ? before : nearest;
  return best >= 0 && Math.abs(xs[best] - x) <= spacing ? best : null;
}

function readoutRows(x, place, hovering) {
  const visible = drawnRuns.filter((run) => !chosen.hidden.has(run) && now.curves[run] !== null);
  return visible.map((run) => {
    const curve = now.curves[run];
    const ends = !hovering && now.axis !== "step" && curve.points.at.length > 0;
    const number = ends ? curve.points.at.length - 1 : pointAt(curve, x, place);
    if (number === null) return { run };
    const at = curve.points.at[number];
    const differences = now.arrays.differences[run];
    const difference = differences === null ? null : differences[at];
    return { run, step: now.arrays.steps[at], value: now.arrays.values[run][at], difference };
  });
}

function whereText(x) {
  if (now.axis === "tokens") return `${count(Math.round(x))} tokens`;
  return now.axis === "time" ? `${Number(x.toPrecision(4))} ${now.unit}` : `step ${x}`;
}

function readoutTitle(x, hovering) {
  if (x === undefined) return "No values";
  if (hovering) return `At ${whereText(x)}`;
  return now.axis === "step" ? `At the end, ${whereText(x)}` : "At the end of each run";
}

function readoutRow({ run, step, value, difference }, steps, differences) {
  const { name, label: shown, baseline } = runs[run];
  const apart = baseline ? "base" : tiny(difference);
  return element("tr", { "data-run": name },
    cell(null, element("div", { class: "who", title: shown }, dot(run), span("name", shown))),
    steps ? cell("number", known(step) ? String(step) : MISSING) : null,
    element("td", { class: "number", "data-cell": "value" }, figure(now.metric, value)),
    differences ? element("td", { class: "number", "data-cell": "difference" }, apart) : null);
}

function fillReadout() {
  const u = charts.overlay;
  const hovering = u.cursor.left >= 0 && known(u.cursor.idx);
  const place = hovering ? u.cursor.idx : now.xs.length - 1;
  const x = now.xs[place];
  const [steps, differences] = [now.axis !== "step", now.metric.compared];
  const all = x === undefined ? [] : readoutRows(x, place, hovering);
  if (all.length > MOST_ROWS) {
    const size = (row) => (known(row.difference) ? row.difference : -1);
    all.sort((a, b) => size(b) - size(a) || a.run - b.run);
  }
  const more = all.length - MOST_ROWS;
  byId("readout-title").textContent = readoutTitle(x, hovering);
  byId("readout-head").replaceChildren(element("tr", {}, column(null, "Run"), steps ? column("number", "Step") : "",
    column("number", "Value"), differences ? column("number", "Diff.") : ""));
  byId("readout-body").replaceChildren(...all.slice(0, MOST_ROWS).map((row) => readoutRow(row, steps, differences)));
  byId("readout-more").textContent =
    more > 0 ? `… and ${more} more${differences ? ", no further from their baseline" : ""}` : "";
}

/* A long table scrolls inside itself, a short one is whole. */
const LONG = 14;
const lengthen = (table, rows) => table.parentElement.classList.toggle("tall", rows > LONG);

const dot = (run) => element("span", { class: "dot", style: { background: colour(run) } });

/* ---- The section of curves --------------------------------------------------------------------------------------- */

function draw() {
  if (!metrics.length) return;
  for (const u of bothCharts()) u.destroy();
  charts = {};
  const kept = zoom;
  now = curvesOf(chosen.metric, chosen.axis);
  describe();
  drawOverlay();
  drawDifference();
  for (const u of bothCharts()) listen(u);
  if (kept) zoomTo(kept.min, kept.max);
  byId("reset").disabled = zoom === null;
  fillReadout();
  page.metric = now.metric.name;
  page.axis = now.axis;
  page.charts = charts;
}

function listen(u) {
  u.over.addEventListener("touchstart", (event) => onTouch(u, event), { passive: true });
  u.over.addEventListener("touchmove", (event) => onTouch(u, event), { passive: true });
}

/* The words around the charts. */
function describe() {
  const { metric, differences } = now;
  byId("overlay-title").textContent = metric.name;
  const without = drawnRuns.filter((run) => now.arrays.values[run] !== null && now.curves[run] === null).length;
  const which = "where the runs lie furthest apart and where a curve is most extreme, in each stretch. ";
  const sampled = metric.drawn < metric.total ? `${metric.drawn} of ${metric.total} steps drawn: ${which}` : "";
  const unclocked = without ? `${without} ${without === 1 ? "run has" : "runs have"} no ${now.axis} logged.` : "";
  byId("drawn").textContent = sampled + unclocked;
  byId("difference-figure").hidden = differences === null;
  byId("no-difference").hidden = differences !== null;
  byId("no-difference").textContent = metric.compared
    ? "There is no run here to compare with a baseline, so no difference is drawn."
    : `${metric.name} is the layout's own and may differ between runs, so no difference is drawn.`;
  const keys = "Arrow keys move the cursor, plus and minus zoom, 0 shows all.";
  byId("overlay").setAttribute("aria-label", `Curves of ${metric.name} of ${drawnRuns.length} runs. ${keys}`);
  byId("difference").setAttribute("aria-label", `Difference of ${metric.name} to the baseline. ${keys}`);
  byId("floor").hidden = !metric.floor;
  const floorText = metric.floor_kind ? `Noise floor, ${metric.floor_kind}` : "Noise floor";
  byId("floor").replaceChildren(span("swatch"), span(null, floorText));
  byId("worst").textContent = worstText(metric);
}

function worstText(metric) {
  if (!metric.worst || !metric.compared) return "";
  const { run, step, value } = metric.worst;
  if (value === 0) return "Equal to the bit at every step";
  return `Furthest apart: ${tiny(value)} at step ${step}, ${runs[run].label}`;
}

function select(name) {
  const place = metrics.findIndex((metric) => metric.name === name);
  if (place < 0) return;
  chosen.metric = place;
  byId("metric").value = String(place);
  remember();
  draw();
}

function setAxis(axis) {
  chosen.axis = axis;
  zoom = null;
  remember();
  draw();
}

function show(hidden) {
  chosen.hidden = hidden;
  remember();
  for (const chip of byId("legend").querySelectorAll("[data-run]")) {
    chip.setAttribute("aria-pressed", String(!hidden.has(Number(chip.dataset.run))));
  }
  for (const u of bothCharts()) {
    u.batch(() => u.runs.forEach((run, number) => u.setSeries(number + u.first, { show: !hidden.has(run) })));
    u.redraw();
  }
  if (now) fillReadout();
}

function toggle(run, alone) {
  const hidden = new Set(alone ? drawnRuns.filter((each) => each !== run) : chosen.hidden);
  if (!alone && !hidden.delete(run)) hidden.add(run);
  show(hidden);
}

function swatch(run) {
  const { width, dash } = pen(run);
  return drawing("svg", { width: 24, height: 10, "aria-hidden": "true" }, drawing("line", {
    x1: 0, y1: 5, x2: 24, y2: 5, stroke: colour(run), "stroke-width": width, "stroke-dasharray": dash.join(" "),
    opacity: runs[run].baseline ? 0.6 : 1,
  }));
}

function chipOf(run) {
  const { label: shown, baseline } = runs[run];
  const properties = {
    "data-run": String(run),
    "data-testid": "chip",
    "aria-pressed": String(!chosen.hidden.has(run)),
    title: `${shown}: click to hide or show, Shift-click to see it alone`,
    click: (event) => toggle(run, event.shiftKey),
  };
  return button("chip", properties, swatch(run), span("name", shown), baseline ? span("role", "baseline") : null);
}

function fillLegend() {
  const chips = drawnRuns.map(chipOf);
  if (drawnRuns.length > 8) {
    const hide = () => show(new Set(drawnRuns));
    chips.unshift(button("chip plain", { "data-testid": "show-all", click: () => show(new Set()) }, "Show all"),
      button("chip plain", { "data-testid": "hide-all", click: hide }, "Hide all"));
  }
  byId("legend").replaceChildren(...chips);
}

function axisOption(axis) {
  const there = axisChoices().includes(axis);
  const properties = {
    type: "radio", name: "axis", value: axis, "data-testid": `axis-${axis}`, checked: axis === chosen.axis,
    disabled: !there, change: () => setAxis(axis),
  };
  const title = there ? null : `no run has logged its ${axis}`;
  return element("label", { title }, element("input", properties), span(null, axis));
}

function fillChoices() {
  const groups = new Map();
  metrics.forEach((metric, place) => {
    const group = metric.name.includes("/") ? metric.name.split("/")[0] : "other";
    if (!groups.has(group)) groups.set(group, element("optgroup", { label: group }));
    groups.get(group).append(element("option", { value: String(place) }, metric.name));
  });
  byId("metric").replaceChildren(...groups.values());
  byId("metric").value = String(chosen.metric);
  for (const old of byId("axis").querySelectorAll("label")) old.remove();
  byId("axis").append(...["step", "tokens", "time"].map(axisOption));
}

function fillOverview() {
  const compared = metrics.filter((metric) => metric.compared && metric.worst);
  compared.sort((a, b) => b.worst.value - a.worst.value);
  byId("overview").hidden = !compared.length;
  const rows = compared.map(({ name, worst }) => {
    const go = () => {
      select(name);
      byId("curves").scrollIntoView();
    };
    return element("tr", {}, element("th", { scope: "row" }, button("link", { click: go }, name)),
      cell("number", tiny(worst.value)), cell("number", String(worst.step)), cell(null, runs[worst.run].label));
  });
  const titles = headRow(["Metric", "Largest difference", "Step", "Run"], [1, 2]);
  byId("overview-table").replaceChildren(titles, element("tbody", {}, ...rows));
}

/* ---- Head -------------------------------------------------------------------------------------------------------- */

const VERDICTS = {
  agree: ["check", "Agree"],
  apart: ["cross", "Apart"],
  unproven: ["question", "Unproven"],
  none: ["dash", "Nothing compared"],
};

function detailsOf(texts) {
  if (texts.length <= 6) return texts.length ? listing(texts) : null;
  return element("details", {}, element("summary", {}, `${texts.length} details`), listing(texts));
}

function fillHead() {
  byId("title").textContent = head.title;
  byId("made").textContent = head.made;
  byId("footer").textContent = `rlexp ${head.version} · ${head.made} · charts by uPlot`;
  const { status, headline, details } = head.verdict;
  const [image, word] = VERDICTS[status] ?? VERDICTS.none;
  const first = element("span", { class: "word", "data-testid": "verdict-word" }, `${word}. `);
  byId("verdict").classList.add(`tone-${status in VERDICTS ? status : "none"}`);
  byId("verdict").replaceChildren(icon(image),
    element("div", {}, element("p", { class: "headline" }, first, headline), detailsOf(details)));
  byId("forced").hidden = !head.forced.length;
  byId("forced").replaceChildren(element("strong", {}, "Compared by force. "),
    "These must be equal for runs to be comparable, and differ here:", listing(head.forced));
  byId("notes").hidden = !head.notes.length;
  byId("notes").replaceChildren(element("h3", {}, "Notes"), listing(head.notes));
}

/* With --watch the page is written anew while runs go on: load it again, but not while it is being used. */
function watch() {
  if (!head.watch) return;
  const pause = button(null, { "data-testid": "pause", click: () => {
    chosen.paused = !chosen.paused;
    remember();
    tell();
  } });
  const tell = () => { pause.textContent = chosen.paused ? "Go on" : "Pause"; };
  tell();
  byId("watch").hidden = false;
  byId("watch").append(span(null, `Runs go on: this page loads itself again every ${seconds(head.watch)}.`), pause);
  let held = false;
  addEventListener("pointerdown", () => { held = true; });
  for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => { held = false; });
  setInterval(() => {
    if (!chosen.paused && !held && !document.hidden) location.reload();
  }, 1000 * head.watch);
}

/* ---- Cost -------------------------------------------------------------------------------------------------------- */

function bars({ title, testid, note, valueOf, text, whole }) {
  const listed = runs.filter((run) => run.status !== "skipped" || known(valueOf(run)));
  const values = listed.map(valueOf).filter(known);
  const most = Math.max(whole ?? 0, ...values);
  const share = (value) => `${most > 0 ? (100 * value) / most : 0}%`;
  const rows = listed.map((run) => {
    const value = valueOf(run);
    const kind = run.baseline ? "fill base" : "fill";
    const bar = known(value) ? element("div", { class: kind, style: { width: share(value) } }) : null;
    const mark = known(whole) ? element("div", { class: "mark", style: { left: share(whole) } }) : null;
    return element("li", {}, element("span", { class: "name", title: run.label }, run.label),
      element("div", { class: "track" }, bar, mark), span("figure", text(value)));
  });
  const many = runs.length > LONG;
  const list = element("ul", { class: many ? "bars many" : "bars", tabindex: many ? "0" : null }, ...rows);
  return element("section", { "data-testid": testid, "aria-label": title },
    element("h3", {}, title, span("sub", note)),
    values.length ? list : element("p", { class: "empty" }, "Not recorded."));
}

function fillCost() {
  const speed = { title: "Tokens per second", testid: "cost-tokens", note: "more is better", text: rate,
    valueOf: (run) => run.tokens_per_second };
  const time = { title: "Time per step", testid: "cost-step", note: "less is better", text: seconds,
    valueOf: (run) => run.step_seconds };
  const efficiency = { title: "Ring efficiency", testid: "cost-efficiency", text: percent, whole: 1,
    note: "against the baseline's speed, the dashed line", valueOf: (run) => run.efficiency };
  byId("speed").replaceChildren(bars(speed), bars(time), bars(efficiency));
  fillMemory();
}

const PHASES = ["data", "rollout", "reference", "forward", "backward", "optimizer"];

/* In the order of a step; those not foreseen come after. */
function phasesOf() {
  const names = new Set(runs.flatMap((run) => run.memory.flatMap((rank) => Object.keys(rank.peaks))));
  const others = [...names].filter((name) => !PHASES.includes(name)).sort();
  return [...PHASES.filter((name) => names.has(name)), ...others];
}

function largest(values) {
  const there = values.filter(known);
  return there.length ? Math.max(...there) : null;
}

function fillMemory() {
  const phases = phasesOf();
  const recorded = runs.filter((run) => run.memory.length || known(run.peak_bytes));
  if (!phases.length) {
    byId("memory").replaceChildren(bars({ title: "Peak memory", testid: "cost-memory", note: "the largest of the ranks",
      text: bytes, valueOf: (run) => run.peak_bytes }));
    return;
  }
  const heading = element("h3", {}, "Peak memory", span("sub", "by phase of a step, the largest of the ranks"));
  const peaksOf = (run) => [run.peak_bytes, ...run.memory.flatMap((rank) => Object.values(rank.peaks))];
  const most = largest(recorded.flatMap(peaksOf));
  const body = element("tbody", {}, ...recorded.flatMap((run) => memoryRows(run, phases, most)));
  const table = element("table", { id: "memory-table", "data-testid": "memory-table" },
    headRow(["Run", "Peak", ...phases]), body);
  const region = { class: "scroll framed", tabindex: "0", role: "region", "aria-label": "Peak memory" };
  const frame = element("div", region, table);
  lengthen(table, recorded.length);
  byId("memory").replaceChildren(heading, frame);
}

function memoryCell(value, most, top) {
  if (!known(value)) return cell("cell", MISSING);
  const bar = element("i", { style: { width: `${most > 0 ? (100 * value) / most : 0}%` } });
  return cell(top ? "cell top" : "cell", bytes(value), span("meter", bar));
}

function rankRow(rank, run, phases, most) {
  const peak = largest(Object.values(rank.peaks));
  return element("tr", { class: "rank", hidden: true }, element("th", { scope: "row" }, `rank ${rank.rank}`),
    memoryCell(peak, most, rank.rank === run.peak_rank),
    ...phases.map((phase) => memoryCell(rank.peaks[phase], most, false)));
}

/* A run's row, and those of its ranks, which open under it. */
function memoryRows(run, phases, most) {
  const peaks = phases.map((phase) => largest(run.memory.map((rank) => rank.peaks[phase])));
  const ranks = run.memory.map((rank) => rankRow(rank, run, phases, most));
  const open = (event) => {
    const hidden = !ranks[0].hidden;
    event.currentTarget.setAttribute("aria-expanded", String(!hidden));
    event.currentTarget.textContent = hidden ? "▸" : "▾";
    for (const row of ranks) row.hidden = hidden;
  };
  const said = { "data-testid": "expand", "aria-expanded": "false", "aria-label": `Ranks of ${run.label}` };
  const opener = ranks.length > 1 ? button("expand", { ...said, click: open }, "▸") : span("expand");
  const peak = memoryCell(largest([run.peak_bytes, ...peaks]), most, true);
  if (known(run.peak_rank)) peak.append(span("sub", `on rank ${run.peak_rank}`));
  const name = element("th", { scope: "row", class: "runlabel", title: run.label }, opener, run.label);
  const cells = phases.map((phase, place) => memoryCell(peaks[place], most, phase === run.peak_phase));
  return [element("tr", {}, name, peak, ...cells), ...ranks];
}

/* ---- Runs -------------------------------------------------------------------------------------------------------- */

const STATUS_ICONS = { finished: "check", running: "dot", stopped: "square", failed: "cross", skipped: "skip" };
const RANK_SIZES = [["world_size", "ranks"], ["ring_size", "ring"], ["dp_size", "dp"]];
const BATCH_SIZES = [["micro_batch_size", "micro-batch"], ["grad_acc", "accumulation"]];

function statusCells({ status, reason }) {
  const image = icon(STATUS_ICONS[status] ?? "dash");
  return [span(`status status-${status}`, image, ` ${status}`), reason ? span("reason", reason) : null];
}

function layoutCells({ sizes }) {
  const words = (those) => {
    const there = those.filter(([key]) => known(sizes[key]));
    return there.map(([key, word]) => `${word} ${sizes[key]}`).join(" · ");
  };
  const batch = words(BATCH_SIZES);
  return [span("whole", words(RANK_SIZES) || MISSING), batch ? span("sub whole", batch) : null];
}

function differenceCells(run) {
  if (run.baseline) return ["baseline"];
  const upto = known(run.compared_upto) ? `, up to step ${run.compared_upto}` : "";
  return [tiny(run.worst_difference), run.baseline_label ? span("sub", `to ${run.baseline_label}${upto}`) : null];
}

function peakCells(run) {
  if (!known(run.peak_bytes)) return [MISSING];
  const where = [run.peak_phase, known(run.peak_rank) ? `rank ${run.peak_rank}` : null].filter(known).join(", ");
  return [bytes(run.peak_bytes), where ? span("sub", where) : null];
}

function folderCells({ path }) {
  return [path ? element("div", { class: "path mono", title: path }, element("bdi", {}, path)) : MISSING];
}

/* Title, what it is sorted by, and what stands in it. */
const COLUMNS = [
  ["Status", null, statusCells],
  ["Layout", null, layoutCells],
  ["Steps", (run) => run.steps, (run) => [run.status === "skipped" && !run.steps ? MISSING : String(run.steps)]],
  ["Last loss", (run) => run.last_loss, (run) => [digits(run.last_loss)]],
  ...(runs.some((run) => known(run.last_score))
    ? [["Last score", (run) => run.last_score, (run) => [digits(run.last_score)]]] : []),
  ["Max difference", (run) => run.worst_difference, differenceCells],
  ["Tokens/s", (run) => run.tokens_per_second, (run) => [count(run.tokens_per_second)]],
  ["Efficiency", (run) => run.efficiency, (run) => [percent(run.efficiency)]],
  ["Peak memory", (run) => run.peak_bytes, peakCells],
  ["Folder", null, folderCells],
];

const sorted = { column: null, down: true };

/* Runs in the order that was chosen; those without a value last. */
function runOrder() {
  const order = runs.map((_, run) => run);
  if (sorted.column === null) return order;
  const valueOf = (run) => COLUMNS[sorted.column][1](runs[run]);
  const way = sorted.down ? -1 : 1;
  const missing = (run) => !known(valueOf(run));
  return order.sort((a, b) => missing(a) - missing(b) || way * (valueOf(a) - valueOf(b)) || a - b);
}

function runRow(run) {
  const { name, label: shown, baseline } = runs[run];
  const cells = COLUMNS.map(([, valueOf, cellsOf]) => cell(valueOf ? "number" : null, ...cellsOf(runs[run])));
  const title = element("th", { scope: "row", class: "runlabel", title: shown },
    curved[run] ? dot(run) : null, ` ${shown}`, baseline ? span("sub", "baseline") : null);
  return element("tr", { "data-run": name }, title, ...cells);
}

function fillRuns() {
  const titles = COLUMNS.map(([title, valueOf], place) => {
    if (valueOf === null) return column(null, title);
    const way = sorted.column === place ? (sorted.down ? "descending" : "ascending") : null;
    const sorter = button(null, { click: () => sortBy(place) }, title);
    return element("th", { scope: "col", class: "number sort", "aria-sort": way }, sorter);
  });
  const headings = element("thead", {}, element("tr", {}, column(null, "Run"), ...titles));
  const none = element("tr", {}, cell(null, "No runs."));
  const body = element("tbody", {}, ...(runs.length ? runOrder().map(runRow) : [none]));
  byId("runs-table").replaceChildren(runs.length ? headings : "", body);
  lengthen(byId("runs-table"), runs.length);
}

function sortBy(place) {
  sorted.down = sorted.column === place ? !sorted.down : true;
  sorted.column = place;
  fillRuns();
  byId("runs-table").tHead.rows[0].cells[place + 1].querySelector("button").focus();
}

/* ---- Configurations ---------------------------------------------------------------------------------------------- */

function markOf(row) {
  if (!row.differs) return cell("may", "same");
  return row.must_not ? cell("must-not", icon("cross"), " must not differ") : cell("may", "may differ");
}

/* A value is marked where it is another than its baseline's (or the first run's, where there is none). */
function configRow(row, baseOf) {
  const cells = row.values.map((value, run) => {
    const there = value !== "" && value !== MISSING;
    const other = row.differs && there && value !== row.values[baseOf[run]];
    return cell(other ? "other" : null, span("value mono", there ? value : MISSING));
  });
  return element("tr", { class: row.differs && row.must_not ? "breach" : null },
    element("th", { scope: "row", class: "mono" }, row.key), markOf(row), ...cells);
}

function fillConfig() {
  const rows = head.config.filter((row) => chosen.allKeys || row.differs);
  const differing = head.config.filter((row) => row.differs).length;
  byId("config-count").textContent = head.config.length ? `${differing} of ${head.config.length} keys differ` : "";
  byId("all-keys").checked = chosen.allKeys;
  const isBase = (run, other) => other.baseline && other.family === run.family;
  const baseOf = runs.map((run) => Math.max(0, runs.findIndex((other) => isBase(run, other))));
  const names = runs.map((run) => element("span", { class: "clamp", title: run.label }, run.label));
  const none = head.config.length ? "No key differs between the runs." : "No configuration was found beside the runs.";
  const empty = [element("tr", {}, cell(null, none))];
  const body = rows.length ? rows.map((row) => configRow(row, baseOf)) : empty;
  const headings = rows.length ? headRow(["Key", "", ...names]) : "";
  byId("config-table").replaceChildren(headings, element("tbody", {}, ...body));
  lengthen(byId("config-table"), rows.length);
}

/* ---- Start ------------------------------------------------------------------------------------------------------- */

const page = { ready: false, metric: null, axis: "step", charts: {}, select, setAxis };
window.rlexpReport = page;

function restyle() {
  fillLegend();
  fillRuns();
  draw();
}

function resize() {
  for (const u of bothCharts()) {
    const width = u.root.parentElement.clientWidth;
    if (width > 0 && width !== u.width) u.setSize({ width, height: u.height });
  }
}

function connect() {
  byId("metric").addEventListener("change", (event) => select(metrics[Number(event.target.value)].name));
  byId("zoom-in").addEventListener("click", () => zoomBy(0.5));
  byId("zoom-out").addEventListener("click", () => zoomBy(2));
  byId("reset").addEventListener("click", resetZoom);
  byId("all-keys").addEventListener("change", (event) => {
    chosen.allKeys = event.target.checked;
    remember();
    fillConfig();
  });
  for (const name of ["overlay", "difference"]) {
    byId(name).addEventListener("keydown", (event) => charts[name] && onKey(charts[name], event));
  }
  for (const query of ["(prefers-color-scheme: dark)", "print", "(max-width: 600px)"]) {
    matchMedia(query).addEventListener("change", restyle);
  }
  addEventListener("hashchange", () => {
    recall();
    fillChoices();
    fillConfig();
    restyle();
  });
  new ResizeObserver(resize).observe(byId("overlay"));
}

recall();
fillHead();
fillChoices();
fillLegend();
fillOverview();
fillCost();
fillRuns();
fillConfig();
byId("no-curves").hidden = metrics.length > 0;
byId("curves-body").hidden = metrics.length === 0;
draw();
connect();
watch();
page.ready = true;
})();
