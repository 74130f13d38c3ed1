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

/* Fill in the texts around the charts. */
function describe() {
  const { metric, differences } = now;
  byId("overlay-title").textContent = metric.name;
  const without = drawnRuns.filter((run) => now.arrays.values[run] !== null && now.curves[run] === null).length;
  const which = "in each stretch those where the runs lie furthest apart and where a curve is most extreme. ";
  const sampled = metric.drawn < metric.total ? `${metric.drawn} of ${metric.total} steps drawn: ${which}` : "";
  const unclocked = without ? `${without} ${without === 1 ? "run has" : "runs have"} no ${now.axis} logged.` : "";
  byId("drawn").textContent = sampled + unclocked;
  byId("difference-figure").hidden = differences === null;
  byId("no-difference").hidden = differences !== null;
  byId("no-difference").textContent = metric.compared
    ? "No run has a baseline here, so no difference is drawn."
    : `${metric.name} is the layout's own metric and may differ between runs, so no difference is drawn.`;
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
    title: `${shown}: click to hide or show it, Shift-click to show it alone`,
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
