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

/* A metric's steps, its floor, and each run's values and differences; null where there are none. */
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

/* The knots of a run's tokens and time; null for a column that does not grow from its first value to its last. */
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

/* The last place in `sorted` whose value is at most `wanted`; −1 if there is none. */
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

/* Tokens or seconds at a step: linear between the knots, and beyond the last knot as between the last two. */
function reading({ steps, values }, step) {
  if (steps.length === 1) return values[0];
  const place = Math.min(Math.max(placeOf(steps, step), 0), steps.length - 2);
  const share = (step - steps[place]) / (steps[place + 1] - steps[place]);
  return values[place] + share * (values[place + 1] - values[place]);
}
