"use strict";
// The interactive part of the page of a HeadReading. Data, grid and table are in the page; nothing is loaded.
(() => {
  const data = JSON.parse(document.getElementById("heads-data").textContent);
  const ROW = 22; // height of a token in pixels, as --row in heads.css
  const FAINT = 0.02; // weights below are not drawn
  const headKey = (site, layer, head) => `${site} ${layer} ${head}`;
  const functionsOf = new Map(data.heads.map(([site, layer, head, names]) => [headKey(site, layer, head), names]));
  const severalSites = new Set(data.heads.map(([site]) => site)).size > 1;
  const state = {
    head: null, // {site, layer, head}
    sentence: data.sentence,
    token: null, // {side: "queries" or "keys", index}: its weights are shown
    locked: null, // the same, kept until another click
    hideSpecial: false,
    hidePunctuation: false,
    role: "", // name of the role whose arcs are highlighted
  };
  const byId = (id) => document.getElementById(id);

  // Text becomes text nodes and attributes, never HTML: sentences may hold anything.
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  const number = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits));
  const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)}\u00a0%`);
  const nameOf = ({ site, layer, head }) => `Layer ${layer}, head ${head}${severalSites ? ` of the ${site}` : ""}`;
  const signed = (offset) => (offset > 0 ? `+${offset}` : `${offset}`.replace("-", "−"));
  const valueAt = (tables, { site, layer, head }) => (tables[site] ? tables[site][layer][head] : null);

  const unpacked = new Map(); // sentence → promise of {site: bytes}

  function weightsOfSentence(index) {
    if (!unpacked.has(index)) unpacked.set(index, unpack(data.sentences[index].weights));
    return unpacked.get(index);
  }

  async function unpack(weights) {
    const tables = {};
    for (const [site, packed] of Object.entries(weights)) {
      const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
      tables[site] = new Uint8Array(await new Response(stream).arrayBuffer());
    }
    return tables;
  }

  // Indices of the tokens that are shown.
  function visibleTokens(sentence) {
    const hidden = new Set([
      ...(state.hideSpecial ? sentence.special : []),
      ...(state.hidePunctuation ? sentence.punctuation : []),
    ]);
    return sentence.tokens.map((_, index) => index).filter((index) => !hidden.has(index));
  }

  // Weights [query][key] of the selected head between the visible tokens; rows sum to 1 again if tokens are hidden.
  function weightsOfHead(tables, sentence, visible) {
    const { site, layer, head } = state.head;
    const length = sentence.tokens.length;
    const start = (layer * sentence.shapes[site][1] + head) * length * length;
    const weight = (query, key) => tables[site][start + key * length + query] / 255;
    return visible.map((query) => {
      const row = visible.map((key) => weight(query, key));
      const total = row.reduce((sum, one) => sum + one, 0);
      return visible.length < length && total > 0 ? row.map((one) => one / total) : row;
    });
  }

  // Whether a query and a key are the ends of a dependency of the chosen role: set of "query key".
  function arcsOfRole(sentence) {
    const role = data.roles.find((one) => one.name === state.role);
    const pairs = new Set();
    for (const [dependent, governor] of (role && role.arc && sentence.arcs[role.arc.relation]) || []) {
      const [queries, keys] = role.arc.toHead ? [dependent, governor] : [governor, dependent];
      for (const query of queries) for (const key of keys) pairs.add(`${query} ${key}`);
    }
    return pairs;
  }

  function rolesOf(head) {
    const roles = data.roles.map((role) => ({
      ...role,
      score: valueAt(role.accuracy, head),
      base: role.baseline[head.site],
      exceeds: valueAt(role.verdict, head) === 0,
      words: data.verdicts[valueAt(role.verdict, head)],
    }));
    return roles
      .filter((role) => role.score !== null && role.base !== null && role.base !== undefined)
      .sort((one, other) => other.score - other.base - (one.score - one.base));
  }

  function table(header, rows, numeric) {
    const cell = (tag) => (text, column) => element(tag, numeric.includes(column) ? { class: "number" } : {}, text);
    const line = (tag, { cells, className }) => element("tr", { class: className || null }, ...cells.map(cell(tag)));
    return element("div", { class: "scroll" }, element("table", {},
      element("thead", {}, line("th", { cells: header })),
      element("tbody", {}, ...rows.map((row) => line("td", row)))));
  }

  function rolesTable(roles) {
    const rows = roles.map((role) => ({
      cells: [role.name, percent(role.score), percent(role.base), role.words],
      className: role.exceeds ? "exceeds" : "",
    }));
    return table(["role", "accuracy", "baseline", "verdict"], rows, [1, 2]);
  }

  function measuresTable(head) {
    const rows = data.measures.map(({ name, values }) => {
      const value = valueAt(values, head);
      const all = Object.values(values).flat(2).filter((one) => one !== null);
      const rank = value === null ? "–" : `${1 + all.filter((one) => one > value).length} of ${all.length}`;
      return { cells: [name, number(value), rank] };
    });
    return table(["measure", "value", "rank"], rows, [1, 2]);
  }

  // What a function is judged by: [what was measured, value, baseline, value that it needs]; null if unknown.
  function evidence(name, head) {
    const { positional, delimiters, role: margin } = data.threshold;
    const measure = data.measures.find((one) => one.name === "attention to delimiters");
    if (name === "positional") {
      const best = valueAt(data.offsets.best, head);
      return best && [`offset ${signed(best[0])}`, best[1], null, positional];
    }
    if (name === "delimiters") {
      const value = measure ? valueAt(measure.values, head) : null;
      return value === null ? null : ["mean weight", value, null, delimiters];
    }
    const role = rolesOf(head).find((one) => one.function === name);
    return role && [role.name, role.score, role.base, role.base + margin];
  }

  function functionsTable(head) {
    const names = functionsOf.get(headKey(head.site, head.layer, head.head));
    const rows = data.functions.map((name, index) => {
      const found = evidence(name, head);
      const chip = element("span", { class: names.includes(name) ? `chip function-${index}` : "chip", "aria-hidden": "true" });
      const label = element("span", { class: "name" }, chip, name);
      if (!found) return { cells: [label, "–", "–", "–", "–", "–"] };
      const [what, value, baseline, needed] = found;
      const plays = names.includes(name);
      return {
        cells: [label, what, percent(value), percent(baseline), percent(needed), plays ? "yes" : "no"],
        className: plays ? "exceeds" : "",
      };
    });
    return table(["function", "by", "value", "baseline", "needs", "enough"], rows, [2, 3, 4]);
  }

  function offsetProfile(head) {
    const values = valueAt(data.offsets.attention, head);
    const best = valueAt(data.offsets.best, head);
    if (!values) return null;
    const { limit } = data.offsets;
    const top = Math.max(...values.map((one) => one ?? 0), 1e-6);
    const text = best ? `Largest weight most often at offset ${signed(best[0])}: ${percent(best[1])} of the tokens`
      : "No largest weight at these offsets";
    const bars = values.map((one, index) => element("span", {
      style: `height:${Math.round((48 * (one ?? 0)) / top)}px`,
      class: index === limit ? "here" : null,
      title: `offset ${signed(index - limit)}: ${number(one, 3)}`,
    }));
    return element("div", {},
      element("p", { class: "faint" }, `Mean attention by offset, key − query (grey: the token itself). ${text}.`),
      element("div", { class: "offsets", role: "img", "aria-label": text }, ...bars),
      element("div", { class: "axis", "aria-hidden": "true" },
        element("span", {}, `−${limit}`), element("span", {}, "0"), element("span", {}, `+${limit}`)));
  }

  function showCard() {
    const roles = rolesOf(state.head);
    byId("card").replaceChildren(...[
      element("h3", {}, nameOf(state.head)),
      functionsTable(state.head),
      roles.length ? element("details", {}, element("summary", {}, `All ${roles.length} roles`), rolesTable(roles)) : null,
      measuresTable(state.head),
      offsetProfile(state.head),
    ].filter((part) => part !== null));
  }

  function option(value, text, chosen) {
    return element("option", { value, selected: value === chosen }, text);
  }

  function checkbox(id, text, name) {
    return element("label", {}, element("input", {
      type: "checkbox", id, onchange: (event) => { state[name] = event.target.checked; unlock(); showSentence(); },
    }), ` ${text}`);
  }

  function buildAttention() {
    const place = byId("attention");
    if (!data.sentences.length) {
      place.append(element("p", {}, "There are no example sentences of up to 40 tokens."));
      return;
    }
    const shortened = (text) => (text.length > 90 ? `${text.slice(0, 89)}…` : text);
    const sentences = data.sentences.map((one, index) => option(`${index}`, `${index + 1}. ${shortened(one.text)}`, `${state.sentence}`));
    const punctuation = data.sentences.some((one) => one.punctuation.length);
    const special = data.sentences.some((one) => one.special.length);
    place.append(...[
      element("h3", { id: "attention-title" }),
      element("div", { class: "controls" },
        element("label", {}, "Sentence ", element("select", {
          id: "sentence", onchange: (event) => { state.sentence = Number(event.target.value); unlock(); showSentence(); },
        }, ...sentences)),
        special ? checkbox("hide-special", "hide special tokens and renormalise", "hideSpecial") : null,
        punctuation ? checkbox("hide-punctuation", "hide punctuation and renormalise", "hidePunctuation") : null,
        element("label", { id: "role-label" }, "Arcs of ", element("select", {
          id: "role", onchange: (event) => { state.role = event.target.value; showSentence(); },
        }))),
      element("p", { class: "strip", id: "strip", "aria-hidden": "true" }),
      element("p", { id: "status", role: "status" }),
      element("div", { class: "heads-view" },
        element("ol", { class: "tokens queries", "aria-label": "Queries" }),
        element("div", { id: "lines" }),
        element("ol", { class: "tokens keys", "aria-label": "Keys" }),
        element("figure", { class: "map" },
          element("canvas", { id: "map", role: "img", "aria-label": "Map of all weights: a row per query, a column per key" }),
          element("figcaption", {}, "All weights: a row per query, a column per key."))),
    ].filter((part) => part !== null));
    place.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { unlock(); showToken(null); }
    });
    listenToMap(byId("map"));
    for (const side of ["queries", "keys"]) listen(place.querySelector(`.${side}`), side);
  }

  // One listener per list: tokens change with each sentence.
  function listen(list, side) {
    const tokenOf = (event) => {
      const button = event.target.closest("button");
      return button && { side, index: Number(button.dataset.index) };
    };
    const show = (event) => { if (!state.locked && tokenOf(event)) showToken(tokenOf(event)); };
    list.addEventListener("mouseover", show);
    list.addEventListener("focusin", show);
    list.addEventListener("mouseleave", () => { if (!state.locked) showToken(null); });
    list.addEventListener("focusout", () => { if (!state.locked) showToken(null); });
    list.addEventListener("click", (event) => {
      const token = tokenOf(event);
      if (!token) return;
      const again = state.locked && state.locked.side === side && state.locked.index === token.index;
      state.locked = again ? null : token;
      showToken(token);
    });
    moveWithArrows(list, (buttons, position, key) => {
      const step = { ArrowUp: -1, ArrowDown: 1 }[key];
      return step ? buttons[position + step] : undefined;
    });
  }

  function unlock() {
    state.locked = state.token = null;
  }

  // Roles that occur in the sentence; by default the one that the head plays best, if it exceeds the baseline.
  function chooseRole(sentence) {
    const present = rolesOf(state.head).filter((role) => role.arc && sentence.arcs[role.arc.relation]);
    const names = present.map((role) => role.name);
    if (!names.includes(state.role)) {
      const best = present.find((role) => role.exceeds);
      state.role = best ? best.name : "";
    }
    byId("role").replaceChildren(option("", "no role", state.role), ...names.map((name) => option(name, name, state.role)));
    byId("role-label").hidden = !names.length;
  }

  let view = null; // what is drawn: {visible, weights, arcs}

  async function showSentence() {
    if (!data.sentences.length) return;
    const index = state.sentence;
    const sentence = data.sentences[index];
    const tables = await weightsOfSentence(index);
    if (index !== state.sentence) return; // another one was chosen meanwhile
    byId("attention").hidden = !tables[state.head.site];
    if (byId("attention").hidden) return;
    chooseRole(sentence);
    const visible = visibleTokens(sentence);
    view = { sentence, visible, weights: weightsOfHead(tables, sentence, visible), arcs: arcsOfRole(sentence) };
    byId("attention-title").textContent = `Attention of ${nameOf(state.head).toLowerCase()}`;
    for (const side of ["queries", "keys"]) {
      const items = visible.map((token, row) => element("li", {},
        element("button", { type: "button", "data-index": row, tabindex: row ? -1 : 0 }, sentence.tokens[token]),
        element("span", { class: "weight" })));
      document.querySelector(`.${side}`).replaceChildren(...items);
    }
    byId("strip").replaceChildren(...visible.flatMap((token) => [element("span", {}, sentence.tokens[token]), " "]));
    drawMap();
    showToken(state.locked);
  }

  // The weights of one token to or from the others, by row; null if no token is chosen.
  function weightsOfToken(token) {
    if (!token) return null;
    return token.side === "queries" ? view.weights[token.index] : view.weights.map((row) => row[token.index]);
  }

  function showToken(token) {
    if (!view) return;
    state.token = token;
    const weights = weightsOfToken(token);
    const isArc = (row) => token && view.arcs.has(token.side === "queries"
      ? `${view.visible[token.index]} ${view.visible[row]}` : `${view.visible[row]} ${view.visible[token.index]}`);
    for (const side of ["queries", "keys"]) {
      const others = token && token.side !== side;
      document.querySelectorAll(`.${side} li`).forEach((item, row) => {
        const [button, weight] = item.children;
        const chosen = Boolean(token && !others && row === token.index);
        button.classList.toggle("chosen", chosen);
        button.setAttribute("aria-pressed", Boolean(state.locked && chosen));
        button.classList.toggle("target", Boolean(others && isArc(row)));
        button.style.setProperty("--weight", others ? weights[row] : 0);
        weight.textContent = others && weights[row] >= 0.005 ? number(weights[row]) : "";
        if (others) weight.dataset.weight = weights[row].toPrecision(6);
        else delete weight.dataset.weight;
      });
    }
    [...byId("strip").children].forEach((span, row) => {
      span.style.setProperty("--weight", weights ? weights[row] : 0);
      span.classList.toggle("chosen", Boolean(token && row === token.index));
      span.classList.toggle("target", Boolean(isArc(row)));
    });
    drawLines(token);
    describe(token, weights);
  }

  // All weights as a picture of a pixel per weight, which the style enlarges. Opacity works on light and dark pages.
  function drawMap() {
    const canvas = byId("map");
    const size = view.visible.length;
    canvas.width = canvas.height = Math.max(size, 1);
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(canvas.width, canvas.height);
    const [red, green, blue] = rgbOf(getComputedStyle(canvas).color);
    view.weights.forEach((row, query) => row.forEach((weight, key) => {
      pixels.data.set([red, green, blue, Math.round(255 * weight)], 4 * (query * size + key));
    }));
    context.putImageData(pixels, 0, 0);
  }

  const rgbOf = (colour) => colour.match(/[\d.]+/g).slice(0, 3).map(Number);

  function listenToMap(canvas) {
    const tokenAt = (event) => {
      const { top, height } = canvas.getBoundingClientRect();
      const index = Math.floor(((event.clientY - top) / height) * view.visible.length);
      return { side: "queries", index: Math.min(Math.max(index, 0), view.visible.length - 1) };
    };
    canvas.addEventListener("mousemove", (event) => { if (view && !state.locked) showToken(tokenAt(event)); });
    canvas.addEventListener("mouseleave", () => { if (view && !state.locked) showToken(null); });
    // The colour of the page may change while it is open.
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (view) drawMap(); });
  }

  function drawLines(token) {
    const middle = (row) => (row + 0.5) * ROW;
    const drawn = (query, key) => !token || (token.side === "queries" ? query : key) === token.index;
    const parts = [];
    view.visible.forEach((queryToken, query) => view.visible.forEach((keyToken, key) => {
      if (!drawn(query, key)) return;
      const ends = `x1="0" x2="100%" y1="${middle(query)}" y2="${middle(key)}"`;
      if (view.arcs.has(`${queryToken} ${keyToken}`)) parts.push(`<line class="arc" ${ends}></line>`);
      const weight = view.weights[query][key];
      if (weight >= FAINT) parts.push(`<line ${ends} stroke-opacity="${weight.toFixed(2)}"></line>`);
    }));
    // Only numbers are inserted.
    byId("lines").innerHTML = `<svg height="${view.visible.length * ROW}" aria-hidden="true">${parts.join("")}</svg>`;
  }

  // The largest weights in words, for screen readers as for everybody else.
  function describe(token, weights) {
    const status = byId("status");
    const tokenAt = (row) => view.sentence.tokens[view.visible[row]];
    if (!token) {
      status.textContent = "Point at a token, or focus it, to see its weights; click to keep them, Escape to release.";
      return;
    }
    const best = weights.map((weight, row) => ({ weight, row })).sort((one, other) => other.weight - one.weight);
    const list = best.slice(0, 3).map(({ weight, row }) => `“${tokenAt(row)}” ${number(weight)}`).join(", ");
    const verb = token.side === "queries" ? "attends to" : "is attended to by";
    status.textContent = `“${tokenAt(token.index)}” ${verb} ${list}${state.locked ? " (kept; Escape releases)" : ""}`;
  }

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

  const headOf = ({ dataset }) => ({ site: dataset.site, layer: Number(dataset.layer), head: Number(dataset.head) });
  const same = (one, other) => headKey(one.site, one.layer, one.head) === headKey(other.site, other.layer, other.head);

  function select(head) {
    state.head = head;
    state.role = "";
    document.querySelectorAll(".grid button").forEach((button) => {
      const chosen = same(headOf(button), head);
      button.setAttribute("aria-pressed", chosen);
      if (chosen) {
        button.closest("table").querySelectorAll("button").forEach((other) => { other.tabIndex = -1; });
        button.tabIndex = 0;
      }
    });
    document.querySelectorAll("#heads-table tbody tr").forEach((row) => row.classList.toggle("selected", same(headOf(row), head)));
    showCard();
    return showSentence();
  }

  function buildGrid() {
    document.querySelectorAll(".grid").forEach((grid) => {
      grid.querySelectorAll("button").forEach((button, index) => { button.tabIndex = index ? -1 : 0; });
      grid.addEventListener("click", (event) => {
        const button = event.target.closest("button");
        if (button) select(headOf(button));
      });
      moveWithArrows(grid, nextInGrid);
    });
  }

  // Numbers before text, missing values last in both directions.
  function compare(one, other, direction) {
    const values = [one, other].map((cell) => cell.dataset.sort ?? (cell.textContent === "–" ? "" : cell.textContent));
    if (values.includes("")) return (values[0] === "") - (values[1] === "");
    const difference = values[0] - values[1];
    return direction * (Number.isNaN(difference) ? values[0].localeCompare(values[1]) : difference);
  }

  function sortBy(table, column) {
    const headers = [...table.tHead.rows[0].cells];
    const numeric = headers[column].classList.contains("number");
    const before = headers[column].getAttribute("aria-sort");
    const order = before ? (before === "ascending" ? "descending" : "ascending") : numeric ? "descending" : "ascending";
    headers.forEach((header) => header.removeAttribute("aria-sort"));
    headers[column].setAttribute("aria-sort", order);
    const direction = order === "ascending" ? 1 : -1;
    const rows = [...table.tBodies[0].rows];
    rows.sort((one, other) => compare(one.cells[column], other.cells[column], direction));
    table.tBodies[0].append(...rows);
  }

  function filterTable(table, filters) {
    const [layer, name] = filters.map((filter) => filter.value);
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const functions = row.dataset.functions.split("|").filter(Boolean);
      const fits = (layer === "" || row.dataset.layer === layer)
        && (name === "" || (name === "none" ? !functions.length : functions.includes(name)));
      row.hidden = !fits;
      shown += fits;
    }
    byId("heads-shown").textContent = `${shown} of ${table.tBodies[0].rows.length} heads`;
  }

  function buildTable() {
    const table = byId("heads-table");
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = element("button", { type: "button", onclick: () => sortBy(table, column) }, header.textContent);
      header.replaceChildren(button);
    });
    for (const row of table.tBodies[0].rows) {
      const show = () => { select(headOf(row)); byId("card").scrollIntoView({ block: "nearest" }); };
      const name = row.cells[0].textContent;
      const button = element("button", { type: "button", class: "link", "aria-label": `Show head ${name}`, onclick: show }, name);
      row.cells[0].replaceChildren(button);
    }
    const layers = [...new Set(data.heads.map(([, layer]) => layer))];
    const menu = (id, options) => element("select", { id, onchange: () => filterTable(table, filters) }, ...options);
    const filters = [
      menu("filter-layer", [option("", "all", ""), ...layers.map((layer) => option(`${layer}`, `${layer}`, ""))]),
      menu("filter-function", [option("", "all", ""), ...data.functions.map((name) => option(name, name, "")),
        option("none", "none of these", "")]),
    ];
    byId("heads-filters").append(
      element("label", {}, "Layer ", filters[0]), element("label", {}, "Function ", filters[1]),
      element("span", { id: "heads-shown", class: "faint", role: "status" }, `${data.heads.length} of ${data.heads.length} heads`));
  }

  buildGrid();
  buildTable();
  buildAttention();
  document.querySelectorAll(".script-only").forEach((part) => { part.hidden = false; });
  const [site, layer, head] = data.first;
  select({ site, layer, head }).then(() => { document.documentElement.dataset.ready = "true"; });
})();
