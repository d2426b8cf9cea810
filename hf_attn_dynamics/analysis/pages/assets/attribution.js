// The page of AttributionFindings: heads coloured by a score, their card, and their weights in example texts.
const data = dataOf("heads-data");
const typesOf = new Map(data.types.map(([site, layer, head, attention, contribution]) =>
  [headKey({ site, layer, head }), [attention, contribution]]));
const view = sentenceView(byId("attention"), dataOf("sentences-data"), data.weights, { beside: "global" });
const rows = headTable(byId("heads-table"), byId("heads-filters"), { onSelect: (head) => choose([head]) });

function showCard(head) {
  const scores = data.scores.map(({ name, values }) => {
    const value = valueAt(values, head);
    return { cells: [name, number(value), rankOf(value, values)] };
  });
  const [attention, contribution] = typesOf.get(headKey(head));
  byId("card").replaceChildren(
    element("h3", {}, nameOf(head)),
    element("p", {}, `Most frequent type of its attention: ${attention}; of contributions of the input: ${contribution}.`),
    table(["score", "value", "rank"], scores, [1, 2]));
}

// Colours from the lowest to the highest score of all heads.
function colourBy(name) {
  const { values } = data.scores.find((one) => one.name === name);
  const all = allValues(values);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  for (const button of document.querySelectorAll(".grid button[data-head]")) {
    const value = valueAt(values, headOf(button));
    const part = value === null || high === low ? 0 : (value - low) / (high - low);
    button.style.background = value === null ? "" : `color-mix(in srgb, var(--blue) ${Math.round(100 * part)}%, var(--none))`;
    button.title = `${nameOf(headOf(button))}: ${name} ${number(value)}`;
  }
  byId("scale").textContent = all.length ? `Grey: ${number(low)}, blue: ${number(high)}.` : "";
}

byId("score-menu").append(element("label", {}, "Colour by ", element("select", {
  id: "score", onchange: (event) => colourBy(event.target.value),
}, ...data.scores.map(({ name }) => option(name, name, data.score)))));
colourBy(data.score);
const choose = headGrids((heads, last) => {
  rows.select(heads);
  showCard(last);
  return view.show(heads);
});
const [site, layer, head] = data.first;
choose([{ site, layer, head }]).then(ready);
