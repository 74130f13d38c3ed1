/* The report page draws the data that page.py has put into it. Names and messages are text: `element` makes text nodes
   of them, and nothing here writes markup. Arrays are decoded when they are first needed. */
const MISSING = "–";
const MOST_ROWS = 12; // the most runs in the table beside the charts
const byId = (id) => document.getElementById(id);
const head = JSON.parse(byId("report-head").textContent);
const { runs, metrics } = head;
const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

/* ---- Elements ---------------------------------------------------------------------------------------------------- */

function fill(node, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (!known(value) || value === false) continue;
    if (key === "style") for (const [name, each] of Object.entries(value)) node.style.setProperty(name, each);
    else if (typeof value === "function") node.addEventListener(key, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter(known));
  return node;
}

const element = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
const drawing = (tag, properties = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
const span = (kind, ...children) => element("span", { class: kind }, ...children);
const cell = (kind, ...children) => element("td", { class: kind }, ...children);
const column = (kind, ...children) => element("th", { scope: "col", class: kind }, ...children);
const button = (kind, properties, ...children) =>
  element("button", { type: "button", class: kind, ...properties }, ...children);
const listing = (texts) => element("ul", {}, ...texts.map((text) => element("li", {}, text)));
const headRow = (titles, numbers = []) => element("thead", {},
  element("tr", {}, ...titles.map((title, place) => column(numbers.includes(place) ? "number" : null, title))));

const ICONS = {
  check: "M4 12.5l5.5 5.5L20 6.5",
  cross: "M6 6l12 12M18 6L6 18",
  question: "M8.5 9a3.5 3.5 0 1 1 5 3.2c-1 .5-1.5 1.1-1.5 2.3M12 18.4v.1",
  dash: "M5 12h14",
  dot: "M12 7a5 5 0 1 1 0 10a5 5 0 1 1 0-10",
  square: "M7 7h10v10H7z",
  skip: "M12 4a8 8 0 1 0 0 16a8 8 0 1 0 0-16M6.5 17.5l11-11",
};
const icon = (name) =>
  drawing("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, drawing("path", { d: ICONS[name] }));
