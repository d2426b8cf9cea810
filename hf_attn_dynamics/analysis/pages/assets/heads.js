// The page of a HeadReading: the card of a head, its weights in example sentences, sorting and filters.
const data = dataOf("heads-data");
const other = byId("compared-data") ? dataOf("compared-data") : null; // the model that this one is compared with
for (const model of other ? [data, other] : [data]) {
  model.functionsOf = new Map(model.heads.map(([site, layer, head, names]) => [headKey({ site, layer, head }), names]));
}

function rolesOf(head, model = data) {
  const roles = model.roles.map((role) => ({
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
    return { cells: [name, number(value), rankOf(value, values)] };
  });
  return table(["measure", "value", "rank"], rows, [1, 2]);
}

// What a function is judged by: [what was measured, value, baseline, value that it needs]; null if unknown.
function evidence(name, head, model = data) {
  const { positional, delimiters, role: margin } = data.threshold;
  const measure = model.measures.find((one) => one.name === "attention to delimiters");
  if (name === "positional") {
    const best = valueAt(model.offsets.best, head);
    return best && [`offset ${signed(best[0])}`, best[1], null, positional];
  }
  if (name === "delimiters") {
    const value = measure ? valueAt(measure.values, head) : null;
    return value === null ? null : ["mean weight", value, null, delimiters];
  }
  const role = rolesOf(head, model).find((one) => one.function === name);
  return role && [role.name, role.score, role.base, role.base + margin];
}

function functionsTable(head) {
  const names = data.functionsOf.get(headKey(head));
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

function offsetProfile(head, model = data) {
  const values = valueAt(model.offsets.attention, head);
  const best = valueAt(model.offsets.best, head);
  if (!values) return null;
  const { limit } = model.offsets;
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

function cardOf(head) {
  const roles = rolesOf(head);
  return [
    functionsTable(head),
    roles.length ? element("details", {}, element("summary", {}, `All ${roles.length} roles`), rolesTable(roles)) : null,
    measuresTable(head),
    offsetProfile(head),
  ];
}

function showCard(head) {
  const parts = comparison ? comparison.cardOf(head) : cardOf(head);
  byId("card").replaceChildren(element("h3", {}, nameOf(head)), ...parts.filter((part) => part !== null));
}

const comparison = other ? compareModels(data, other) : null;
const [sentences, weights] = [dataOf("sentences-data"), data.weights];
const view = sentenceView(byId("attention"), sentences, comparison ? comparison.label(weights) : weights,
  { first: data.sentence, beside: data.beside, rolesOf, ...(comparison ? comparison.view : {}) });
const choose = headGrids((heads, last) => {
  rows.select(heads);
  if (comparison) comparison.select(heads);
  showCard(last);
  return view.show(heads);
});
const onSelect = (head) => choose([head]);
const rows = headTable(byId("heads-table"), byId("heads-filters"), { functions: data.functions, onSelect });
if (comparison) comparison.start(onSelect, view.onSentence);
const [site, layer, head] = data.first;
choose([{ site, layer, head }]).then(ready);
