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

/* On CPU the resident memory is mostly the process's. Live tensors, where they were counted, are the run's. */
const COUNTED = runs.some((run) => run.tensors !== null);
const memoryOf = (run) => ({ bytes: run.peak_bytes, phase: run.peak_phase, rank: run.peak_rank });
const tensorsOf = (run) => run.tensors ?? { bytes: null, phase: null, rank: null };
const shownOf = COUNTED ? tensorsOf : memoryOf;
const peaksOf = (rank) => (COUNTED ? rank.tensors : rank.peaks);
const PEAK = COUNTED ? "Peak of live tensors" : "Peak memory";

/* The phases in the order of a step, then any others. */
function phasesOf() {
  const names = new Set(runs.flatMap((run) => run.memory.flatMap((rank) => Object.keys(peaksOf(rank)))));
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
    byId("memory").replaceChildren(bars({ title: PEAK, testid: "cost-memory", note: "the largest of the ranks",
      text: bytes, valueOf: (run) => shownOf(run).bytes }));
    return;
  }
  const heading = element("h3", {}, PEAK, span("sub", "by phase of a step, the largest of the ranks"));
  const allOf = (run) => [shownOf(run).bytes, ...run.memory.flatMap((rank) => Object.values(peaksOf(rank)))];
  const most = largest(recorded.flatMap(allOf));
  const body = element("tbody", {}, ...recorded.flatMap((run) => memoryRows(run, phases, most)));
  const table = element("table", { id: "memory-table", "data-testid": "memory-table" },
    headRow(["Run", "Peak", ...phases, ...(COUNTED ? ["resident"] : [])]), body);
  const region = { class: "scroll framed", tabindex: "0", role: "region", "aria-label": PEAK };
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
  const peak = largest(Object.values(peaksOf(rank)));
  return element("tr", { class: "rank", hidden: true }, element("th", { scope: "row" }, `rank ${rank.rank}`),
    memoryCell(peak, most, rank.rank === shownOf(run).rank),
    ...phases.map((phase) => memoryCell(peaksOf(rank)[phase], most, false)),
    ...residentCells(largest(Object.values(rank.peaks))));
}

function residentCells(value) {
  return COUNTED ? [cell("cell", known(value) ? bytes(value) : MISSING)] : [];
}

/* A run's row, and the rows of its ranks, which open below it. */
function memoryRows(run, phases, most) {
  const peaks = phases.map((phase) => largest(run.memory.map((rank) => peaksOf(rank)[phase])));
  const ranks = run.memory.map((rank) => rankRow(rank, run, phases, most));
  const open = (event) => {
    const hidden = !ranks[0].hidden;
    event.currentTarget.setAttribute("aria-expanded", String(!hidden));
    event.currentTarget.textContent = hidden ? "▸" : "▾";
    for (const row of ranks) row.hidden = hidden;
  };
  const said = { "data-testid": "expand", "aria-expanded": "false", "aria-label": `Ranks of ${run.label}` };
  const opener = ranks.length > 1 ? button("expand", { ...said, click: open }, "▸") : span("expand");
  const shown = shownOf(run);
  const peak = memoryCell(largest([shown.bytes, ...peaks]), most, true);
  if (known(shown.rank)) peak.append(span("sub", `on rank ${shown.rank}`));
  const name = element("th", { scope: "row", class: "runlabel", title: run.label }, opener, run.label);
  const cells = phases.map((phase, place) => memoryCell(peaks[place], most, phase === shown.phase));
  const all = largest([run.peak_bytes, ...run.memory.flatMap((rank) => Object.values(rank.peaks))]);
  return [element("tr", {}, name, peak, ...cells, ...residentCells(all)), ...ranks];
}
