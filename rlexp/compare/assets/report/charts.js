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

/* Labels with enough decimals that different marks look different: 10.02k and 10.04k. */
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
    // The other chart follows the mouse. `follow` passes on a zoom, also one made by keys.
    cursor: {
      sync: { key: "report", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      drag: { x: true, y: false, dist: 4 },
      points: { show: few, size: 6 },
    },
    hooks: { setScale: [follow], setCursor: [cursorMoved] },
  };
}

/* Points are shown if the run has so few that they stand apart, and where they have no neighbour. */
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
  const alpha = width > 3.5 ? 0.5 : 1; // a pale baseline leaves the lines over it visible
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
  charts.overlay.runs = drawn; // the runs of its series, from `first` on
  charts.overlay.first = 1;
}

/* A single step stands in the middle. */
function wholeOrOne(_, min, max) {
  return min === max ? [min - 1, max + 1] : [min, max];
}

/* Marks at whole decades, about eight at most, and at the row of zeros. */
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
  // The row of zeros has a fixed height, given here in decades of the axis.
  const row = shown.zeros ? ((shown.top - shown.low) * 26) / (height - 110) : 0;
  const bottom = shown.low - row;
  const drawn = drawOrder.filter((run) => differences.lines[run] !== null);
  const width = drawn.length > 8 ? 1 : 1.6;
  const curves = drawn.map((run) => seriesOf(run, differences.lines[run], width, []));
  const floor = differences.floor ?? [];
  const floorLine = now.xs.map((_, place) => (floor[place] === -Infinity ? shown.low : floor[place]));
  // uPlot needs a series with values for its axis: `always` has them, even if all runs are hidden or zero.
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

/* Write a label into a chart, readable over its lines. */
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

/* Draw what lines cannot show: exact zeros, the name of the floor, and the largest difference. */
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

/* Draw a mark for each zero. The runs have lanes, so that none hides another. */
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

/* The place of the largest difference along x, if that step is drawn. */
function worstPlace() {
  const { worst } = now.metric;
  const curve = worst ? now.curves[worst.run] : null;
  if (!curve) return null;
  const number = curve.points.at.findIndex((at) => now.arrays.steps[at] === worst.step);
  return number < 0 ? null : curve.places[number];
}
