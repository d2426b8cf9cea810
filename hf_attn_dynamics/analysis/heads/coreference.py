# Licensed under the Apache License, Version 2.0.
"""How often heads attend from a mention to its antecedent (Clark et al. 2019; Deshpande & Narasimhan 2020)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...models.compat import passes_attention_interface
from ...models.head_roles import HeadLayer, locate_heads
from ...models.head_sites import HeadSite
from ...models.precision import at_least_single
from ..head_scores import BestHead, HeadScores, tabulate
from ..model_views import evaluation_view
from ..observers.base import AttentionCall, ObservedTokens, Observer, RowBlocks
from ..observers.observation import observe
from ..results import Result
from ..running import longest_input, reader_of
from ..sentences import batches_by_length, padded
from ..word_units import mean_of_pieces, number_units, pieces_of_units


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...data.coreference import CoreferenceItem


ALL = "all"  # the group of all items
TOO_LONG, UNKNOWN = "too long", "unknown word"  # reasons to skip items


@dataclass(frozen=True, eq=False)
class CoreferenceScores(Result):
    """Accuracy of each head by group of items, see [`coreference_accuracy`]; the group `"all"` holds all items.

    Args:
        accuracy (`dict[str, HeadScores]`): Fraction of items for which a head is right; NaN for removed heads.
        counts (`dict[str, int]`): Number of items.
        baselines (`dict[str, dict[str, float]]`): Accuracies, by group, of always choosing the `previous word` or the
            `first word`, of choosing the `nearest mention` before (if mentions are known), and of `chance`: the mean
            fraction of antecedents among all competitors.
        skipped (`dict[str, int]`): Number of skipped items by reason.
        special_tokens, mentions_only (`bool`): Which tokens competed.
    """

    accuracy: dict[str, HeadScores]
    counts: dict[str, int]
    baselines: dict[str, dict[str, float]]
    skipped: dict[str, int]
    special_tokens: bool
    mentions_only: bool

    def best(self, group: str = ALL) -> BestHead:
        """The head with the highest accuracy in a group of items.

        Raises:
            ValueError: if there is no such group.
        """
        return self._scores(group).best()

    def mean(self, group: str = ALL) -> float:
        """Mean accuracy of the remaining heads in a group of items.

        Raises:
            ValueError: if there is no such group.
        """
        return self._scores(group).mean()

    def _scores(self, group: str) -> HeadScores:
        if group not in self.accuracy:
            raise ValueError(f"group must be one of {', '.join(map(repr, self.accuracy))}, got {group!r}.")
        return self.accuracy[group]

    def pictures(self) -> "dict[str, Callable[..., Figure]]":
        """`accuracy`: a map of the heads for each group of items."""
        from ..plots.base import plot_head_maps

        groups = {group: dict(scores) for group, scores in self.accuracy.items()}
        return {"accuracy": partial(plot_head_maps, groups, "fraction of antecedents found")}

    columns = ["group", "site", "layer", "head", "accuracy"]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        for group, scores in self.accuracy.items():
            for row in scores.records():
                yield group, *row


def coreference_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Iterable["CoreferenceItem"],
    batch_size: int = 32,
    special_tokens: bool = True,
    mentions_only: bool = False,
    progress: bool = False,
) -> CoreferenceScores:
    """How often each head attends most from a mention to an antecedent (Deshpande & Narasimhan 2020, section 5.6).

    A head is right about an item if its attention from the head word of the mention to a word of an antecedent exceeds
    its attention to every other competitor; ties are wrong. Attention from a word is the mean over its tokens,
    attention to a word the sum over its tokens (Clark et al. 2019, section 4.1). All words of the text compete,
    including the mention itself and punctuation, and each special token. Words of an antecedent that are also words of
    the mention do not count as right.

    Clark et al. (2019) choose among mentions: with `mentions_only=True, special_tokens=False`, only the head words of
    antecedents and distractors compete.

    The model runs in evaluation mode under [`observe`]. Models that do not use the attention interface (DeBERTa,
    MPNet) return whole attention maps instead, which need more memory. Of an encoder–decoder model, the encoder is
    scored. If one module serves several layers (ALBERT), each layer is scored.

    Args:
        model (`PreTrainedModel`): Any text model that `locate_heads` supports, including pruned models.
        tokenizer ([`PreTrainedTokenizerBase`]): Tokenizer of the model.
        items (iterable of [`CoreferenceItem`]): Mentions and their antecedents. Items with the same text share a
            forward pass. Items are skipped if the text has more tokens than the model has positions for, if the
            mention or an antecedent has an unknown token, or if a head word has no token of its own.
        batch_size (`int`): Texts per batch; does not change the scores.
        special_tokens (`bool`): Whether special tokens compete.
        mentions_only (`bool`): Whether only head words of known mentions compete, instead of all words.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        [`CoreferenceScores`]

    Raises:
        ValueError: if there is no item, all items are skipped, or attention weights are missing or NaN.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics.data import embedded_coreference, train_byte_level_bpe
        >>> items = embedded_coreference()
        >>> tokenizer = train_byte_level_bpe([item.text for item in items], vocab_size=300, kind="bert")
        >>> config = BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> scores = coreference_accuracy(BertModel(config), tokenizer, items)
        >>> scores.counts, scores.accuracy["all"]["encoder"].shape
        ({'all': 20, 'pronominal': 20}, torch.Size([2, 4]))
        >>> scores.baselines["previous word"]["all"]
        0.0
    """
    texts, skipped = _encode(items, tokenizer, longest_input(model), special_tokens, mentions_only)
    questions = [question for text in texts for question in text.questions]
    groups = list(dict.fromkeys([ALL, *(question.item.group or ALL for question in questions)]))
    batches = batches_by_length(texts, batch_size, length=lambda text: len(text.input_ids))
    hits, reader = _Hits(), reader_of(model)
    with _observed(reader, hits) as run, torch.inference_mode():
        for some in tqdm(batches, desc="coreference", disable=not progress):
            hits.batch = _Batch(some, groups, tokenizer.pad_token_id or 0, reader.device)
            run(**hits.batch.inputs)
    found, layers = hits.compute(), list(hits.layers.values())
    counts = torch.stack([_membership(question, groups) for question in questions]).sum(0)
    return CoreferenceScores(
        accuracy={
            group: tabulate(layers, {site: table[index] / counts[index] for site, table in found.items()})
            for index, group in enumerate(groups)
        },
        counts=dict(zip(groups, counts.int().tolist())),
        baselines=_baselines(questions, groups),
        skipped=dict(skipped),
        special_tokens=special_tokens,
        mentions_only=mentions_only,
    )


@dataclass
class _Question:
    """An item, with the units of its text that are right and wrong."""

    item: "CoreferenceItem"
    right: set[int]
    wrong: set[int]


@dataclass
class _Text:
    """Tokens of a text, and the unit of each token: words in order, then special tokens."""

    input_ids: list[int]
    units: list[int]
    questions: list[_Question] = field(default_factory=list)


def _encode(
    items: Iterable["CoreferenceItem"],
    tokenizer: PreTrainedTokenizerBase,
    longest: int | None,
    special_tokens: bool,
    mentions_only: bool,
) -> tuple[list[_Text], Counter[str]]:
    """Unique texts with their items, and the number of skipped items."""
    # Imported here: reading data needs the library `datasets`, which importing this package does not.
    from ...data.words import encode_words

    texts: dict[tuple, _Text] = {}
    skipped: Counter[str] = Counter({TOO_LONG: 0, UNKNOWN: 0})
    for item in items:
        key = item.text, item.words
        if key not in texts:
            ids, words = encode_words(item, tokenizer)
            texts[key] = _Text(ids, number_units(words, len(item.words)))
        text = texts[key]
        if longest is not None and len(text.input_ids) > longest:
            skipped[TOO_LONG] += 1
        elif _is_unknown(item, text, tokenizer.unk_token_id):
            skipped[UNKNOWN] += 1
        else:
            text.questions.append(_question(item, set(text.units), special_tokens, mentions_only))
    if not any(text.questions for text in texts.values()):
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
        raise ValueError(f"items: none can be used ({reasons or 'none was given'}).")
    return [text for text in texts.values() if text.questions], skipped


def _is_unknown(item: "CoreferenceItem", text: _Text, unknown: int | None) -> bool:
    words = {word for mention in (item.mention, *item.antecedents) for word in range(mention.start, mention.stop)}
    heads = {mention.head for mention in (item.mention, *item.antecedents)}
    pieces = [(token, unit) for token, unit in zip(text.input_ids, text.units) if unit in words]
    return any(token == unknown for token, _ in pieces) or not heads <= {unit for _, unit in pieces}


def _question(item: "CoreferenceItem", units: set[int], special_tokens: bool, mentions_only: bool) -> _Question:
    if mentions_only:
        right = {mention.head for mention in item.antecedents}
        competing = right | {mention.head for mention in item.distractors}
    else:
        right = {word for mention in item.antecedents for word in range(mention.start, mention.stop)}
        right -= set(range(item.mention.start, item.mention.stop))
        competing = set(range(len(item.words)))
    if special_tokens:
        competing |= {unit for unit in units if unit >= len(item.words)}
    return _Question(item, right, competing - right)


def _baselines(questions: Sequence[_Question], groups: list[str]) -> dict[str, dict[str, float]]:
    values = torch.tensor([_guesses(question) for question in questions], dtype=torch.float64)
    members = torch.stack([_membership(question, groups) for question in questions])
    means = members.T @ values / members.sum(0)[:, None]
    names = ("previous word", "first word", "nearest mention", "chance")
    return {name: dict(zip(groups, column)) for name, column in zip(names, means.T.tolist(), strict=True)}


def _guesses(question: _Question) -> tuple[float, float, float, float]:
    item, right = question.item, question.right
    before = [mention for mention in (*item.antecedents, *item.distractors) if mention.head < item.mention.start]
    nearest = max(before, key=lambda mention: mention.head, default=None)
    chance = len(right) / (len(right) + len(question.wrong))
    return item.mention.start - 1 in right, 0 in right, nearest in item.antecedents, chance


def _membership(question: _Question, groups: list[str]) -> torch.Tensor:
    return torch.tensor([group in (ALL, question.item.group) for group in groups], dtype=torch.float64)


class _Batch:
    """Padded texts. Below, `questions` and `units` are the maxima over the texts."""

    def __init__(self, texts: list[_Text], groups: list[str], pad: int, device: torch.device):
        length = max(len(text.input_ids) for text in texts)
        number = max(len(text.questions) for text in texts)
        keys = pieces_of_units([text.units for text in texts], length)
        means = mean_of_pieces(keys)
        # The last words may have no token of their own.
        asked = [question for text in texts for question in text.questions]
        units = max(keys.shape[-1], *(unit + 1 for one in asked for unit in (*one.right, *one.wrong)))
        keys = nn.functional.pad(keys, (0, units - keys.shape[-1]))
        rows = torch.zeros(len(texts), number, length)  # mean over the tokens of the mention's head word
        right, wrong = torch.zeros(2, len(texts), number, units, dtype=torch.bool)
        members = torch.zeros(len(texts), number, len(groups), dtype=torch.float64)
        for index, text in enumerate(texts):
            for row, question in enumerate(text.questions):
                rows[index, row] = means[index, question.item.mention.head]
                right[index, row, list(question.right)] = True
                wrong[index, row, list(question.wrong)] = True
                members[index, row] = _membership(question, groups)
        inputs = padded([text.input_ids for text in texts], pad)
        self.inputs = {name: value.to(device) for name, value in inputs.items()}
        self.tensors = tuple(tensor.to(device) for tensor in (rows, keys, right, wrong, members))


class _Hits(Observer):
    """Number of questions of each group for which each head is right, `(groups, heads)`; needs the current `batch`."""

    name = "hits"

    def __init__(self):
        self.batch: _Batch | None = None
        self.layers: dict[HeadSite, HeadLayer] = {}
        self.hits: dict[HeadSite, torch.Tensor] = {}
        self.blocks = RowBlocks()

    def update(self, call: AttentionCall) -> None:
        rows, keys, right, wrong, members = (
            tensor[call.sentences].to(call.weights.device) for tensor in self.batch.tensors
        )
        # (sentences, heads, questions, units)
        rows, keys = (tensor[:, None].to(call.weights) for tensor in (rows, keys))
        attention = self.blocks.add(call, rows[..., call.rows] @ call.weights @ keys)
        if attention is None:
            return
        if attention.isnan().any():
            raise ValueError("attention weights are NaN; run the model in single precision, model.float().")
        right, wrong = (attention.masked_fill(~units[:, None], -1.0).amax(-1) for units in (right, wrong))
        self.layers |= call.layers_by_site
        hits = torch.einsum("bng,bhn->gh", members, (right > wrong).double())
        self.hits[call.site] = self.hits.get(call.site, 0) + hits

    def compute(self) -> dict[HeadSite, torch.Tensor]:
        return {site: hits.cpu() for site, hits in self.hits.items()}


@contextmanager
def _observed(reader: PreTrainedModel, observer: Observer) -> Iterator[Callable]:
    """A function that runs a model under an observer, also models without the attention interface (DeBERTa, MPNet)."""
    if passes_attention_interface(type(reader)):
        with observe(reader, observer):
            yield reader
        return
    layers = locate_heads(reader)

    def show(layer: HeadLayer, module: nn.Module, inputs: tuple, output: tuple) -> None:
        weights = output[-1]
        if not torch.is_tensor(weights) or weights.dim() != 4 or weights.shape[1] != len(layer.heads):
            raise ValueError(
                f"the {layer.site} of {type(reader).__name__} returns no attention weights for each head."
            )
        tokens = ObservedTokens(None, torch.ones(len(weights), weights.shape[2], dtype=torch.bool))
        whole = slice(0, len(weights)), slice(0, weights.shape[2])
        observer.update(AttentionCall(None, layer, layers, at_least_single(weights), tokens, tokens, *whole))

    view = evaluation_view(reader)
    for layer in layers:
        view.after(layer.module, partial(show, layer))
    yield partial(view.root, output_attentions=True)
