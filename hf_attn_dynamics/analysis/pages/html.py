# Licensed under the Apache License, Version 2.0.
"""Self-contained HTML pages: one file, without network access."""

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._files import write_text
from ..colours import COLOURS
from ..reading_examples import AttentionExample


if TYPE_CHECKING:
    from matplotlib.figure import Figure


ASSETS = Path(__file__).parent / "assets"
COLOUR_PROPERTIES = " ".join(f"--colour-{index}: {colour};" for index, colour in enumerate(COLOURS))
STYLE = (
    f":root {{ {COLOUR_PROPERTIES} }}"
    + """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --faint: #777; --line: #ddd; --blue: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #1b1b1b; --faint: #999; --line: #444; --blue: #56b4e9; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 90%; }
th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; }
figure { margin: 1rem 0; }
figcaption, .faint { color: var(--faint); font-size: 90%; }
img { max-width: 100%; background: #fff; }
/* Pictures are drawn on white. Inverting lightness but not hue keeps the colours of lines; heat maps stay, since their
   lightness is a value. */
@media (prefers-color-scheme: dark) { img:not(.heat) { filter: invert(.89) hue-rotate(180deg); } }
.scroll { overflow-x: auto; }
.side-by-side { display: flex; flex-wrap: wrap; gap: 1rem 3rem; }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg line { stroke: var(--blue); stroke-width: 2; }
dt { font-weight: bold; }
nav a { display: inline-block; margin-right: 1rem; }
summary { cursor: pointer; font-weight: 600; }
""".strip()
)

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
LINE_HEIGHT, GAP, MARGIN = 18, 90, 8  # of drawings of attention, in pixels
VISIBLE = 0.05  # weights below are not drawn


