/* ---- Start ------------------------------------------------------------------------------------------------------- */

const page = { ready: false, metric: null, axis: "step", charts: {}, select, setAxis };
window.rlexpReport = page;

function restyle() {
  fillLegend();
  fillLengths();
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
fillLengths();
fillDeals();
fillCost();
fillRuns();
fillConfig();
byId("no-curves").hidden = metrics.length > 0;
byId("curves-body").hidden = metrics.length === 0;
draw();
connect();
watch();
page.ready = true;
