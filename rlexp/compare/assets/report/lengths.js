/* ---- Held-out rows by length ------------------------------------------------------------------------------------- */

const PLOT = { width: 720, height: 240, left: 40, right: 8, top: 10, bottom: 26 };
const inside = { width: PLOT.width - PLOT.left - PLOT.right, height: PLOT.height - PLOT.top - PLOT.bottom };
const heightOf = (share) => PLOT.top + (1 - share) * inside.height;

function lengthsShown() {
  const shown = runs.map((run, place) => ({ run, place })).filter(({ run }) => run.lengths.length);
  const names = [...new Set(shown.flatMap(({ run }) => run.lengths.map((part) => part.name)))];
  names.sort((one, other) => parseInt(one, 10) - parseInt(other, 10));
  return { shown, names };
}

function gridLine(share) {
  const y = heightOf(share);
  return [drawing("line", { class: "grid", x1: PLOT.left, x2: PLOT.width - PLOT.right, y1: y, y2: y }),
    drawing("text", { x: PLOT.left - 6, y: y + 4, "text-anchor": "end" }, String(share))];
}

/* A run's accuracy in each part: a point, and a line from end to end of its interval. */
function lengthMarks({ run, place }, order, names, count) {
  const step = inside.width / names.length;
  const shift = count > 1 ? (order / (count - 1) - 0.5) * Math.min(0.5, 0.06 * count) * step : 0;
  const stroke = colour(place);
  return run.lengths.filter((part) => known(part.accuracy)).flatMap((part) => {
    const x = PLOT.left + (names.indexOf(part.name) + 0.5) * step + shift;
    const said = `${run.label}, ${part.name} tokens: ${percent(part.accuracy)} of ${part.examples}`;
    return [drawing("line", { stroke, "stroke-width": 2, x1: x, x2: x, y1: heightOf(part.accuracy_low),
      y2: heightOf(part.accuracy_high) }),
    drawing("circle", { fill: stroke, cx: x, cy: heightOf(part.accuracy), r: 4 }, drawing("title", {}, said))];
  });
}

function lengthRow(run, part) {
  const interval = known(part.accuracy) ? `${percent(part.accuracy_low)} to ${percent(part.accuracy_high)}` : MISSING;
  return element("tr", {}, element("th", { scope: "row", class: "runlabel", title: run.label }, run.label),
    cell("number", part.name), cell("number", String(part.examples)), cell("number", digits(part.loss)),
    cell("number", percent(part.accuracy)), cell("number", interval));
}

function fillLengths() {
  const { shown, names } = lengthsShown();
  byId("lengths").hidden = shown.length === 0;
  if (!shown.length) return;
  const step = inside.width / names.length;
  const labels = names.map((name, place) => drawing("text", { x: PLOT.left + (place + 0.5) * step,
    y: PLOT.height - 6, "text-anchor": "middle" }, name));
  const marks = shown.flatMap((each, order) => lengthMarks(each, order, names, shown.length));
  const said = { class: "lengths", viewBox: `0 0 ${PLOT.width} ${PLOT.height}`, role: "img",
    "aria-label": "Accuracy by length" };
  byId("lengths-plot").replaceChildren(drawing("svg", said, ...[0, 0.25, 0.5, 0.75, 1].flatMap(gridLine), ...labels,
    ...marks));
  const rows = shown.flatMap(({ run }) => run.lengths.map((part) => lengthRow(run, part)));
  byId("lengths-table").replaceChildren(headRow(["Run", "Tokens", "Rows", "Loss", "Accuracy", "95 % interval"],
    [1, 2, 3, 4, 5]), element("tbody", {}, ...rows));
}
