// The page of a HeadTimeline: a slider over the steps moves the colours of the grid and the marks on the curves.
const data = dataOf("timeline-data");
const MARGIN = { left: 56, right: 14, top: 12, bottom: 38 };
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const MOST_POINTS = 60; // of a curve that has a point with its value at each step
const heads = [...document.querySelectorAll(".grid button[data-head]")].map((button) => {
  const head = headOf(button);
  return { button, head, name: nameOf(head), last: valueAt(data.last, head) };
});
data.statistics.forEach((one) => { one.limits = roundLimits(one.limits); });
let statistic = data.statistics[0];
let position = statistic.steps.length - 1;
let chosen = [];
let marks = []; // a function per drawing, which moves its mark to a step

const stepNow = () => statistic.steps[position];
const written = (value) => (value === null ? "–" : `${value}`.replaceAll("-", "−"));
const valuesOf = (head) => valueAt(statistic.values, head) ?? statistic.steps.map(() => null);
const titleOf = ({ name, unit }) => (unit ? `${name} (${unit})` : name);

// Drawings.

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// The distance of about `count` round numbers between two values.
function tickWidth(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
}

function ticks(low, high, count = 5) {
  const width = tickWidth(low, high, count);
  const found = [];
  for (let index = Math.ceil(low / width - 1e-6); index <= high / width + 1e-6; index += 1) {
    found.push(Number((index * width).toPrecision(6)));
  }
  return found;
}

// Moves the limits of a scale outwards to round numbers. They are then further apart, so that this is done twice.
function roundLimits(limits, times = 2) {
  if (!times) return limits;
  const width = tickWidth(...limits, 5);
  const rounded = [Math.floor(limits[0] / width + 1e-6), Math.ceil(limits[1] / width - 1e-6)];
  return roundLimits(rounded.map((one) => Number((one * width).toPrecision(6))), times - 1);
}

const linear = ([low, high], [from, to]) => (value) => from + ((to - from) * (value - low)) / (high - low || 1);

// The index of the last of the steps that is not after `step`; 0 if all are.
const indexAt = (steps, step) => Math.max(0, steps.findLastIndex((one) => one <= step));

function pathOf(steps, values, x, y) {
  let pen = "M";
  return steps.map((step, index) => {
    if (values[index] === null) { pen = "M"; return ""; }
    const part = `${pen}${x(step).toFixed(1)} ${y(values[index]).toFixed(1)}`;
    pen = "L";
    return part;
  }).join("");
}

function axes(x, y, limits, { width, height }) {
  const { left, right, top, bottom } = MARGIN;
  const line = (x1, y1, x2, y2, name) => svg("line", { x1, y1, x2, y2, class: name });
  const text = (at, where, anchor, content, name) => svg("text", { x: at, y: where, "text-anchor": anchor, class: name }, content);
  return svg("g", { "aria-hidden": "true" },
    ...ticks(...limits).flatMap((value) => [
      line(left, y(value), width - right, y(value), "rule"),
      text(left - 6, y(value) + 4, "end", written(value), "y-tick")]),
    ...ticks(...data.steps, width < 400 ? 4 : 6).flatMap((step) => [
      line(x(step), height - bottom, x(step), height - bottom + 4, "axis"),
      text(x(step), height - bottom + 17, "middle", `${step}`, "x-tick")]),
    line(left, height - bottom, width - right, height - bottom, "axis"),
    text((left + width - right) / 2, height - 4, "middle", "optimizer step", "x-name"));
}

function thresholdLine(level, y, width) {
  const { left, right } = MARGIN; // The name is at the left, where few heads have reached the threshold.
  return svg("g", { class: "threshold" },
    svg("line", { x1: left, y1: y(level), x2: width - right, y2: y(level) }),
    svg("text", { x: left + 4, y: y(level) - 4 }, `threshold ${level}`));
}

