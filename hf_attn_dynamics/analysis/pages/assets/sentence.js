// The weights of heads between the tokens of a sentence: lines, numbers, a strip and a map, for one or two measures.
const FAINT = 0.02; // lines of weights below this fraction of the largest one are not drawn
const ROW = 22; // height of a token in pixels, as --row in sentence.css

// Packed weights of the sentences: bytes of shape (layers, heads, keys, queries), times scale / 255.
function sentenceWeights(sentences) {
  const unpacked = new Map(); // sentence → promise of {measure: {site: {levels, scale}}}

  async function unpack({ weights }) {
    const measures = {};
    for (const [measure, tables] of Object.entries(weights)) {
      measures[measure] = {};
      for (const [site, [scale, packed]] of Object.entries(tables)) {
        const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
        const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
        measures[measure][site] = { levels: new Uint8Array(await new Response(stream).arrayBuffer()), scale };
      }
    }
    return measures;
  }

  return (index) => {
    if (!unpacked.has(index)) unpacked.set(index, unpack(sentences[index]));
    return unpacked.get(index);
  };
}

// Numbers of the sides (0: the sentence, 1: the target of an encoder–decoder) of the queries and keys of a site.
function sidesOf(site, sentence) {
  const last = sentence.sides.length - 1;
  return { encoder: [0, 0], decoder: [last, last], cross: [last, 0] }[site];
}

// All weights [query][key] of a head.
function weightsOfHead({ levels, scale }, sentence, { site, layer, head }) {
  const [queries, keys] = sidesOf(site, sentence).map((side) => sentence.sides[side].tokens.length);
  const start = (layer * sentence.shapes[site][1] + head) * queries * keys;
  return Array.from({ length: queries }, (_, query) => Array.from({ length: keys },
    (__, key) => (scale * levels[start + key * queries + query]) / 255));
}

