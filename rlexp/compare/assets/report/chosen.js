/* ---- What is chosen ---------------------------------------------------------------------------------------------- */

/* The address keeps the choices after its #, through the reloads of --watch and in a link. */
const chosen = { metric: 0, axis: "step", hidden: new Set(), allKeys: false, paused: false };

function recall() {
  const kept = new URLSearchParams(location.hash.slice(1));
  const named = metrics.findIndex((metric) => metric.name === kept.get("metric"));
  const usual = metrics.findIndex((metric) => metric.name === "train/loss");
  const compared = metrics.findIndex((metric) => metric.compared);
  chosen.metric = [named, usual, compared, 0].find((place) => place >= 0);
  chosen.axis = axisChoices().includes(kept.get("x")) ? kept.get("x") : "step";
  const hidden = kept.getAll("hide");
  chosen.hidden = new Set(runs.map((_, place) => place).filter((place) => hidden.includes(runs[place].name)));
  chosen.allKeys = kept.has("keys");
  chosen.paused = kept.has("paused");
}

function remember() {
  const kept = new URLSearchParams();
  if (metrics.length) kept.set("metric", metrics[chosen.metric].name);
  if (chosen.axis !== "step") kept.set("x", chosen.axis);
  for (const run of chosen.hidden) kept.append("hide", runs[run].name);
  if (chosen.allKeys) kept.set("keys", "all");
  if (chosen.paused) kept.set("paused", "yes");
  history.replaceState(null, "", `#${kept}`);
}

const hasClock = (axis) => runs.some((_, run) => clockOf(run)[axis] !== null);
const axisChoices = remembered(() => ["step", ...["tokens", "time"].filter(hasClock)]);
