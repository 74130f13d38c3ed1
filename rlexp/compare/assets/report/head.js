/* ---- Head -------------------------------------------------------------------------------------------------------- */

const VERDICTS = {
  agree: ["check", "Agree"],
  apart: ["cross", "Apart"],
  unproven: ["question", "Unproven"],
  none: ["dash", "Nothing compared"],
};

function detailsOf(texts) {
  if (texts.length <= 6) return texts.length ? listing(texts) : null;
  return element("details", {}, element("summary", {}, `${texts.length} details`), listing(texts));
}

function fillHead() {
  byId("title").textContent = head.title;
  byId("made").textContent = head.made;
  byId("footer").textContent = `rlexp ${head.version} · ${head.made} · charts by uPlot`;
  const { status, headline, details } = head.verdict;
  const [image, word] = VERDICTS[status] ?? VERDICTS.none;
  const first = element("span", { class: "word", "data-testid": "verdict-word" }, `${word}. `);
  byId("verdict").classList.add(`tone-${status in VERDICTS ? status : "none"}`);
  byId("verdict").replaceChildren(icon(image),
    element("div", {}, element("p", { class: "headline" }, first, headline), detailsOf(details)));
  byId("forced").hidden = !head.forced.length;
  byId("forced").replaceChildren(element("strong", {}, "Compared by force. "),
    "Comparable runs have these settings in common. Here they differ:", listing(head.forced));
  byId("notes").hidden = !head.notes.length;
  byId("notes").replaceChildren(element("h3", {}, "Notes"), listing(head.notes));
}

/* With --watch the page is written again while runs go on. Reload it, but not while the user holds the pointer. */
function watch() {
  if (!head.watch) return;
  const pause = button(null, { "data-testid": "pause", click: () => {
    chosen.paused = !chosen.paused;
    remember();
    tell();
  } });
  const tell = () => { pause.textContent = chosen.paused ? "Resume" : "Pause"; };
  tell();
  byId("watch").hidden = false;
  byId("watch").append(span(null, `Runs go on: this page reloads every ${seconds(head.watch)}.`), pause);
  let held = false;
  addEventListener("pointerdown", () => { held = true; });
  for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => { held = false; });
  setInterval(() => {
    if (!chosen.paused && !held && !document.hidden) location.reload();
  }, 1000 * head.watch);
}
