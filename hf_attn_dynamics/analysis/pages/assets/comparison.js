// Two models on one page: A, whose page it is, and B. The card of a head shows the values of both.
const LETTERS = ["A", "B"];
const change = ([one, two]) => (one === two ? one : `${one} → ${two}`);
const isRemoved = (model, head) => !model.functionsOf.has(headKey(head));

// With a digit more than `percent`, so that differences are those of the written numbers.
const percentage = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}\u00a0%`);

// B − A with its sign, a dash without one of the values; `scale` 100 for percentage points.
function difference([one, two], digits, scale = 1) {
  if ([one, two].some((value) => value === null || value === undefined)) return "–";
  const text = (scale * (two - one)).toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : signed(text);
}

// The head of a cell of a grid by its place: crosses are not buttons.
const headOfCell = (cell) => ({
  site: cell.closest("table").querySelector("button[data-head]")?.dataset.site,
  layer: Number(cell.parentElement.querySelector("th").textContent),
  head: cell.cellIndex - 1,
});

// Texts of both models, "removed" for the one that lacks the head.
const ofBoth = (models, head, textOf) => models.map((model, index) => (isRemoved(model, head) ? "removed" : textOf(model, index)));

function comparedFunctions(models, head) {
  const rows = models[0].functions.map((name, index) => {
    const found = models.map((model) => (isRemoved(model, head) ? null : evidence(name, head, model)) ?? null);
    const known = found.filter((one) => one !== null);
    const plays = models.map((model) => (model.functionsOf.get(headKey(head)) ?? []).includes(name));
    const chip = element("span", { class: plays.includes(true) ? `chip function-${index}` : "chip", "aria-hidden": "true" });
    const by = [known[0]?.[0] ?? "–", known[known.length - 1]?.[0] ?? "–"];
    const values = found.map((one) => (one ? one[1] : null));
    return {
      cells: [
        element("span", { class: "name" }, chip, name),
        change(by),
        ...ofBoth(models, head, (_, number_) => percentage(values[number_])),
        by[0] === by[1] ? difference(values, 1, 100) : "–",
        change([percentage(known[0]?.[3]), percentage(known[known.length - 1]?.[3])]),
        change(ofBoth(models, head, (_, number_) => (found[number_] ? (plays[number_] ? "yes" : "no") : "–"))),
      ],
      className: plays[0] !== plays[1] ? "exceeds" : "",
    };
  });
  return table(["function", "by", ...LETTERS, "B − A, points", "needs", "enough"], rows, [2, 3, 4, 5]);
}

function comparedMeasures(models, head) {
  const names = [...new Set(models.flatMap((model) => model.measures.map(({ name }) => name)))];
  const rows = names.map((name) => {
    const values = models.map((model) => {
      const measure = model.measures.find((one) => one.name === name);
      return measure ? valueAt(measure.values, head) : null;
    });
    return { cells: [name, ...ofBoth(models, head, (_, index) => number(values[index], 3)), difference(values, 3)] };
  });
  return table(["measure", ...LETTERS, "B − A"], rows, [1, 2, 3]);
}

function comparedRoles(models, head) {
  const roles = models.map((model) => new Map(rolesOf(head, model).map((role) => [role.name, role])));
  const names = [...new Set(roles.flatMap((one) => [...one.keys()]))];
  if (!names.length) return null;
  const rows = names.map((name) => {
    const own = roles.map((one) => one.get(name));
    const values = own.map((role) => (role ? role.score : null));
    const known = own.filter(Boolean);
    return {
      cells: [
        name,
        ...ofBoth(models, head, (_, index) => percentage(values[index])),
        difference(values, 1, 100),
        change([percentage(known[0].base), percentage(known[known.length - 1].base)]),
        change(ofBoth(models, head, (_, index) => (own[index] ? own[index].words : "–"))),
      ],
      className: known.some((role) => role.exceeds) ? "exceeds" : "",
    };
  });
  return element("details", {}, element("summary", {}, `All ${names.length} roles`),
    table(["role", ...LETTERS, "B − A, points", "baseline", "verdict"], rows, [1, 2, 3, 4]));
}

function comparedOffsets(models, head, names) {
  const profiles = models.map((model, index) => element("div", {}, element("h4", {}, names[index]),
    isRemoved(model, head) ? element("p", {}, "Removed.") : offsetProfile(head, model) ?? element("p", {}, "–")));
  return element("div", { class: "two-profiles" }, ...profiles);
}

// `first`, `second`: data of the two models. Returns what the page of heads needs of both.
function compareModels(first, second) {
  const models = [first, second];
  const status = element("p", { id: "comparison-note", role: "status" });
  let chosen = [];
  byId("attention").before(status);

  // What the view of a sentence cannot show, in words.
  function note(sentence) {
    const several = chosen.length > 1;
    const removed = models.flatMap((model, index) => {
      const names = chosen.filter((head) => isRemoved(model, head)).map(shortName);
      return names.length ? [`${several ? names.join(", ") : "The head"} ${names.length > 1 ? "are" : "is"} removed in ${LETTERS[index]}.`] : [];
    });
    const missing = sentence && !sentence.weights[second.compared] ? ["B has no weights of these tokens."] : [];
    status.textContent = [...removed, ...missing].join(" ");
  }

  return {
    label: (weights) => weights.map(({ name, label }) => ({ name, label: second.labels[name] ?? label })),
    view: {
      beside: second.compared,
      rolesOf: (head) => rolesOf(head, isRemoved(first, head) ? second : first),
      hasWeights: (measure, head) => !isRemoved(models[measure === second.compared ? 1 : 0], head),
    },
    cardOf: (head) => [
      element("p", { class: "faint" }, second.models.join("; ")),
      comparedFunctions(models, head), comparedRoles(models, head), comparedMeasures(models, head),
      comparedOffsets(models, head, second.models),
    ],
    // Removed heads have no button: their crosses are marked.
    select(heads) {
      chosen = heads;
      const keys = new Set(heads.map(headKey));
      const mark = (one, head) => one.classList.toggle("selected", keys.has(headKey(head)));
      document.querySelectorAll(".grid td.removed").forEach((cell) => mark(cell, headOfCell(cell)));
      document.querySelectorAll(".moved tbody tr").forEach((row) => mark(row, headOf(row)));
      note(null);
    },
    start(onSelect, onSentence) {
      document.querySelectorAll("table.moved").forEach((one) => linkHeads([...one.tBodies[0].rows], onSelect));
      onSentence(({ sentence }) => note(sentence));
    },
  };
}
