# Licensed under the Apache License, Version 2.0.
"""Attention of all heads in a text of one's own, and contributions to them: for notebooks, or as a page."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...models.head_roles import locate_heads
from ..contribution_names import CONTRIBUTIONS, check_contributions
from ..head_scores import Head
from ..heads.maps import text_inputs
from ..running import reader_of
from ..sentence_maps import (
    SentenceMaps,
    measured_weights,
    pair_of,
    probe_settings,
    side_of,
)
from .grid import head_grids
from .html import HtmlPage
from .sentence_view import add_sentences, weights_menu


IDS = ("input_ids", "decoder_input_ids")
MOST_WEIGHTS = 8_000_000  # layers × heads × queries × keys of all texts and measures
ROW, CELL = 22, 38  # heights of a token and of a head in pixels
LEAST_HEIGHT, MOST_HEIGHT = 360, 900


class HeadView:
    """The weights of all heads in some texts, see [`show_heads`]: shown by notebooks, or saved as a page.

    Args:
        sentences (`list[SentenceMaps]`): The texts and their weights.
        title (`str`): Title of the page.
        beside (`str`): Name of the weights that are shown beside the first ones; none if empty.
        note (`str`): How the weights were computed.
    """

    def __init__(self, sentences: Sequence[SentenceMaps], title: str, beside: str = "", note: str = ""):
        self.sentences = list(sentences)
        self.title = title
        self.beside = beside
        self.note = note

    @property
    def heads(self) -> dict[str, list[tuple[int, int]]]:
        """Layers and heads that are not removed, by kind of site."""
        return {kind: [tuple(head) for head in heads] for kind, heads in self.sentences[0].heads.items()}

    def page(self) -> HtmlPage:
        """The page: a grid of heads with their maps, and the weights of the selected heads."""
        present = self.heads
        first = _clearest(self.sentences[0])
        page = HtmlPage(self.title)
        page.data("heads", {"first": first, "weights": weights_menu(self.sentences), "beside": self.beside})
        grid = head_grids(
            {kind: tuple(shape) for kind, shape in self.sentences[0].shapes.items()},
            lambda head: ("", "<canvas></canvas>") if head[1:] in present[head[0]] else None,
        )
        page.html(
            f"""<noscript><p>This view needs JavaScript.</p></noscript>
