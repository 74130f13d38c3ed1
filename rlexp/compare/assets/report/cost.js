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

/* The phases in the order of a step, then any others. */
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

/* A run's row, and the rows of its ranks, which open below it. */
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