def embedded_json(value: Any) -> str:
    """JSON that may stand in a `script` element: no `<`, so neither `</script>` nor a comment can occur in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class HtmlPage:
    """An HTML page of headings, paragraphs, tables and pictures.

    Args:
        title (`str`): Title of the page.

    Example:
        >>> page = HtmlPage("Heads")
        >>> page.heading("What was measured")
        >>> page.paragraph("Attention of < 3 heads.")
        >>> "Attention of &lt; 3 heads." in page.render()
        True
    """

    def __init__(self, title: str):
        self.title = title
        self._parts: list[str] = []
        self._style = STYLE
        self._script = ""
        self._headings: list[str] = []

    def heading(self, text: str) -> None:
        """Begins a section, with a link at the top of the page."""
        self._headings.append(text)
        self._parts.append(f'<h2 id="section-{len(self._headings)}">{escape(text)}</h2>')

    def subheading(self, text: str) -> None:
        """Begins a subsection."""
        self._parts.append(f"<h3>{escape(text)}</h3>")

    def paragraph(self, text: str) -> None:
        """Adds a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Any]], digits: int = 2) -> None:
        """Adds a table. Numbers are right-aligned, `None` is shown as a dash.

        Args:
            header (sequence of `str`): Headings of the columns.
            rows (sequence of sequences): Cells.
            digits (`int`): Digits after the decimal point of floats.

        Raises:
            ValueError: if a row has more or fewer cells than the header.
        """
        for row in rows:
            if len(row) != len(header):
                raise ValueError(f"a row of the table has {len(row)} cells, its header {len(header)}: {row!r}.")
        columns = list(zip(*rows)) if rows else [()] * len(header)
        numeric = [any(_is_number(cell) for cell in column) for column in columns]

        def line(cells: Sequence[str], tag: str) -> str:
            kinds = [' class="number"' if right else "" for right in numeric]
            return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells)) + "</tr>"

        lines = [line([escape(name) for name in header], "th")]
        lines += [line([escape(_cell(cell, digits)) for cell in row], "td") for row in rows]
        self._parts.append(f'<div class="scroll"><table>{"".join(lines)}</table></div>')

    def picture(self, picture: "str | Path | Figure", caption: str, heat_map: bool = False) -> None:
        """Embeds a picture, with at most 256 colours.

        Args:
            picture (`str`, `Path` or `matplotlib.figure.Figure`): A PNG file, or a figure.
            caption (`str`): Caption, also the alternative text for screen readers.
            heat_map (`bool`): Whether the lightness of a colour is a value; dark mode then keeps the picture as it is.
        """
        if isinstance(picture, (str, Path)):
            content = Path(picture).read_bytes()
        else:
            buffer = io.BytesIO()
            picture.savefig(buffer, format="png", dpi=150)
            content = buffer.getvalue()
        data = base64.b64encode(_fewer_colours(content)).decode()
        kind = ' class="heat"' if heat_map else ""
        self._parts.append(
            f'<figure><img{kind} alt="{escape(caption)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )

    def attentions(self, examples: Sequence[AttentionExample]) -> None:
        """Adds drawings of attention side by side: lines from queries to keys.

        Raises:
            ValueError: if the weights do not have the shape (queries, keys).
        """
        figures = [
            f"<figure>{_drawing(queries, keys, weights)}<figcaption>{escape(caption)}</figcaption></figure>"
            for queries, keys, weights, caption in examples
        ]
        self._parts.append(f'<div class="side-by-side scroll">{"".join(figures)}</div>')

    def definitions(self, terms: dict[str, str]) -> None:
        """Adds a list of terms with their definitions, folded."""
        items = [f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in terms.items()]
        self._parts.append(f"<details><summary>Definitions</summary><dl>{''.join(items)}</dl></details>")

    def html(self, fragment: str) -> None:
        """Adds HTML as it is; the caller escapes text."""
        self._parts.append(fragment)

    def data(self, name: str, value: Any) -> None:
        """Adds data for a script: JSON in an element with the id `NAME-data`."""
        self.html(f'<script type="application/json" id="{name}-data">{embedded_json(value)}</script>')

    def program(self, *names: str) -> None:
        """Adds a script and its style, from the files `assets/NAME.js` and `assets/NAME.css`, in this order.

        The script runs after the content. Its files share one scope; it cannot load anything.
        """
        files = [ASSETS / f"{name}{suffix}" for suffix in (".css", ".js") for name in names]
        texts = {file: file.read_text(encoding="utf-8").strip() for file in files if file.is_file()}
        self._style += "".join(f"\n{text}" for file, text in texts.items() if file.suffix == ".css")
        script = "\n".join(text for file, text in texts.items() if file.suffix == ".js")
        self._script += f'\n"use strict";\n(() => {{\n{script}\n}})();'

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Adds the last section: how the page was made."""
        self.heading("How it was made")
        self.table(["what", ""], [[name.replace("_", " "), str(value)] for name, value in facts.items()])

    def body(self) -> str:
        """The content without title, links and style, to embed in another page."""
        return "\n".join(self._parts)

    def render(self) -> str:
        """The page as HTML."""
        links = "".join(
            f'<a href="#section-{number}">{escape(text)}</a>' for number, text in enumerate(self._headings, 1)
        )
        links = f"<nav>{links}</nav>\n" if links else ""
        # Browsers then refuse every request, whatever a script or a sentence contains.
        policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n' if self._script else ""
        script = f"\n<script>{self._script}\n</script>" if self._script else ""
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"{policy}<style>\n{self._style}\n</style></head>\n<body>\n<h1>{escape(self.title)}</h1>\n{links}"
            + self.body()
            + f"{script}\n</body></html>\n"
        )

    def save(self, path: str | Path) -> None:
        """Writes the page."""
        write_text(path, self.render())


def drawn(drawings: "Mapping[str, Callable[..., Figure]]", folder: str | Path | None) -> "dict[str, Path | Figure]":
    """Draws pictures for a page, and saves them if a folder is given.

    Args:
        drawings (`dict[str, callable]`): Functions that draw, by name of the picture; each takes `path` and returns
            the figure.
        folder (`str` or `Path`, *optional*): Where to save `NAME.png` and `NAME.svg`.

    Returns:
        `dict[str, Path | Figure]`: the PNG files or, without `folder`, the figures.
    """
    if folder is None:
        return {name: draw(path=None) for name, draw in drawings.items()}
    paths = {name: Path(folder) / f"{name}.png" for name in drawings}
    for name, draw in drawings.items():
        draw(path=paths[name])
    return paths


def _fewer_colours(content: bytes) -> bytes:
    """A PNG file with a palette of 256 colours, if it is smaller."""
    # Comes with Matplotlib, which pages without pictures do not need.
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(content)) as image:
        flat = Image.new("RGBA", image.size, "white")
        flat.alpha_composite(image.convert("RGBA"))
        # Spreads the palette over the colours that occur; median cut turns colour bars into a few steps.
        small = flat.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(buffer, format="PNG", optimize=True)
    return min(content, buffer.getvalue(), key=len)


def _is_number(cell: Any) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def _cell(cell: Any, digits: int) -> str:
    if cell is None or cell != cell:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.{digits}f}"
    return f"{cell:,}" if _is_number(cell) else str(cell)


def _drawing(queries: Sequence[str], keys: Sequence[str], weights: Sequence[Sequence[float]]) -> str:
    """SVG with queries on the left, keys on the right, and a line for each weight, whose opacity is the weight."""
    if len(weights) != len(queries) or any(len(row) != len(keys) for row in weights):
        raise ValueError(f"weights of an example must have shape ({len(queries)}, {len(keys)}): queries, keys.")
    # Letters are about half as wide as high.
    left = MARGIN + 8 * max(map(len, queries), default=0)
    right = left + GAP
    width = right + MARGIN + 8 * max(map(len, keys), default=0)
    height = MARGIN + LINE_HEIGHT * max(len(queries), len(keys))

    def middle(row: int) -> int:
        return MARGIN + LINE_HEIGHT * row + LINE_HEIGHT // 2

    parts = [
        f'<line x1="{left + 4}" y1="{middle(q)}" x2="{right - 4}" y2="{middle(k)}" stroke-opacity="{weight:.2f}"/>'
        for q, row in enumerate(weights)
        for k, weight in enumerate(row)
        if weight >= VISIBLE
    ]
    parts += [
        f'<text x="{left}" y="{middle(row) + 4}" text-anchor="end">{escape(word)}</text>'
        for row, word in enumerate(queries)
    ]
    parts += [f'<text x="{right}" y="{middle(row) + 4}">{escape(word)}</text>' for row, word in enumerate(keys)]
    return f'<svg width="{width}" height="{height}" role="img">{"".join(parts)}</svg>'
