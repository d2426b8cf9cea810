// The name of a head, in the first cell of each row, becomes a button that selects it and shows its card.
function linkHeads(rows, onSelect) {
  for (const row of rows) {
    const name = row.cells[0].textContent;
    const show = () => { onSelect(headOf(row)); byId("card")?.scrollIntoView({ block: "nearest" }); };
    row.cells[0].replaceChildren(element("button", { type: "button", class: "link", "aria-label": `Show head ${name}`, onclick: show }, name));
  }
}

// A table with a row per head: sorted by a click on a heading, filtered by layer, function and score.
// `filters` is filled. `functions`: names for the filter by function, none without. Without `onSelect`, names of heads
// are no buttons. Returns {select(heads)}.
function headTable(place, filters, { functions = [], onSelect = null }) {
  const headings = [...place.tHead.rows[0].cells];
  const rows = () => [...place.tBodies[0].rows];
  const isMissing = (cell) => cell.dataset.sort === undefined && cell.textContent === "–";
  const valueOf = (cell) => cell.dataset.sort ?? (isMissing(cell) ? "" : cell.textContent);

  // Numbers before text, missing values last in both directions.
  function compare(one, other, direction) {
    const values = [valueOf(one), valueOf(other)];
    if (values.includes("")) return (values[0] === "") - (values[1] === "");
    const difference = values[0] - values[1];
    return direction * (Number.isNaN(difference) ? values[0].localeCompare(values[1]) : difference);
  }

  function sortBy(column) {
    const numeric = headings[column].classList.contains("number");
    const before = headings[column].getAttribute("aria-sort");
    const order = before ? (before === "ascending" ? "descending" : "ascending") : numeric ? "descending" : "ascending";
    headings.forEach((heading) => heading.removeAttribute("aria-sort"));
    headings[column].setAttribute("aria-sort", order);
    const direction = order === "ascending" ? 1 : -1;
    place.tBodies[0].append(...rows().sort((one, other) => compare(one.cells[column], other.cells[column], direction)));
  }

  function filter() {
    const [layer, name, column, bound, limit] = controls.map((control) => control.value);
    let shown = 0;
    for (const row of rows()) {
      const own = (row.dataset.functions ?? "").split("|").filter(Boolean);
      const value = column === "" ? "" : valueOf(row.cells[column]);
      const fits = (layer === "" || row.dataset.layer === layer)
        && (name === "" || (name === "none" ? !own.length : own.includes(name)))
        && (column === "" || limit === "" || (value !== "" && (bound === "least" ? value - limit >= 0 : value - limit <= 0)));
      row.hidden = !fits;
      shown += fits;
    }
    status.textContent = `${shown} of ${rows().length} heads`;
  }

  headings.forEach((heading, column) => {
    heading.replaceChildren(element("button", { type: "button", onclick: () => sortBy(column) }, heading.textContent));
  });
  if (onSelect) linkHeads(rows(), onSelect);

  const menu = (id, label, options) => element("select", { id, "aria-label": label, onchange: filter }, ...options);
  const layers = [...new Set(rows().map((row) => row.dataset.layer))].sort((one, other) => one - other);
  const scores = headings.flatMap((heading, column) => (heading.classList.contains("number") ? [[`${column}`, heading.textContent]] : []));
  const controls = [
    menu("filter-layer", "Layer", [option("", "all", ""), ...layers.map((layer) => option(layer, layer, ""))]),
    menu("filter-function", "Function", [option("", "all", ""), ...functions.map((name) => option(name, name, "")),
      option("none", "none of these", "")]),
    menu("filter-score", "Score", [option("", "any score", ""), ...scores.map(([column, name]) => option(column, name, ""))]),
    menu("filter-bound", "Bound", [option("least", "at least", "least"), option("most", "at most", "least")]),
    element("input", { id: "filter-limit", type: "number", step: "any", "aria-label": "Bound of the score", oninput: filter }),
  ];
  const status = element("span", { id: "heads-shown", class: "faint", role: "status" });
  filters.append(
    element("label", {}, "Layer ", controls[0]),
    ...(functions.length ? [element("label", {}, "Function ", controls[1])] : []),
    element("span", { class: "bound" }, controls[2], " ", controls[3], " ", controls[4]), status);
  filter();

  return {
    select(heads) {
      const keys = new Set(heads.map(headKey));
      rows().forEach((row) => row.classList.toggle("selected", keys.has(headKey(headOf(row)))));
    },
  };
}
