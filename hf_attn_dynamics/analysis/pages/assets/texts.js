// Texts of one's own: the map of each head in the grid, and the weights of the selected heads.
const data = dataOf("heads-data");
const view = sentenceView(byId("attention"), dataOf("sentences-data"), data.weights, { beside: data.beside });
const choose = headGrids((heads) => view.show(heads));
const maps = [...document.querySelectorAll(".grid button[data-head]")].map((button) => ({ head: headOf(button), canvas: button.firstChild }));
let drawn = ""; // sentence and measure of the maps in the grid

function drawMaps({ index, sentence, measure, tables }) {
  if (drawn === `${index} ${measure}`) return;
  drawn = `${index} ${measure}`;
  for (const { head, canvas } of maps) {
    canvas.hidden = !tables[head.site];
    if (canvas.hidden) continue;
    const rows = weightsOfHead(tables[head.site], sentence, head);
    drawWeights(canvas, rows, measure.startsWith("attention") ? 1 : largestOf(rows));
  }
}

let last = null;
view.onSentence((shown) => { last = shown; drawMaps(shown); });
onColourChange(() => { drawn = ""; if (last) drawMaps(last); });
const [site, layer, head] = data.first;
choose([{ site, layer, head }]).then(ready);