<div class="explorer texts"><div>{grid}
<p class="faint">The map of each head: a row per query, a column per key. Click a head; with Shift, a click adds one;
the number of a layer shows all of its heads. {escape(self.note)}</p></div>"""
        )
        add_sentences(page, self.sentences)
        page.html("</div>")
        page.program("common", "sentence", "texts")
        return page

    def save(self, path: str | Path) -> None:
        """Writes the view as an HTML page, in one file that needs no network."""
        self.page().save(path)

    def _repr_html_(self) -> str:
        """The page in a frame of its own: neither its style nor its script reaches the notebook."""
        layers = max(layers for layers, _ in self.sentences[0].shapes.values())
        tokens = max(len(side.tokens) for one in self.sentences for side in one.sides)
        height = min(max(LEAST_HEIGHT, 150 + CELL * layers, 260 + ROW * tokens), MOST_HEIGHT)
        return (
            f'<iframe srcdoc="{escape(self.page().render())}" sandbox="allow-scripts" title="{escape(self.title)}" '
            f'style="width:100%;height:{height}px;border:0;resize:vertical"></iframe>'
        )

    def __repr__(self) -> str:
        texts = [one.text for one in self.sentences]
        return f"HeadView({texts!r}, weights={list(self.sentences[0].weights)}); notebooks show it, save() writes it."


def show_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str],
    text_pair: str | None = None,
    target: str | None = None,
) -> HeadView:
    """Shows the attention of all heads in a text: a map of each head, and lines between the tokens.

    In a notebook, the result is shown in place: click a head, point at a token, click it to keep its weights. All
    attention kernels are supported, and pruned models, whose removed heads are crossed.

    Args:
        model (`PreTrainedModel`): Any text model that [`observe`] accepts.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the model.
        text (`str` or `list[str]`): The text; of several texts, one is chosen from a menu.
        text_pair (`str`, *optional*): A second text, for models that read pairs.
        target (`str`, *optional*): Target text of an encoder–decoder model; by default, the model writes one of up to
            64 tokens, by greedy search.

    Returns:
        [`HeadView`]: `save(path)` writes it as a page in one file that needs no network.

    Raises:
        ValueError: if there is no text, a text is empty or too long to be shown, several texts have one `text_pair` or
            `target`, or the model cannot be observed, reads no target, or cannot write one.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics.data import train_byte_level_bpe
        >>> tokenizer = train_byte_level_bpe(["the cat sat", "the dog ran"], 300, kind="bert")
        >>> config = BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> view = show_heads(BertModel(config), tokenizer, "the cat ran")
        >>> view.sentences[0].shapes
        {'encoder': [2, 4]}
    """
    return HeadView(*_sentences("Attention heads", model, tokenizer, text, text_pair, target))


def show_contributions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str],
    text_pair: str | None = None,
    contributions: Sequence[str] = CONTRIBUTIONS,
    *,
    method: str = "probes",
    probes: int = 32,
    **settings: Any,
) -> HeadView:
    """Shows contributions to all heads in a text beside their attention; see [`show_heads`].

    Args:
        model (`PreTrainedModel`): See [`local_contribution`]; of an encoder–decoder model, the encoder is shown.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the model.
        text (`str` or `list[str]`): The text; of several texts, one is chosen from a menu.
        text_pair (`str`, *optional*): A second text, for models that read pairs.
        contributions (`list[str]`): Some of `value_weighted` ([`value_weighted_attention`]), `local`
            ([`local_contribution`]) and `global` ([`global_contribution`]). The last one is shown first.
        method (`str`): How [`global_contribution`] is computed: `probes` estimates it, which takes seconds; `exact`
            takes minutes for models as wide as BERT.
        probes (`int`): Random directions per token, for `probes`; at most the size of the embeddings.
        settings: Further arguments of [`global_contribution`], such as `source` or `norm`.

    Returns:
        [`HeadView`]

    Raises:
        ValueError: see [`show_heads`]; or if `contributions` is empty or names something else.
    """
    check_contributions(contributions)
    if not contributions:
        raise ValueError(f"contributions must name at least one of {', '.join(CONTRIBUTIONS)}, got none.")
    reader, note = reader_of(model), ""
    if "global" in contributions:
        settings |= probe_settings(reader, probes) if method == "probes" else {"method": method}
        if method == "probes":
            note = f"Contributions of the input are estimated from {settings['probes']} random directions per token."
    elif settings:
        raise ValueError(f"{', '.join(settings)}: only for global contributions; add 'global' to contributions.")
    shown = _sentences("Contributions", reader, tokenizer, text, text_pair, None, contributions, settings)
    return HeadView(*shown, contributions[-1], note)


def _sentences(
    title: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Sequence[str],
    text_pair: str | None,
    target: str | None,
    contributions: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
) -> tuple[list[SentenceMaps], str]:
    """The texts with their weights, and the title of their page."""
    texts = [text] if isinstance(text, str) else list(text)
    if not texts or not all(isinstance(one, str) and one.strip() for one in texts):
        raise ValueError(f"text must be a text, or a list of texts, none of them empty; got {text!r}.")
    for name, given in (("text_pair", text_pair), ("target", target)):
        if given is not None and len(texts) > 1:
            raise ValueError(f"{name} belongs to a single text, got {len(texts)} texts.")
    encoded = [text_inputs(model, tokenizer, one, text_pair, target) for one in texts]
    _check_size(model, encoded, 1 + len(contributions))
    sentences = []
    for one, inputs in zip(texts, encoded):
        sides = [side_of(inputs[name][0].tolist(), tokenizer) for name in IDS if name in inputs]
        shown = one if text_pair is None else f"{one} {text_pair}"
        weights = measured_weights(model, inputs, contributions, **(settings or {}))
        sentences.append(SentenceMaps.of(shown, sides, weights))
    if not sentences[0].shapes:
        raise ValueError(f"{type(model).__name__} has computed no attention between tokens that could be shown.")
    name = getattr(model.config, "name_or_path", "") or type(model).__name__
    # A folder by its last part: pages are shown to others.
    name = Path(name).name if Path(name).is_dir() else name
    return sentences, f"{title} of {name}"


def _clearest(sentence: SentenceMaps) -> Head:
    """The head that attends most to single tokens, other than special tokens and the query itself."""
    clarity = {}
    for kind, table in sentence.unpacked().items():
        queries, keys = pair_of(kind, sentence.sides)
        table[..., keys.special] = 0
        if queries is keys:
            table.diagonal(dim1=-2, dim2=-1).zero_()
        means = table.amax(-1).mean(-1)
        layer, head = divmod(means.argmax().item(), means.shape[1])
        clarity[kind, layer, head] = means.max().item()
    return max(clarity, key=clarity.get)


def _check_size(model: PreTrainedModel, encoded: Sequence[Mapping[str, torch.Tensor]], measures: int) -> None:
    """Checks that the weights of the texts fit into a page.

    Raises:
        ValueError: if there are too many.
    """
    heads = Counter()
    for layer in locate_heads(model):
        heads[layer.site.kind] += layer.num_heads
    lengths = [[inputs[name].shape[1] for name in IDS if name in inputs] for inputs in encoded]
    weights = measures * sum(count * math.prod(pair_of(kind, one)) for kind, count in heads.items() for one in lengths)
    if weights > MOST_WEIGHTS:
        longest = max(map(max, lengths))
        raise ValueError(
            f"text has up to {longest:,} tokens, for which {sum(heads.values())} heads have {weights:,} weights, but "
            f"a page shows at most {MOST_WEIGHTS:,}; shorten it, or use attention_maps(model, batch, layers=[...])."
        )