function curve({ name, steps, values, colour, dash }, x, y) {
  const points = steps.length > MOST_POINTS ? [] : steps.flatMap((step, index) => (values[index] === null ? [] : [
    svg("circle", { cx: x(step).toFixed(1), cy: y(values[index]).toFixed(1), r: 2.5, class: "point", "data-step": step },
      svg("title", {}, `${name}, step ${step}: ${written(values[index])}`))]));
  return svg("g", { style: `--curve: ${colour}`, class: "curve" },
    svg("path", { d: pathOf(steps, values, x, y), "stroke-dasharray": dash }), ...points);
}

// Draws curves with their axes. Each of `series` has {name, steps, values, colour, dash}.
function draw(place, { label, limits, series, threshold = null, height }) {
  const width = Math.min(Math.max(place.clientWidth, 240), 680);
  const x = linear(data.steps, [MARGIN.left, width - MARGIN.right]);
  const y = linear(limits, [height - MARGIN.bottom, MARGIN.top]);
  const now = svg("line", { y1: MARGIN.top, y2: height - MARGIN.bottom, class: "now" });
  const dots = series.map(({ colour }) => svg("circle", { r: 4.5, class: "now", style: `--curve: ${colour}` }));
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    axes(x, y, limits, { width, height }),
    ...(threshold === null ? [] : [thresholdLine(threshold, y, width)]), now,
    ...series.map((one) => curve(one, x, y)), ...dots);
  picture.addEventListener("click", (event) => {
    const share = (event.clientX - picture.getBoundingClientRect().left - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
    moveToStep(data.steps[0] + share * (data.steps[1] - data.steps[0]));
  });
  place.replaceChildren(picture);
  return (step) => {
    now.setAttribute("x1", x(step));
    now.setAttribute("x2", x(step));
    series.forEach(({ steps, values }, index) => {
      const at = indexAt(steps, step);
      const isThere = steps[at] <= step && values[at] !== null;
      dots[index].setAttribute("visibility", isThere ? "visible" : "hidden");
      if (!isThere) return;
      dots[index].setAttribute("cx", x(steps[at]));
      dots[index].setAttribute("cy", y(values[at]));
    });
  };
}

// Curves: the chosen heads, and the metrics of the whole model.

function legendOf(series) {
  const values = series.map(() => element("b"));
  const sample = ({ colour, dash }) => svg("svg", { width: 26, height: 10, "aria-hidden": "true", class: "curve", style: `--curve: ${colour}` },
    svg("path", { d: "M0 5L26 5", "stroke-dasharray": dash }));
  const list = element("ul", { class: "legend" },
    ...series.map((one, index) => element("li", {}, sample(one), ` ${one.name}: `, values[index])));
  const mark = (step) => series.forEach((one, index) => {
    const at = indexAt(one.steps, step);
    values[index].textContent = written(one.steps[at] <= step ? one.values[at] : null);
  });
  return [list, mark];
}

function headCurves() {
  const series = chosen.map((head, index) => ({
    name: chosen.length > 1 ? shortName(head) : nameOf(head),
    steps: statistic.steps,
    values: valuesOf(head),
    colour: colourOf(index),
    dash: DASHES[Math.floor(index / 6) % DASHES.length],
  }));
  const place = element("div", { class: "drawing", id: "head-curves" });
  const [legend, mark] = legendOf(series);
  byId("curves").append(element("h3", {}, titleOf(statistic)), legend, place);
  const { limits, threshold } = statistic;
  const shown = threshold === null ? limits : roundLimits([Math.min(limits[0], threshold), Math.max(limits[1], threshold)]);
  const label = `${statistic.name} over the steps: ${series.map(({ name }) => name).join(", ")}`;
  marks.push(mark, draw(place, { label, limits: shown, series, threshold, height: 260 }));
}

function metricCurve({ name, steps, values }) {
  const numbers = values.filter((value) => value !== null);
  const limits = [Math.min(0, ...numbers), Math.max(...numbers)];
  if (!numbers.length || limits[0] === limits[1]) limits[1] = limits[0] + 1;
  const series = [{ name, steps, values, colour: "var(--blue)", dash: "" }];
  const place = element("div", { class: "drawing metric" });
  const [legend, mark] = legendOf(series);
  byId("curves").append(legend, place);
  marks.push(mark, draw(place, { label: `${name} over the steps`, limits: roundLimits(limits), series, height: 150 }));
}

