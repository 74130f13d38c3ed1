/* ---- Curves of one metric along one axis ------------------------------------------------------------------------- */

const TIME_UNITS = [[7200, 3600, "h"], [180, 60, "min"], [0, 1, "s"]];

/* The points of each run: their x, and their places among the drawn steps. */
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

/* All x of all runs, sorted, each once. */
function union(points) {
  const all = Float64Array.from(points.flatMap((each) => (each === null ? [] : each.x))).sort();
  return Array.from(all).filter((x, place) => place === 0 || x !== all[place - 1]);
}

/* The line breaks at a gap longer than three times the run's median gap. Shorter gaps are its usual distance. */
function longGap(points) {
  const gaps = points.at.slice(1).map((at, place) => at - points.at[place]).sort((a, b) => a - b);
  return gaps.length ? 3 * gaps[gaps.length >> 1] : Infinity;
}

/* A line for uPlot: undefined where only another run has this x, null where the line breaks (at a value that cannot be
   drawn, or in a long gap). `lone` has the points that stand alone, which a line would not show. */
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

/* Differences as powers of ten. Exact zeros have none, and are kept apart for the row at the bottom. */
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

/* The decades shown, which are the same at every zoom. */
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
