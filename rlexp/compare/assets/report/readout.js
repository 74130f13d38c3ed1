/* ---- The table beside the charts --------------------------------------------------------------------------------- */

/* A run's point at x: its nearest one, and none beyond its ends. */
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

/* A long table scrolls inside its frame; a short one is shown whole. */
const LONG = 14;
const lengthen = (table, rows) => table.parentElement.classList.toggle("tall", rows > LONG);

const dot = (run) => element("span", { class: "dot", style: { background: colour(run) } });