function showCurves() {
  marks = [];
  byId("curves").replaceChildren();
  if (chosen.length) headCurves();
  if (data.metrics.length) byId("curves").append(element("h3", {}, "Metrics of the whole model"));
  data.metrics.forEach(metricCurve);
  marks.forEach((mark) => mark(stepNow()));
}

// The grid.

function showGrid() {
  const [low, high] = statistic.limits;
  for (const { button, head, name, last } of heads) {
    const value = valuesOf(head)[position];
    const isRemoved = stepNow() > last;
    const label = `${name}: ${isRemoved ? "removed" : value === null ? "no value" : written(value)}`;
    button.title = label;
    button.setAttribute("aria-label", label);
    button.classList.toggle("missing", value === null);
    button.textContent = isRemoved ? "×" : value === null ? "–" : "";
    button.style.setProperty("--value", value === null ? 0 : ((value - low) / (high - low)).toFixed(4));
  }
}

function showScale() {
  const [low, high] = statistic.limits;
  byId("scale").replaceChildren(
    element("p", {}, `${titleOf(statistic)}, the same scale at all steps:`),
    element("div", { class: "ramp", role: "img", "aria-label": `Scale from ${written(low)} to ${written(high)}` }),
    element("div", { class: "numbers", "aria-hidden": "true" }, ...ticks(low, high).map((one) => element("span", {}, written(one)))),
    element("p", { class: "faint" }, "×: removed. –: no value."));
}

// The controls.

const menu = element("select", { id: "statistic", onchange: () => choose(Number(menu.value)) },
  ...data.statistics.map(({ name }, index) => option(index, name, 0)));
const slider = element("input", { id: "step", type: "range", min: 0, step: 1, oninput: () => { stop(); move(Number(slider.value)); } });
const stepText = element("output", { for: "step", id: "step-text", "aria-live": "off" });
const playButton = element("button", { id: "play", type: "button", onclick: press });
const calm = matchMedia("(prefers-reduced-motion: reduce)");
let timer = null;

function move(index) {
  position = index;
  slider.value = index;
  slider.setAttribute("aria-valuetext", `step ${stepNow()}`);
  stepText.textContent = `${stepNow()}`;
  showGrid();
  marks.forEach((mark) => mark(stepNow()));
}

// The recorded step that is nearest to a place between steps.
function moveToStep(step) {
  const distances = statistic.steps.map((one) => Math.abs(one - step));
  stop();
  move(distances.indexOf(Math.min(...distances)));
}

function choose(index) {
  const step = stepNow();
  statistic = data.statistics[index];
  slider.max = statistic.steps.length - 1;
  showScale();
  showCurves();
  move(indexAt(statistic.steps, step));
}

function stop() {
  clearInterval(timer);
  timer = null;
  playButton.textContent = calm.matches ? "Next step" : "Play";
}

function advance() {
  const isLast = position === statistic.steps.length - 1;
  if (isLast && timer !== null) stop();
  else move(isLast ? 0 : position + 1);
}

// Plays in about eight seconds. Who prefers less motion moves one step at a time.
function press() {
  if (timer !== null) { stop(); return; }
  advance();
  if (calm.matches) return;
  playButton.textContent = "Pause";
  timer = setInterval(advance, Math.min(Math.max(8000 / statistic.steps.length, 60), 500));
}

byId("timeline-controls").append(
  element("label", {}, "Statistic ", menu),
  playButton,
  element("label", { for: "step", class: "step" }, "Step ", slider, " ", stepText));
calm.addEventListener("change", stop);
stop();

// Drawings have the width of the page, which they know once they are visible.
ready();
const select = headGrids((selected) => { chosen = selected; showCurves(); });
choose(0);
const [site, layer, head] = data.first ?? [];
const first = heads.find((one) => same(one.head, { site, layer, head })) ?? heads[0];
if (first) select([first.head]);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) showCurves();
  width = innerWidth;
});
