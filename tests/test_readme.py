"""The README and the tour of functions show what really comes out."""

import doctest
import re
from pathlib import Path

import pytest

import hf_attn_dynamics


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOUR = (ROOT / "docs" / "guides" / "tour.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| [^|]+ \| `([^`]+)` \| `([^`]+)` \|$", TOUR, re.MULTILINE)


@pytest.fixture(scope="module")
def names():
    """What the code block before the table defines."""
    test = doctest.DocTestParser().get_doctest(TOUR, {"hf_attn_dynamics": hf_attn_dynamics}, "tour.md", None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, clear_globs=False)
    assert runner.failures == 0
    return test.globs


def test_there_are_examples():
    assert len(ROWS) >= 6


@pytest.mark.parametrize(("code", "output"), ROWS)
def test_an_example_gives_the_output_beside_it(code, output, names):
    try:
        found = repr(eval(code, names))  # noqa: S307 - our own README
    except TypeError as error:
        found = f"{type(error).__name__}: {error}"
    assert re.fullmatch(re.escape(output).replace("…", ".*"), found), found


LINKS = [
    (page.relative_to(ROOT), link)
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    for link in re.findall(r"\]\(((?!http|#)[^)\s]+)\)", page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "link"), LINKS, ids=[f"{page}-{link}" for page, link in LINKS])
def test_links_lead_somewhere(page, link):
    assert (ROOT / page).parent.joinpath(link.partition("#")[0]).exists()


def test_it_is_short():
    assert len(README.splitlines()) < 200


def test_both_commands_are_there():
    assert 'pip install -e ".[recipes]" && accelerate launch recipes/pretrain_ag.py' in README
    assert 'pip install -e ".[test]" && pytest' in README
