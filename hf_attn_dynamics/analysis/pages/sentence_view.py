# Licensed under the Apache License, Version 2.0.
"""The part of a page that shows the weights of heads between the tokens of sentences."""

from collections.abc import Sequence

from ..attribution.claims import MAP_LABELS
from ..sentence_maps import SentenceMaps
from .html import HtmlPage


LABELS = {**MAP_LABELS, "value_weighted": "value-weighted attention"}


def weights_menu(sentences: Sequence[SentenceMaps]) -> list[dict[str, str]]:
    """Names and labels of the weights that the sentences have."""
    names = dict.fromkeys(name for one in sentences for name in one.weights)
    return [{"name": name, "label": LABELS.get(name, name)} for name in names]


def add_sentences(page: HtmlPage, sentences: Sequence[SentenceMaps]) -> None:
    """Adds the weights of heads in sentences, and the element that `assets/sentence.js` fills."""
    page.data("sentences", [one._asdict() | {"sides": [side._asdict() for side in one.sides]} for one in sentences])
    page.html(
        '<section id="attention" class="script-only" aria-label="Weights of the selected heads" hidden></section>'
    )
