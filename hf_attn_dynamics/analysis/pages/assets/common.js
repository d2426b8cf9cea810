// What all pages use. Text becomes text nodes and attributes, never HTML: sentences may hold anything.
const byId = (id) => document.getElementById(id);
const dataOf = (id) => JSON.parse(byId(id).textContent);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const option = (value, text, chosen) => element("option", { value, selected: value === chosen }, text);
const number = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)}\u00a0%`);
const signed = (value) => (value > 0 ? `+${value}` : `${value}`.replace("-", "−"));

function table(header, rows, numeric) {
  const cell = (tag) => (text, column) => element(tag, numeric.includes(column) ? { class: "number" } : {}, text);
  const line = (tag, { cells, className }) => element("tr", { class: className || null }, ...cells.map(cell(tag)));
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, line("th", { cells: header })),
    element("tbody", {}, ...rows.map((row) => line("td", row)))));
}

// The largest of nested numbers; there are too many weights for the arguments of Math.max.
const largestOf = (values) => values.reduce((most, one) => Math.max(most, Array.isArray(one) ? largestOf(one) : one), 1e-6);

// Heads: {site, layer, head}. Tables of heads are {site: [layer][head]}.
const headOf = ({ dataset }) => ({ site: dataset.site, layer: Number(dataset.layer), head: Number(dataset.head) });
const headKey = ({ site, layer, head }) => `${site} ${layer} ${head}`;
const same = (one, other) => headKey(one) === headKey(other);
const valueAt = (tables, { site, layer, head }) => (tables[site] ? tables[site][layer][head] : null);
const allValues = (tables) => Object.values(tables).flat(2).filter((one) => one !== null);
// The place of a value among those of all heads, the highest first.
function rankOf(value, tables) {
  const all = allValues(tables);
  return value === null ? "–" : `${1 + all.filter((one) => one > value).length} of ${all.length}`;
}
const severalSites = () => new Set([...document.querySelectorAll(".grid button[data-head]")].map((one) => one.dataset.site)).size > 1;
const nameOf = ({ site, layer, head }) => `Layer ${layer}, head ${head}${severalSites() ? ` of the ${site}` : ""}`;
const shortName = ({ site, layer, head }) => `${severalSites() ? `${site} ` : ""}${layer}.${head}`;

// Only one button of a group is in the order of the Tab key; arrow keys move within the group.
function moveWithArrows(group, next) {
  group.addEventListener("keydown", (event) => {
    const buttons = [...group.querySelectorAll("button")];
    const target = next(buttons, buttons.indexOf(event.target), event.key);
    if (!target) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
  });
}

// The nearest head in the direction of an arrow key; removed heads are jumped over.
function nextInGrid(buttons, position, key) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
  if (!step || position < 0) return undefined;
  const from = headOf(buttons[position]);
  const ahead = buttons.filter((button) => {
    const { layer, head } = headOf(button);
    return step[0] ? head === from.head && (layer - from.layer) * step[0] > 0
      : layer === from.layer && (head - from.head) * step[1] > 0;
  });
  return step[0] + step[1] > 0 ? ahead[0] : ahead[ahead.length - 1];
}

// Heads are chosen in the grids: a click chooses one, with Shift or Control one more or less, the number of a layer all
// of its heads. `onChange(heads, head)` gets all chosen heads, and the one that was chosen last.
function headGrids(onChange) {
  const grids = [...document.querySelectorAll(".grid")];
  const buttons = grids.flatMap((grid) => [...grid.querySelectorAll("button[data-head]")]);
  let chosen = [];

  function choose(heads, last = heads[heads.length - 1]) {
    chosen = heads;
    const keys = new Set(heads.map(headKey));
    buttons.forEach((button) => button.setAttribute("aria-pressed", keys.has(headKey(headOf(button)))));
    const current = buttons.filter((button) => same(headOf(button), last));
    current.forEach((one) => {
      one.closest("table").querySelectorAll("button[data-head]").forEach((other) => { other.tabIndex = -1; });
      one.tabIndex = 0;
    });
    return onChange(heads, last);
  }

  function chooseLayer(row) {
    const heads = [...row.querySelectorAll("button[data-head]")].map(headOf);
    if (heads.length) choose(heads, heads[0]);
  }

  function add(head) {
    const others = chosen.filter((one) => one.site === head.site && !same(one, head));
    const isChosen = chosen.some((one) => same(one, head));
    choose(isChosen && others.length ? others : [...others, head]);
  }

  for (const grid of grids) {
    grid.querySelectorAll("button[data-head]").forEach((button, index) => { button.tabIndex = index ? -1 : 0; });
    grid.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-head]");
      if (!button) return;
      if (event.shiftKey || event.ctrlKey || event.metaKey) add(headOf(button));
      else choose([headOf(button)]);
    });
    moveWithArrows(grid.tBodies[0], (all, position, key) => {
      const heads = all.filter((one) => one.dataset.head !== undefined);
      return nextInGrid(heads, heads.indexOf(all[position]), key);
    });
    for (const header of grid.querySelectorAll("th[scope=row]")) {
      const text = header.textContent;
      const label = `All heads of layer ${text}`;
      header.replaceChildren(element("button", {
        type: "button", class: "layer", title: label, "aria-label": label, onclick: () => chooseLayer(header.parentElement),
      }, text));
    }
  }
  return choose;
}

// Colours of several heads in one drawing, as in the pictures.
const colourOf = (index) => `var(--colour-${index % 6})`;

// A canvas with a pixel per weight, which the style enlarges. Opacity works on light and dark pages.
function drawWeights(canvas, rows, highest = 1) {
  canvas.width = Math.max(rows.length ? rows[0].length : 0, 1);
  canvas.height = Math.max(rows.length, 1);
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(canvas.width, canvas.height);
  const [red, green, blue] = getComputedStyle(canvas).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  rows.forEach((row, query) => row.forEach((weight, key) => {
    pixels.data.set([red, green, blue, Math.round((255 * weight) / highest)], 4 * (query * canvas.width + key));
  }));
  context.putImageData(pixels, 0, 0);
}

function onColourChange(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

function ready() {
  document.querySelectorAll(".script-only").forEach((part) => { part.hidden = false; });
  document.documentElement.dataset.ready = "true";
}
