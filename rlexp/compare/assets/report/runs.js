/* ---- Runs -------------------------------------------------------------------------------------------------------- */

const STATUS_ICONS = { finished: "check", running: "dot", stopped: "square", failed: "cross", skipped: "skip" };
const RANK_SIZES = [["world_size", "ranks"], ["ring_size", "ring"], ["dp_size", "dp"]];
const BATCH_SIZES = [
  ["micro_batch_size", "micro-batch"],
  ["max_tokens_per_micro_batch", "tokens of a rank"],
  ["grad_acc", "accumulation"],
];

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

function peakCells({ bytes: size, phase, rank }) {
  if (!known(size)) return [MISSING];
  const where = [phase, known(rank) ? `rank ${rank}` : null].filter(known).join(", ");
  return [bytes(size), where ? span("sub", where) : null];
}

/* The run's own peak, and below it the process's. */
function tensorCells(run) {
  const resident = known(run.peak_bytes) ? span("sub", `${bytes(run.peak_bytes)} resident`) : null;
  return [...peakCells(tensorsOf(run)), resident];
}

function folderCells({ path }) {
  return [path ? element("div", { class: "path mono", title: path }, element("bdi", {}, path)) : MISSING];
}

/* Each column's title, the value it is sorted by (null: not sorted), and the content of its cells. */
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
  ...(runs.some((run) => known(run.predicted_bytes))
    ? [["Predicted memory", (run) => run.predicted_bytes, (run) => [bytes(run.predicted_bytes)]]] : []),
  COUNTED
    ? ["Peak tensors", (run) => tensorsOf(run).bytes, tensorCells]
    : ["Peak memory", (run) => run.peak_bytes, (run) => peakCells(memoryOf(run))],
  ["Folder", null, folderCells],
];

const sorted = { column: null, down: true };

/* The runs in the chosen order; those without a value come last. */
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
