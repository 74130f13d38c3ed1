/* ---- Zoom and cursor --------------------------------------------------------------------------------------------- */

const bothCharts = () => [charts.overlay, charts.difference].filter(known);

/* When one chart is zoomed, zoom the other too. */
function follow(u, key) {
  if (key !== "x" || !bothCharts().includes(u)) return;
  const { min, max } = u.scales.x;
  for (const other of bothCharts()) {
    if (other !== u && (other.scales.x.min !== min || other.scales.x.max !== max)) other.setScale("x", { min, max });
  }
  const [whole, end] = extent();
  zoom = min > whole || max < end ? { min, max } : null;
  byId("reset").disabled = zoom === null;
}

function extent() {
  return wholeOrOne(null, now.xs[0] ?? 0, now.xs.at(-1) ?? 1);
}

function zoomTo(min, max) {
  const [whole, end] = extent();
  const limits = { min: Math.max(min, whole), max: Math.min(max, end) };
  if (limits.max > limits.min) for (const u of bothCharts()) u.setScale("x", limits);
}

/* Zoom by a factor around the cursor. */
function zoomBy(factor) {
  const u = charts.overlay;
  if (!u) return;
  const { min, max } = u.scales.x;
  const about = known(u.cursor.idx) && u.cursor.left >= 0 ? now.xs[u.cursor.idx] : (min + max) / 2;
  zoomTo(about - (about - min) * factor, about + (max - about) * factor);
}

function resetZoom() {
  zoomTo(...extent());
}

let awaited = false;

/* Fill the table once per frame, although many moves come in one frame. */
function cursorMoved() {
  if (awaited) return;
  awaited = true;
  requestAnimationFrame(() => {
    awaited = false;
    if (now) fillReadout();
  });
}

function moveCursor(u, place) {
  const left = u.valToPos(now.xs[place], "x");
  u.setCursor({ left, top: u.over.clientHeight / 2 }, true, true);
  requestAnimationFrame(() => {
    const rows = [...byId("readout-body").rows].slice(0, 6).map((row) => row.innerText);
    byId("spoken").textContent = [byId("readout-title").textContent, ...rows].join("; ");
  });
}

function onKey(u, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const [first, last] = u.series[0].idxs;
  const from = u.cursor.left >= 0 && known(u.cursor.idx) ? u.cursor.idx : last;
  const stride = event.shiftKey ? 10 : 1;
  const moves = { ArrowLeft: from - stride, ArrowRight: from + stride, Home: first, End: last };
  const [nearer, further] = [() => zoomBy(0.5), () => zoomBy(2)];
  const actions = { "+": nearer, "=": nearer, "-": further, 0: resetZoom, Escape: resetZoom };
  if (event.key in moves) moveCursor(u, Math.min(Math.max(moves[event.key], first), last));
  else if (event.key in actions) actions[event.key]();
  else return;
  event.preventDefault();
}

function onTouch(u, event) {
  const [touch] = event.touches;
  const box = u.over.getBoundingClientRect();
  const left = Math.min(Math.max(touch.clientX - box.left, 0), box.width);
  u.setCursor({ left, top: touch.clientY - box.top }, true, true);
}
