/* ---- Colours and lines ------------------------------------------------------------------------------------------- */

/* The colours of Okabe and Ito, darkened or lightened to stand out from the page. */
const FEW = {
  light: ["#0072B2", "#D55E00", "#009E73", "#BC5A93", "#C98A00", "#3D9BD3", "#7A6A00", "#55606B"],
  dark: ["#4DA6E0", "#F28A45", "#2FC79C", "#E39CC8", "#F0B93A", "#94D0F5", "#D8CB55", "#B4BEC8"],
};
const DASHES = [[], [9, 5], [3, 3], [13, 4, 3, 4], [6, 6], [2, 5]];

const isDark = () => !matchMedia("print").matches && matchMedia("(prefers-color-scheme: dark)").matches;
const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const curved = runs.map((_, run) => metrics.some((metric) => metric.values[run]));
const drawnRuns = runs.map((_, run) => run).filter((run) => curved[run]);
const bases = drawnRuns.filter((run) => runs[run].baseline);
const others = drawnRuns.filter((run) => !runs[run].baseline);

/* A baseline is drawn first and widest, the others over it, thinner and dashed, so that the baseline stays visible. */
const drawOrder = [...bases, ...others];

function colour(run) {
  const place = drawOrder.indexOf(run);
  if (place < 0) return tone("muted");
  if (drawnRuns.length <= 8) return FEW[isDark() ? "dark" : "light"][place];
  const lightness = (isDark() ? [66, 76, 58] : [38, 48, 30])[place % 3];
  return `hsl(${Math.round((205 + place * 137.508) % 360)} 68% ${lightness}%)`;
}

function pen(run) {
  // If there are many lines, each is one pixel wide: without a GPU, wider ones take three times as long to draw.
  const crowd = drawnRuns.length > 8;
  if (runs[run].baseline) return { width: crowd ? 4 : 7, dash: [] };
  const place = others.indexOf(run);
  return { width: crowd ? 1 : Math.max(1.5, 3.2 - 0.7 * place), dash: DASHES[place % DASHES.length] };
}
