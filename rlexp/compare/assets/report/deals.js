/* ---- What each rank computes ------------------------------------------------------------------------------------- */

/* Each rank has a row: at the left its work, at the right its time as a multiple of the mean rank's. */
const DEAL = { width: 1000, label: 58, work: 560, gap: 28, top: 24, bottom: 44 };
const DEAL_TIMES = { left: DEAL.label + DEAL.work + DEAL.gap, estimated: 905, measured: 990 };
const FEW_DEALS = 4; // so many are drawn at once; of more, each is drawn when it is opened
const READABLE = 15; // the height of a row that has room for text
const NARROW = 1.5; // a part that would be narrower is drawn together with the next
const WIDEST = 6; // the class of width 64 and above

const estimateOf = (rank) => rank.work + rank.sending;
const measuredOf = (rank) => rank.seconds;
const times = (value) => (known(value) ? value.toFixed(2) : MISSING);
const widthClass = (width) => Math.min(WIDEST, Math.floor(Math.log2(width)));

function widthName(kind) {
  if (kind === 0) return "1";
  return kind === WIDEST ? `${2 ** kind} and more` : `${2 ** kind}–${2 ** (kind + 1) - 1}`;
}

/* Each value as a multiple of the mean; null where it is not known. */
function timesMean(values) {
  const there = values.filter(known);
  const mean = there.reduce((sum, value) => sum + value, 0) / there.length;
  return values.map((value) => (known(value) && mean > 0 ? value / mean : null));
}

function dealHeading(ranks) {
  const slowest = (valueOf) => times(largest(timesMean(ranks.map(valueOf))));
  const timed = ranks.filter((rank) => known(rank.seconds)).length;
  const some = timed < ranks.length ? ` (${timed} of ${ranks.length} ranks)` : "";
  const measured = timed ? `measured once: ${slowest(measuredOf)} times${some}` : "the time was not measured";
  return `estimated: the slowest rank takes ${slowest(estimateOf)} times the mean of all; ${measured}`;
}

/* The widest sequences first. */
function joinedParts(parts, scale) {
  const joined = [];
  for (const [width, tokens, work] of [...parts].sort(([one], [other]) => other - one)) {
    const last = joined.at(-1);
    if (last && last.width === width && last.work * scale < NARROW) {
      last.tokens += tokens;
      last.work += work;
    } else joined.push({ width, tokens, work });
  }
  return joined;
}

/* One rank's bar: its parts, its other work, and the keys that arrive. */
function dealBar(rank, number, { scale, y, thick, hatch }) {
  const shareOf = (work) => percent(rank.work > 0 ? work / rank.work : null);
  const pieces = joinedParts(rank.parts, scale).map(({ width, tokens, work }) => ({ work,
    look: { class: `part width-${widthClass(width)}` },
    said: `rank ${number}, width ${width}: ${count(tokens)} tokens, ${shareOf(work)} of the rank's work` }));
  const other = rank.work - pieces.reduce((sum, piece) => sum + piece.work, 0);
  pieces.push({ work: Math.max(0, other), look: { class: "other" },
    said: `rank ${number}, other work: ${shareOf(other)} of the rank's work` },
  { work: rank.sending, look: { class: "sending", fill: `url(#${hatch})` },
    said: `rank ${number}, keys that arrive: as much as ${shareOf(rank.sending)} of the rank's work` });
  let x = DEAL.label;
  return pieces.filter(({ work }) => work > 0).map(({ work, look, said }) => {
    const width = work * scale;
    x += width;
    const thin = width < 2 * NARROW ? { stroke: "none" } : {};
    return drawing("rect", { ...look, style: thin, x: x - width, y, width, height: thick }, drawing("title", {}, said));
  });
}

/* Lines of a pattern for what has no colour of its own. */
const hatching = (id) => drawing("defs", {}, drawing("pattern",
  { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
  drawing("rect", { class: "ground", width: 5, height: 5 }), drawing("rect", { class: "lines", width: 2, height: 5 })));

/* Round numbers from 0 up to `most`, about four steps apart. */
function workTicks(most) {
  if (!(most > 0)) return [0];
  const power = 10 ** Math.floor(Math.log10(most / 4));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= most / 4);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, place) => place * step);
}

function workAxis(ranks, scale, most, bottom) {
  const mean = ranks.reduce((sum, rank) => sum + estimateOf(rank), 0) / ranks.length;
  const across = (x, kind) => drawing("line", { class: kind, x1: x, x2: x, y1: DEAL.top - 4, y2: bottom });
  const ticks = workTicks(most).flatMap((value) => {
    const x = DEAL.label + value * scale;
    return [across(x, "grid"), drawing("text", { x, y: bottom + 16, "text-anchor": "middle" }, count(value))];
  });
  const at = DEAL.label + mean * scale;
  const title = drawing("text", { x: DEAL.label + DEAL.work / 2, y: bottom + 36, "text-anchor": "middle" },
    "estimated work, in query-key pairs");
  const line = mean > 0 ? [across(at, "mean"),
    drawing("text", { x: at, y: DEAL.top - 9, "text-anchor": "middle" }, "mean")] : [];
  return { under: [...ticks, title], over: line };
}

/* The scale of the times: 1 is in it, and 0.9 and 1.1. */
function timesScale(values, width) {
  const there = values.filter(known);
  const low = Math.floor(Math.min(0.9, ...there) * 10) / 10;
  const high = Math.ceil(Math.max(1.1, ...there) * 10 - 1e-9) / 10;
  const place = (value) => DEAL_TIMES.left + 8 + ((value - low) / (high - low)) * (width - 16);
  const apart = 0.22 * (high - low); // nearer to 1, a number would cover that of 1
  return { place, ticks: [low, 1, high].filter((each) => each === 1 || Math.abs(each - 1) > apart) };
}

