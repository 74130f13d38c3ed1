/* ---- Numbers for people ------------------------------------------------------------------------------------------ */

const isBytes = (name) => /bytes$/.test(name);

function infinite(value) {
  return value > 0 ? "∞" : "−∞";
}

/* Seven digits, as many as float32 has. */
function digits(value) {
  if (!known(value)) return MISSING;
  if (!Number.isFinite(value)) return infinite(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 && Number.isInteger(value)) return value.toLocaleString("en-US").replaceAll(",", "\u2009");
  return size < 1e-4 || size >= 1e7 ? value.toExponential(6) : value.toPrecision(7);
}

function tiny(value) {
  if (!known(value)) return MISSING;
  if (value === 0) return "0";
  return Number.isFinite(value) ? value.toExponential(1) : infinite(value);
}

function scaled(value, steps, units) {
  if (!known(value)) return MISSING;
  if (!Number.isFinite(value)) return infinite(value);
  let place = 0;
  let shown = value;
  // 999.7 would be rounded to 1000, so it takes the next unit.
  while (place < units.length - 1 && Math.abs(shown) >= 999.5) {
    shown /= steps;
    place += 1;
  }
  const text = place === 0 && Number.isInteger(shown) ? String(shown) : Number(shown.toPrecision(3)).toString();
  return text + units[place];
}

const count = (value) => scaled(value, 1000, ["", "k", "M", "G", "T"]);
const bytes = (value) => scaled(value, 1000, [" B", " kB", " MB", " GB", " TB"]);
const percent = (value) => (known(value) ? `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %` : MISSING);
const rate = (value) => (known(value) ? `${count(value)} tok/s` : MISSING);

function seconds(value) {
  if (!known(value)) return MISSING;
  if (value < 1) return `${Number((1000 * value).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  return value < 7200 ? `${Number((value / 60).toPrecision(3))} min` : `${Number((value / 3600).toPrecision(3))} h`;
}

const figure = (metric, value) => (isBytes(metric.name) && known(value) ? bytes(value) : digits(value));
