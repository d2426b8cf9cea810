import base64
import io
import re
from html.parser import HTMLParser

import pytest
from PIL import Image, ImageChops

from hf_attn_dynamics.analysis.pages.html import HtmlPage


PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)


class Balance(HTMLParser):
    """Fails where tags are not closed in order."""

    empty = ("meta", "img", "line")

    def __init__(self):
        super().__init__()
        self.open = []
        self.text = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.empty:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def page(tmp_path):
    page = HtmlPage("Heads of <model>")
    page.heading("Maps & more")
    page.subheading("layer 0")
    page.paragraph("a < b")
    page.table(["head", "share"], [["<0>", 0.5], ["1", None], ["2", float("nan")]])
    picture = tmp_path / "map.png"
    picture.write_bytes(PIXEL)
    page.picture(picture, 'the "map"')
    page.attentions([(["</svg>", "b"], ["x", "y"], [[0.9, 0.1], [0.01, 0.99]], "head <3>")])
    page.definitions({"gate": "a <number>"})
    return page


def test_the_page_is_well_formed_and_escapes_what_it_shows(page):
    parser = Balance()
    parser.feed(page.render())
    assert parser.open == []
    text = "".join(parser.text)
    for shown in ("Heads of <model>", "Maps & more", "a < b", "<0>", "</svg>", "head <3>", "a <number>"):
        assert shown in text


def test_nothing_is_loaded_from_elsewhere(page):
    html = page.render()
    assert "http" not in html
    assert "<script" not in html
    assert re.findall(r'(?:src|href)="([^"]{0,5})', html) == ["#sect", "data:"]


def test_numbers_are_aligned_and_missing_ones_are_dashes(page):
    html = page.render()
    assert '<td class="number">0.50</td>' in html
    assert html.count('<td class="number">–</td>') == 2


def test_lines_are_as_strong_as_weights_and_faint_ones_are_left_out(page):
    assert re.findall(r'stroke-opacity="(.*?)"', page.render()) == ["0.90", "0.10", "0.99"]


def test_saving_writes_the_page(page, tmp_path):
    page.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page.render()


def test_pictures_have_a_palette_that_stays_close_to_their_colours(tmp_path):
    image = Image.new("RGB", (256, 64))
    image.putdata([(column, 255 - column, row * 4) for row in range(64) for column in range(256)])
    image.save(tmp_path / "gradient.png")
    page = HtmlPage("x")
    page.picture(tmp_path / "gradient.png", "a gradient", heat_map=True)
    (data,) = re.findall(r'<img class="heat" alt="a gradient" src="data:image/png;base64,(.*?)"', page.render())
    small = Image.open(io.BytesIO(base64.b64decode(data)))
    assert len(data) < (tmp_path / "gradient.png").stat().st_size * 4 / 3 + 4
    differences = ImageChops.difference(small.convert("RGB"), image).getextrema()
    assert max(high for _, high in differences) < 40


def test_shapes_must_fit():
    page = HtmlPage("x")
    with pytest.raises(ValueError, match="a row of the table has 1 cells, its header 2"):
        page.table(["a", "b"], [[1]])
    with pytest.raises(ValueError, match=r"weights of an example must have shape \(1, 2\)"):
        page.attentions([(["a"], ["b", "c"], [[1.0]], "")])
