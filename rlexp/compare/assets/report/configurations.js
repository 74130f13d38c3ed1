/* ---- Configurations ---------------------------------------------------------------------------------------------- */

function markOf(row) {
  if (!row.differs) return cell("may", "same");
  return row.must_not ? cell("must-not", icon("cross"), " must not differ") : cell("may", "may differ");
}

/* A value is marked if it differs from the baseline's, or from the first run's if there is no baseline. */
function configRow(row, baseOf) {
  const cells = row.values.map((value, run) => {
    const there = value !== "" && value !== MISSING;
    const other = row.differs && there && value !== row.values[baseOf[run]];
    return cell(other ? "other" : null, span("value mono", there ? value : MISSING));
  });
  return element("tr", { class: row.differs && row.must_not ? "breach" : null },
    element("th", { scope: "row", class: "mono" }, row.key), markOf(row), ...cells);
}

function fillConfig() {
  const rows = head.config.filter((row) => chosen.allKeys || row.differs);
  const differing = head.config.filter((row) => row.differs).length;
  byId("config-count").textContent = head.config.length ? `${differing} of ${head.config.length} keys differ` : "";
  byId("all-keys").checked = chosen.allKeys;
  const isBase = (run, other) => other.baseline && other.family === run.family;
  const baseOf = runs.map((run) => Math.max(0, runs.findIndex((other) => isBase(run, other))));
  const names = runs.map((run) => element("span", { class: "clamp", title: run.label }, run.label));
  const none = head.config.length ? "No key differs between the runs." : "No run has a configuration.";
  const empty = [element("tr", {}, cell(null, none))];
  const body = rows.length ? rows.map((row) => configRow(row, baseOf)) : empty;
  const headings = rows.length ? headRow(["Key", "", ...names]) : "";
  byId("config-table").replaceChildren(headings, element("tbody", {}, ...body));
  lengthen(byId("config-table"), rows.length);
}