// `place` is filled. `sentences`: see SentenceMaps. `measures`: [{name, label}]. `options`: `first`, the sentence that is
// shown first; `beside`, the name of the second measure; `rolesOf(head)`, roles with arcs; `hasWeights(measure, head)`,
// false for heads that were removed.
// Returns {show(heads), onSentence(callback)}.
function sentenceView(place, sentences, measures, options = {}) {
  const { rolesOf = () => [], hasWeights = () => true } = options;
  const state = {
    heads: [],
    muted: new Set(), // keys of chosen heads that are not shown
    sentence: options.first ?? 0,
    measures: [measures[0]?.name, options.beside ?? ""],
    token: null, // {side: "queries" or "keys", index}: its weights are shown; with `cell`, the row of the other side
    locked: null, // the same, kept until another click
    hideSpecial: false,
    hidePunctuation: false,
    numbers: false, // whether the table of all numbers is open
    role: "", // name of the role whose arcs are highlighted
  };
  const weightsOfSentence = sentenceWeights(sentences);
  const listeners = [];
  let isolated = null; // key of the head that a double click has isolated
  let view = null; // what is drawn: {sentence, queries, keys, sides, arcs, panels: [{measure, rows, heads, highest, place}]}

  if (!sentences.length) {
    place.append(element("p", {}, "There are no example sentences of up to 40 tokens."));
    return { show: async () => { place.hidden = false; }, onSentence: () => {} };
  }
  if (typeof DecompressionStream === "undefined") {
    place.append(element("p", {}, "This browser cannot unpack the weights of the sentences: it has no DecompressionStream. "
      + "Chrome and Edge have it from version 80, Firefox from 113, Safari from 16.4."));
    return { show: async () => { place.hidden = false; }, onSentence: () => {} };
  }

  const labelOf = (name) => measures.find((one) => one.name === name).label;
  const shownMeasures = () => state.measures.filter((name, index) => name && (index === 0 || name !== state.measures[0]));

  function unlock() {
    state.locked = state.token = null;
  }

  function checkbox(id, text, name) {
    return element("label", {}, element("input", {
      type: "checkbox", id, onchange: (event) => { state[name] = event.target.checked; unlock(); refresh(); },
    }), ` ${text}`);
  }

  function menu(id, text, options_, onchange) {
    return element("label", {}, `${text} `, element("select", { id, onchange: (event) => { onchange(event.target.value); refresh(); } }, ...options_));
  }

  function build() {
    const shortened = (text) => (text.length > 90 ? `${text.slice(0, 89)}…` : text);
    const titles = sentences.map((one, index) => option(`${index}`, `${index + 1}. ${shortened(one.text)}`, `${state.sentence}`));
    const has = (kind) => sentences.some((one) => one.sides.some((side) => side[kind].length));
    const choices = measures.map(({ name, label }) => [name, label]);
    const [first, second] = state.measures;
    place.append(...[
      element("h3", { id: "attention-title" }),
      element("div", { class: "controls" }, ...[
        sentences.length > 1 ? menu("sentence", "Sentence", titles, (value) => { state.sentence = Number(value); unlock(); }) : null,
        measures.length > 1 ? menu("measure", "Show", choices.map(([name, label]) => option(name, label, first)),
          (value) => { state.measures[0] = value; }) : null,
        measures.length > 1 ? menu("beside", "beside", [option("", "nothing", second), ...choices.map(([name, label]) => option(name, label, second))],
          (value) => { state.measures[1] = value; }) : null,
        has("special") ? checkbox("hide-special", "hide special tokens and renormalise", "hideSpecial") : null,
        has("punctuation") ? checkbox("hide-punctuation", "hide punctuation and renormalise", "hidePunctuation") : null,
        element("label", { id: "role-label", hidden: true }, "Arcs of ", element("select", {
          id: "role", onchange: (event) => { state.role = event.target.value; refresh(); },
        }))].filter((part) => part !== null)),
      element("ul", { id: "chosen-heads", class: "legend", "aria-label": "Heads that are shown", hidden: true }),
      element("div", { id: "strips", "aria-hidden": "true" }),
      element("p", { id: "status", role: "status" }),
      element("div", { id: "panels" }),
    ]);
    place.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { unlock(); showToken(null); }
    });
    listenToLegend(byId("chosen-heads"));
    onColourChange(() => { if (view) view.panels.forEach(drawMap); });
  }

  function buildPanel(measure) {
    const label = measures.length > 1 ? element("h4", {}, labelOf(measure)) : null;
    const what = labelOf(measure);
    const panel = element("div", { class: "panel" }, label, element("div", { class: "heads-view" },
      element("ol", { class: "tokens queries", "aria-label": `Queries, ${what}` }),
      element("div", { class: "lines" }),
      element("ol", { class: "tokens keys", "aria-label": `Keys, ${what}` }),
      element("figure", { class: "map" },
        element("canvas", { role: "img", "aria-label": `Map of all weights, ${what}: a row per query, a column per key` }),
        element("figcaption", {}))),
    element("details", { class: "numbers", open: state.numbers, ontoggle: (event) => {
      state.numbers = event.target.open;
      fillNumbers(event.target, view.panels.find((one) => one.place === panel));
    } }, element("summary")));
    listenToMap(panel.querySelector("canvas"));
    for (const side of ["queries", "keys"]) listen(panel.querySelector(`.${side}`), side);
    return panel;
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

  function listenToMap(canvas) {
    const tokenAt = (event) => {
      const { left, top, width, height } = canvas.getBoundingClientRect();
      const place_ = (part, count) => Math.min(Math.max(Math.floor(part * count), 0), count - 1);
      return {
        side: "queries",
        index: place_((event.clientY - top) / height, view.queries.length),
        cell: place_((event.clientX - left) / width, view.keys.length),
      };
    };
    canvas.addEventListener("mousemove", (event) => { if (view && !state.locked) showToken(tokenAt(event)); });
    canvas.addEventListener("mouseleave", () => { if (view && !state.locked) showToken(null); });
  }

  // Indices of the tokens of a side that are shown.
  function visibleTokens(side) {
    const hidden = new Set([...(state.hideSpecial ? side.special : []), ...(state.hidePunctuation ? side.punctuation : [])]);
    return side.tokens.map((_, index) => index).filter((index) => !hidden.has(index));
  }

  // Weights between the visible tokens; rows sum to 1 again if keys are hidden.
  function visibleWeights(weights, queries, keys) {
    return queries.map((query) => {
      const row = keys.map((key) => weights[query][key]);
      const total = row.reduce((sum, one) => sum + one, 0);
      return keys.length < weights[query].length && total > 0 ? row.map((one) => one / total) : row;
    });
  }

  const meanOf = (tables) => tables[0].map((row, query) => row.map((_, key) =>
    tables.reduce((sum, one) => sum + one[query][key], 0) / tables.length));

  // Whether a query and a key are the ends of a dependency of the chosen role: set of "query key".
  function arcsOfRole(sentence, site) {
    const role = rolesOf(state.heads[0]).find((one) => one.name === state.role);
    const pairs = new Set();
    if (site === "cross" || sidesOf(site, sentence)[0] !== 0) return pairs;
    for (const [dependent, governor] of (role && role.arc && sentence.arcs[role.arc.relation]) || []) {
      const [queries, keys] = role.arc.toHead ? [dependent, governor] : [governor, dependent];
      for (const query of queries) for (const key of keys) pairs.add(`${query} ${key}`);
    }
    return pairs;
  }

  // Roles that occur in the sentence; by default the one that the head plays best, if it exceeds the baseline.
  function chooseRole(sentence) {
    const present = rolesOf(state.heads[0]).filter((role) => role.arc && sentence.arcs[role.arc.relation]);
    const names = present.map((role) => role.name);
    if (!names.includes(state.role)) {
      const best = present.find((role) => role.exceeds);
      state.role = best ? best.name : "";
    }
    byId("role").replaceChildren(option("", "no role", state.role), ...names.map((name) => option(name, name, state.role)));
    byId("role-label").hidden = !names.length;
  }

  // With several heads: their colours. A click hides a head or shows it again, a double click isolates it.
  function buildLegend() {
    byId("chosen-heads").replaceChildren(...state.heads.map((head, index) => element("li", {}, element("button", {
      type: "button", "data-key": headKey(head), style: `--chip: ${colourOf(index)}`,
      title: "Click: hide or show. Double click: this head alone, or all again.",
    }, element("span", { class: "chip", "aria-hidden": "true" }), shortName(head)))));
  }

  function showLegend() {
    byId("chosen-heads").hidden = state.heads.length < 2;
    byId("chosen-heads").querySelectorAll("button").forEach((button) => {
      button.setAttribute("aria-pressed", !state.muted.has(button.dataset.key));
    });
  }

  function listenToLegend(legend) {
    const keyOf = (event) => event.target.closest("button")?.dataset.key;
    const others = (key) => state.heads.map(headKey).filter((one) => one !== key);
    legend.addEventListener("click", (event) => {
      const key = keyOf(event);
      if (!key || event.detail > 1) return;
      if (state.muted.has(key)) state.muted.delete(key);
      else if (others(key).some((one) => !state.muted.has(one))) state.muted.add(key);
      refresh();
    });
    legend.addEventListener("dblclick", (event) => {
      const key = keyOf(event);
      if (!key) return;
      // The first click of the two has hidden the head, or shown it again.
      const isAlone = isolated === key;
      isolated = isAlone ? null : key;
      state.muted = new Set(isAlone ? [] : others(key));
      refresh();
    });
  }

  async function refresh() {
    const index = state.sentence;
    const sentence = sentences[index];
    const tables = await weightsOfSentence(index);
    if (index !== state.sentence) return; // another one was chosen meanwhile
    const { site } = state.heads[0];
    const isMeasured = (measure) => tables[measure] && tables[measure][site];
    const wanted = shownMeasures().filter(isMeasured);
    const shown = wanted.length ? wanted : measures.map(({ name }) => name).filter(isMeasured).slice(0, 1);
    place.hidden = !shown.length;
    if (place.hidden) return;
    chooseRole(sentence);
    showLegend();
    const sides = sidesOf(site, sentence).map((side) => sentence.sides[side]);
    const [queries, keys] = sides.map(visibleTokens);
    const heads = state.heads.map((head, number_) => ({ head, colour: number_ })).filter(({ head }) => head.site === site && !state.muted.has(headKey(head)));
    const panels = shown.flatMap((measure) => {
      const own = heads.filter(({ head }) => hasWeights(measure, head));
      if (!own.length) return [];
      const rows = own.map(({ head }) => visibleWeights(weightsOfHead(tables[measure][site], sentence, head), queries, keys));
      const mean = meanOf(rows);
      // Attention is drawn on a scale from 0 to 1, contributions up to their largest value.
      const highest = measure.startsWith("attention") ? 1 : largestOf(rows);
      return { measure, rows: mean, heads: rows.map((one, number_) => ({ rows: one, colour: own[number_].colour })), highest, place: buildPanel(measure) };
    });
    view = { sentence, sides, queries, keys, panels, arcs: arcsOfRole(sentence, site) };
    const names = state.heads.length > 1 ? `${state.heads.length} heads` : nameOf(state.heads[0]).toLowerCase();
    byId("attention-title").textContent = measures.length > 1 ? `Weights of ${names}` : `Attention of ${names}`;
    byId("strips").replaceChildren(...panels.map(({ measure }) => element("p", { class: "strip" },
      measures.length > 1 ? element("b", {}, `${labelOf(measure)}: `) : null)));
    byId("panels").classList.toggle("two", panels.length > 1);
    byId("panels").replaceChildren(...panels.map((panel) => panel.place));
    panels.forEach(fillPanel);
    showToken(state.locked);
    listeners.forEach((listener) => listener({ index, sentence, measure: shown[0], tables: tables[shown[0]] }));
  }

  function fillPanel(panel) {
    ["queries", "keys"].forEach((side, number_) => {
      const items = view[side].map((token, row) => element("li", {},
        element("button", { type: "button", "data-index": row, tabindex: row ? -1 : 0 }, view.sides[number_].tokens[token]),
        element("span", { class: "weight" }),
        panel.heads.length > 1 ? element("span", { class: "shares", "aria-hidden": "true", style: `--heads: ${panel.heads.length}` }) : null));
      panel.place.querySelector(`.${side}`).replaceChildren(...items);
    });
    panel.place.querySelector("figcaption").textContent = "All weights: a row per query, a column per key"
      + `${panel.heads.length > 1 ? "; mean of the heads" : ""}${panel.highest === 1 ? "" : `; darkest: ${number(panel.highest)}`}.`;
    panel.place.querySelector("summary").textContent = `All numbers${panel.heads.length > 1 ? ", means of the heads" : ""}`;
    drawMap(panel);
  }

  const drawMap = (panel) => drawWeights(panel.place.querySelector("canvas"), panel.rows, panel.highest);

  // A row per query, a column per key. The table is large, so it is made when it is opened.
  function fillNumbers(details, panel) {
    details.querySelector(".scroll")?.remove();
    if (!details.open || !panel) return;
    const [queries, keys] = ["queries", "keys"].map((side, number_) => view[side].map((token) => view.sides[number_].tokens[token]));
    const rows = panel.rows.map((row, query) => ({ cells: [queries[query], ...row.map((weight) => number(weight))] }));
    details.append(table(["query", ...keys], rows, keys.map((_, key) => key + 1)));
  }

  // The weights of one token to or from the others, by row; null if no token is chosen.
  function weightsOfToken(panel, token) {
    if (!token) return null;
    return token.side === "queries" ? panel.rows[token.index] : panel.rows.map((row) => row[token.index]);
  }

  // The weight of each head between the token and a row of the other side.
  function headsAt(panel, { side, index }, row) {
    return panel.heads.map(({ rows, colour }) => ({
      weight: side === "queries" ? rows[index][row] : rows[row][index], colour, name: shortName(state.heads[colour]),
    }));
  }

  // A box per head, as opaque as its weight: which of the heads attend. Boxes of a head are below each other.
  function showShares(place_, weights, highest) {
    const step = 100 / weights.length;
    const stops = weights.map(({ weight, colour }, number_) => `color-mix(in srgb, ${colourOf(colour)} `
      + `${Math.round((100 * weight) / highest)}%, transparent) ${number_ * step}% ${(number_ + 1) * step}%`);
    place_.style.background = stops.length ? `linear-gradient(to right, ${stops.join(", ")})` : "";
    place_.title = weights.map(({ name, weight }) => `${name}: ${number(weight)}`).join("\n");
  }

  function showToken(token) {
    if (!view) return;
    state.token = token;
    const isArc = (row) => token && view.arcs.has(token.side === "queries"
      ? `${view.queries[token.index]} ${view.keys[row]}` : `${view.queries[row]} ${view.keys[token.index]}`);
    view.panels.forEach((panel, number_) => {
      const weights = weightsOfToken(panel, token);
      for (const side of ["queries", "keys"]) {
        const others = token && token.side !== side;
        panel.place.querySelectorAll(`.${side} li`).forEach((item, row) => {
          const [button, weight, shares] = item.children;
          const chosen = Boolean(token && !others && row === token.index);
          button.classList.toggle("chosen", chosen);
          button.classList.toggle("pointed", Boolean(others && row === token.cell));
          button.setAttribute("aria-pressed", Boolean(state.locked && chosen));
          button.classList.toggle("target", Boolean(others && isArc(row)));
          button.style.setProperty("--weight", others ? weights[row] / panel.highest : 0);
          weight.textContent = others && weights[row] >= 0.005 ? number(weights[row]) : "";
          if (others) weight.dataset.weight = weights[row].toPrecision(6);
          else delete weight.dataset.weight;
          if (shares) showShares(shares, others ? headsAt(panel, token, row) : [], panel.highest);
        });
      }
      showStrip(byId("strips").children[number_], panel, token, weights, isArc);
      drawLines(panel, token);
    });
    describe(token);
  }

  // The sentence as running text: the side that the weights are on, or the keys.
  function showStrip(strip, panel, token, weights, isArc) {
    const side = token && token.side === "keys" ? "queries" : "keys";
    const { tokens } = view.sides[side === "queries" ? 0 : 1];
    const isSame = view.sides[0] === view.sides[1];
    const spans = view[side].flatMap((index, row) => [element("span", {
      class: `${isSame && token && row === token.index ? "chosen" : ""} ${isArc(row) ? "target" : ""}`,
      style: `--weight: ${weights ? weights[row] / panel.highest : 0}`,
    }, tokens[index]), " "]);
    strip.replaceChildren(...strip.querySelectorAll("b"), ...spans);
  }

  function drawLines(panel, token) {
    const middle = (row) => (row + 0.5) * ROW;
    const isDrawn = (query, key) => !token || (token.side === "queries" ? query : key) === token.index;
    const several = state.heads.length > 1;
    // Lines of several heads side by side: equal weights would hide each other.
    const gap = Math.min(3, 16 / state.heads.length);
    const shift = (colour) => (colour - (state.heads.length - 1) / 2) * gap;
    const parts = [];
    view.queries.forEach((queryToken, query) => view.keys.forEach((keyToken, key) => {
      if (!isDrawn(query, key)) return;
      const ends = (shifted) => `x1="0" x2="100%" y1="${middle(query) + shifted}" y2="${middle(key) + shifted}"`;
      if (view.arcs.has(`${queryToken} ${keyToken}`)) parts.push(`<line class="arc" ${ends(0)}></line>`);
      for (const { rows, colour } of panel.heads) {
        const weight = rows[query][key] / panel.highest;
        const stroke = several ? ` style="stroke: ${colourOf(colour)}"` : "";
        if (weight >= FAINT) parts.push(`<line ${ends(shift(colour))}${stroke} stroke-opacity="${weight.toFixed(2)}"></line>`);
      }
    }));
    const height = Math.max(view.queries.length, view.keys.length) * ROW;
    // Only numbers and colours are inserted.
    panel.place.querySelector(".lines").innerHTML = `<svg height="${height}" aria-hidden="true">${parts.join("")}</svg>`;
  }

  // The largest weights in words, for screen readers as for everybody else.
  function describe(token) {
    const status = byId("status");
    if (!view.panels.length) {
      status.textContent = "There are no such weights of these heads in this sentence.";
      return;
    }
    if (!token) {
      status.textContent = "Point at a token, or focus it, to see its weights; click to keep them, Escape to release.";
      return;
    }
    const own = token.side === "queries" ? 0 : 1;
    const tokenAt = (side, row) => view.sides[side].tokens[view[side ? "keys" : "queries"][row]];
    const parts = view.panels.map((panel) => {
      const best = weightsOfToken(panel, token).map((weight, row) => ({ weight, row })).sort((one, other) => other.weight - one.weight);
      const largest = (row) => headsAt(panel, token, row).reduce((one, other) => (other.weight > one.weight ? other : one));
      const byHead = (row) => (panel.heads.length > 1 ? ` (${largest(row).name}: ${number(largest(row).weight)})` : "");
      const told = ({ weight, row }) => `“${tokenAt(1 - own, row)}” ${number(weight)}${byHead(row)}`;
      const most = best.slice(0, 3).map(told).join(", ");
      const cell = best.find(({ row }) => row === token.cell);
      const list = cell ? `${told(cell)}, most: ${most}` : most;
      return measures.length > 1 ? `${labelOf(panel.measure)} ${list}` : list;
    });
    const direction = own ? "is attended to by" : "attends to";
    const several = view.panels[0].heads.length > 1 ? "on average (largest head) " : "";
    const verb = measures.length > 1 ? `as ${own ? "key" : "query"}:` : direction;
    status.textContent = `“${tokenAt(own, token.index)}” ${verb} ${several}${parts.join("; ")}${state.locked ? " (kept; Escape releases)" : ""}`;
  }

  build();
  return {
    show(heads) {
      state.heads = heads;
      state.muted = new Set();
      state.role = "";
      isolated = null;
      buildLegend();
      return refresh();
    },
    onSentence: (listener) => listeners.push(listener),
  };
}