function timesAxis({ place, ticks }, bottom, width) {
  const lines = ticks.flatMap((value) => {
    const x = place(value);
    return [drawing("line", { class: value === 1 ? "mean" : "grid", x1: x, x2: x, y1: DEAL.top - 4, y2: bottom }),
      drawing("text", { x, y: bottom + 16, "text-anchor": "middle" }, value === 1 ? "1" : value.toFixed(1))];
  });
  return [...lines, drawing("text", { x: DEAL_TIMES.left + width / 2, y: bottom + 36, "text-anchor": "middle" },
    "time / the mean rank's")];
}

/* A rank's two times: points, and numbers where there is room. */
function timesOfRank(number, values, place, { middle, high }) {
  const r = Math.max(1.5, Math.min(4.5, high / 2 - 0.5));
  return Object.entries(values).filter(([, value]) => known(value)).flatMap(([kind, value]) => {
    const said = `rank ${number}, ${kind}: ${times(value)} times the mean`;
    const point = drawing("circle", { class: kind, cx: place(value), cy: middle, r }, drawing("title", {}, said));
    const text = { class: "times", x: DEAL_TIMES[kind], y: middle + 4, "text-anchor": "end" };
    return high < READABLE ? [point] : [point, drawing("text", text, times(value))];
  });
}

function dealPicture({ run, place }) {
  const { ranks } = run.deal;
  const high = Math.max(2, Math.min(24, 530 / ranks.length));
  const bottom = DEAL.top + high * ranks.length;
  const most = Math.max(...ranks.map(estimateOf));
  const scale = most > 0 ? DEAL.work / most : 0;
  const roomy = high >= READABLE;
  const width = (roomy ? DEAL_TIMES.estimated - 70 : DEAL.width - 8) - DEAL_TIMES.left;
  const [estimated, measured] = [estimateOf, measuredOf].map((valueOf) => timesMean(ranks.map(valueOf)));
  const timed = timesScale([...estimated, ...measured], width);
  const every = Math.ceil(READABLE / high); // so many rows share a label
  const hatch = `hatch-${place}`;
  const rows = ranks.map((rank, number) => {
    const y = DEAL.top + number * high;
    const middle = y + high / 2;
    const label = number % every ? [] : [drawing("text", { x: DEAL.label - 8, y: middle + 4, "text-anchor": "end" },
      `rank ${number}`)];
    const thick = Math.max(1, high - (roomy ? 6 : 1));
    const own = { estimated: estimated[number], measured: measured[number] };
    return drawing("g", {}, ...label, ...dealBar(rank, number, { scale, y: y + (high - thick) / 2, thick, hatch }),
      ...timesOfRank(number, own, timed.place, { middle, high }));
  });
  const titles = ["estimated", ...(measured.some(known) ? ["measured"] : [])].filter(() => roomy).map((kind) =>
    drawing("text", { x: DEAL_TIMES[kind], y: DEAL.top - 9, "text-anchor": "end" }, kind));
  const { under, over } = workAxis(ranks, scale, most, bottom);
  const said = { class: "deal", viewBox: `0 0 ${DEAL.width} ${bottom + DEAL.bottom}`, role: "img",
    "aria-label": `What each rank of ${run.label} computes` };
  const frame = { class: "scroll tall", tabindex: "0", role: "region", "aria-label": said["aria-label"] };
  return element("div", frame, drawing("svg", said, hatching(hatch), ...under, ...timesAxis(timed, bottom, width),
    ...rows, ...over, ...titles));
}

function dealFigure(shown, open) {
  const { run } = shown;
  let drawn = false;
  const details = element("details", { class: "deal", open, "data-testid": "deal" },
    element("summary", {}, element("strong", {}, run.label),
      ` · step ${run.deal.step} · ${dealHeading(run.deal.ranks)}`));
  const fillIn = () => {
    if (details.open && !drawn) details.append(dealPicture(shown));
    drawn ||= details.open;
  };
  details.addEventListener("toggle", fillIn);
  fillIn();
  return details;
}

function dealKey(deals) {
  const parts = deals.flatMap(({ ranks }) => ranks.flatMap((rank) => rank.parts));
  const kinds = [...new Set(parts.map(([width]) => widthClass(width)))].sort((one, other) => one - other);
  const box = (look, ...before) => drawing("svg", { class: "deal", width: 16, height: 12, "aria-hidden": "true" },
    ...before, drawing("rect", { width: 16, height: 12, ...look }));
  const point = (kind) => drawing("svg", { class: "deal", width: 12, height: 12, "aria-hidden": "true" },
    drawing("circle", { class: kind, cx: 6, cy: 6, r: 4.5 }));
  const timed = deals.some(({ ranks }) => ranks.some((rank) => known(rank.seconds)));
  return [span(null, "Width"), ...kinds.map((kind) => span(null, box({ class: `width-${kind}` }), widthName(kind))),
    span(null, box({ class: "other" }), "other work"),
    span(null, box({ class: "sending", fill: "url(#hatch-key)" }, hatching("hatch-key")), "keys that arrive"),
    span(null, point("estimated"), "estimated time"),
    timed ? span(null, point("measured"), "measured time") : null];
}

function fillDeals() {
  const shown = runs.map((run, place) => ({ run, place })).filter(({ run }) => known(run.deal));
  byId("deals").hidden = shown.length === 0;
  if (!shown.length) return;
  byId("deals-key").replaceChildren(...dealKey(shown.map(({ run }) => run.deal)).filter(known));
  byId("deals-plots").replaceChildren(...shown.map((each) => dealFigure(each, shown.length <= FEW_DEALS)));
}
