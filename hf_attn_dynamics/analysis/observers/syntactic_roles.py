# Licensed under the Apache License, Version 2.0.
"""Heads that follow syntactic relations (Voita et al. 2019, section 5.2)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data.relations import is_relation
from ...models.head_roles import HeadLayer
from ...models.head_sites import HeadSite
from ..head_scores import tabulate
from ..running import is_seq2seq, longest_input, on_device
from ..sentences import batches_by_length, padded
from ..word_units import mean_of_pieces, number_units, pieces_of_units
from .base import AttentionCall, ObservedBatch, Observer, RowBlocks
from .roles import RoleScores


if TYPE_CHECKING:
    from ...data.conllu import Tree


RELATIONS = ("nsubj", "obj", "amod", "advmod", "det", "case")
TO_HEAD, TO_DEPENDENT = "to head", "to dependent"
DIRECTIONS = (TO_HEAD, TO_DEPENDENT)
# Reasons to skip sentences, cases and relations.
TOO_LONG, UNKNOWN, WITHOUT_TOKENS = "too long", "unknown sentence", "word without tokens"
IN_NO_TREE = "relation in no tree"


class SyntacticRoles(Observer):
    """How often each head attends most to the word at the other end of a dependency (Voita et al. 2019, section 5.2).

    A case is a dependency in one direction: in "obj to head", the object should attend to its verb more than to any
    other word; in "obj to dependent", the verb to its object. Attention from a word is the mean over its tokens,
    attention to a word the sum over its tokens (Clark et al. 2019, section 4.1). The baseline is the best fixed offset
    of each relation, chosen on the same cases; it is the same in both directions. The result is [`RoleScores`]; heads
    that exceed the baseline by 0.1 are called syntactic.

    Sentences are recognized by their token ids, so batching, order and padding change nothing. Other sentences count
    as `"unknown sentence"`; [`batches`] returns batches of the right sentences, and counts sentences with more tokens
    than the model has positions for as `"too long"`. Cases with a word that has no token of its own count as `"word
    without tokens"`; if several words share their text, the first has the tokens. Of several trees with the same
    tokens, the first is used. Default relations that do not occur count as `"relation in no tree"`.

    In encoder–decoder models, the encoder is observed. Under a causal mask, cases whose target comes later count as
    wrong.

    Args:
        trees (list of [`Tree`]): Parsed sentences. The model should read `tree.text`; use `tree.spaced()` for words
            that are tokenized one by one.
        tokenizer ([`PreTrainedTokenizerBase`]): Tokenizer of the model.
        relations (sequence of `str`, *optional*): Relations; a subtype such as `nsubj:pass` is a relation of its own.
            By default `RELATIONS`. Names of Universal Dependencies 1, which spaCy's English models use, are synonyms
            of those of version 2: `dobj` is `obj`, `nsubjpass` is `nsubj:pass`.
        subtypes (`bool`): Whether a relation includes its subtypes, `nsubj` also `nsubj:pass`.
        special_tokens (`bool`): Whether special tokens compete, each as a word.
        own_word (`bool`): Whether the attending word itself competes.
        name (`str`): Name of the result.

    Raises:
        ValueError: if `trees` or `relations` is empty, a relation that the user names does not occur, or none does;
            while observing, if the model reads no token ids.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import observe
        >>> from hf_attn_dynamics.data import embedded_trees, train_byte_level_bpe
        >>> trees = embedded_trees()
        >>> tokenizer = train_byte_level_bpe([tree.text for tree in trees], vocab_size=400, kind="bert")
        >>> config = BertConfig(vocab_size=400, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertModel(config)
        >>> observer = SyntacticRoles(trees, tokenizer)
        >>> with torch.no_grad(), observe(model, observer) as seen:
        ...     for batch in observer.batches(model):
        ...         _ = model(**batch)
        >>> scores = seen.syntactic_roles
        >>> scores.accuracy["det to head"]["encoder"].shape, scores.counts["det to head"]
        (torch.Size([2, 4]), {'encoder': 39})
        >>> scores.offsets["det to head"], round(scores.baselines["det to head"]["encoder"], 2)
        (1, 0.72)
    """

    def __init__(
        self,
        trees: Iterable["Tree"],
        tokenizer: PreTrainedTokenizerBase,
        relations: Sequence[str] | None = None,
        subtypes: bool = False,
        special_tokens: bool = False,
        own_word: bool = False,
        *,
        name: str = "syntactic_roles",
    ):
        named = relations is not None
        relations = relations if named else RELATIONS
        if isinstance(relations, str) or not relations:
            raise ValueError(f"relations must be a non-empty list, such as {list(RELATIONS)}, got {relations!r}.")
        self.name = name
        self.relations = list(dict.fromkeys(relations))
        self.own_word = own_word
        self.pad = tokenizer.pad_token_id or 0
        trees = list(trees)
        known = {of for tree in trees for head, of in zip(tree.heads, tree.relations) if head is not None}
        present = {one for of in known for one in _matching(of, self.relations, subtypes)}
        absent = [one for one in self.relations if one not in present]
        if (named and absent) or not present:
            raise ValueError(
                f"relations: none of the {len(trees)} trees has {' or '.join(absent)}; they have "
                f"{', '.join(sorted(known)) or 'none'}."
            )
        self._texts = [_sentence(tree, tokenizer, self.relations, subtypes, special_tokens) for tree in trees]
        if not any(text.cases for text in self._texts):
            raise ValueError(f"trees: no word that is {' or '.join(self.relations)} has tokens of its own.")
        self._sentences: dict[tuple[int, ...], _Sentence] = {}
        for text in self._texts:
            self._sentences.setdefault(text.ids, text)
        self._skipped = Counter({TOO_LONG: 0, UNKNOWN: 0, WITHOUT_TOKENS: 0, IN_NO_TREE: len(absent)})
        self._offsets: dict[str, Counter[int]] = defaultdict(Counter)
        self._layers: dict[HeadSite, HeadLayer] = {}
        self._hits: dict[HeadSite, torch.Tensor] = {}  # (directions, relations, heads)
        self._batch: _Batch | None = None

    def batches(self, model: PreTrainedModel, batch_size: int = 32) -> Iterator[dict[str, torch.Tensor]]:
        """Padded batches of the sentences, grouped by length.

        Args:
            model (`PreTrainedModel`): The observed model; sentences that are too long for it are left out, and counted
                in the result.
            batch_size (`int`): Sentences per batch; does not change the result.

        Returns:
            Iterator over batches with `input_ids` and `attention_mask`, on the device of the model.

        Raises:
            ValueError: if `batch_size` is less than 1, or all sentences are too long.
        """
        longest = longest_input(model)
        texts = [text.ids for text in self._texts if longest is None or len(text.ids) <= longest]
        if not texts:
            raise ValueError(f"all {len(self._texts)} sentences have more tokens than the model reads, {longest}.")
        self._skipped[TOO_LONG] = len(self._texts) - len(texts)
        batches = batches_by_length(texts, batch_size)
        return (on_device(padded(some, self.pad), model) for some in batches)

    def begin(self, batch: ObservedBatch) -> None:
        self._batch = None
        if (ids := batch.ids("encoder")) is None:
            return  # an error only if the encoder computes attention: a decoder may run without its encoder
        real = batch.tokens("encoder", ids.shape, ids.device).real
        # The only transfer from the device in a forward pass.
        rows = ids.where(real, -1).tolist()
        positions = [[index for index, token in enumerate(row) if token >= 0] for row in rows]
        found = [self._sentences.get(tuple(row[index] for index in at)) for row, at in zip(rows, positions)]
        if batch.cached:
            found = [None] * len(rows)  # the batch holds only the last tokens of its sentences
        self._batch = _Batch(found, positions, ids.shape[1], len(self.relations), self.own_word)

    def update(self, call: AttentionCall) -> None:
        kind = call.site.kind
        if kind == "cross" or (kind == "decoder" and is_seq2seq(call.batch.model)):
            return
        if self._batch is None:
            raise ValueError(f"{type(self).__name__} knows sentences by their tokens; pass input_ids to the model.")
        self._batch.add(call)

    def end(self, batch: ObservedBatch) -> None:
        if self._batch is None or not self._batch.layers:
            return  # the encoder did not run
        for sentence in self._batch.sentences:
            if sentence is None:
                self._skipped[UNKNOWN] += 1
                continue
            self._skipped[WITHOUT_TOKENS] += sentence.lost
            for case in sentence.cases:
                self._offsets[self.relations[case.relation]][case.head - case.dependent] += 1
        for site, hits in self._batch.hits.items():
            self._hits[site] = self._hits.get(site, 0) + hits
        self._layers |= self._batch.layers
        self._batch = None

    def compute(self) -> RoleScores:
        """Accuracies, baselines and counts of the relations that occurred.

        Raises:
            ValueError: if the model has read none of the sentences.
        """
        if not self._offsets:
            raise ValueError(
                f"{type(self).__name__} has seen none of its trees, but {self._skipped[UNKNOWN]} unknown sentences; "
                "run the model on observer.batches(model) within observe()."
            )
        kinds = dict.fromkeys(site.kind for site in self._hits)
        results = RoleScores({}, {}, {}, dict(self._skipped))
        for index, relation in enumerate(self.relations):
            if relation not in self._offsets:
                continue
            offsets = self._offsets[relation]
            count = offsets.total()
            # The nearest of several equally frequent offsets.
            offset, best = max(offsets.items(), key=lambda item: (item[1], -abs(item[0]), item[0]))
            for number, (direction, sign) in enumerate(zip(DIRECTIONS, (1, -1))):
                role = f"{relation} {direction}"
                accuracy = {site: hits[number, index] / count for site, hits in self._hits.items()}
                results.accuracy[role] = tabulate(list(self._layers.values()), accuracy)
                results.baselines[role] = dict.fromkeys(kinds, best / count)
                results.counts[role] = dict.fromkeys(kinds, count)
                results.offsets[role] = sign * offset
        return results


class _Case(NamedTuple):
    """A dependency: units of dependent and head, and the index of the relation."""

    dependent: int
    head: int
    relation: int


@dataclass(frozen=True)
class _Sentence:
    """Tokens of a sentence, the unit of each token, and its dependencies.

    Units are orthographic words and, if they compete, special tokens.
    """

    ids: tuple[int, ...]
    units: list[int | None]
    cases: list[_Case]
    lost: int  # dependencies of words without a token of their own


def _matching(relation: str, relations: list[str], subtypes: bool) -> list[str]:
    """Those of `relations` that match a relation of a tree."""
    return [one for one in relations if is_relation(relation, one, subtypes)]


def _sentence(
    tree: "Tree", tokenizer: PreTrainedTokenizerBase, relations: list[str], subtypes: bool, special_tokens: bool
) -> _Sentence:
    # Imported here: reading data needs the library `datasets`, which importing this package does not.
    from ...data.words import encode_words

    ids, words = encode_words(tree, tokenizer)
    written = {span: unit for unit, span in enumerate(dict.fromkeys(tree.spans))}
    unit_of = [written[span] for span in tree.spans]
    units = [None if word is None else unit_of[word] for word in words]
    present = set(units)
    cases, lost = [], 0
    for unit, head, relation in zip(unit_of, tree.heads, tree.relations):
        matching = [] if head is None else _matching(relation, relations, subtypes)
        if matching and (unit == unit_of[head] or not {unit, unit_of[head]} <= present):
            lost += 1
        else:
            cases += [_Case(unit, unit_of[head], relations.index(one)) for one in matching]
    return _Sentence(tuple(ids), number_units(units, len(written)) if special_tokens else units, cases, lost)


class _Batch:
    """Sentences of one forward pass. Below, `units` and `cases` are the maxima over the sentences."""

    def __init__(
        self,
        sentences: list[_Sentence | None],
        positions: list[list[int]],
        length: int,
        relations: int,
        own_word: bool,
    ):
        self.sentences = sentences
        units = [[None] * len(at) if one is None else one.units for one, at in zip(sentences, positions)]
        pieces = pieces_of_units(units, length, positions)  # (batch, length, units)
        competing = pieces.any(1)[:, None].repeat(1, pieces.shape[-1], 1)  # (batch, units, units)
        if not own_word:
            competing &= ~torch.eye(pieces.shape[-1], dtype=torch.bool)
        cases = [[] if one is None else one.cases for one in sentences]
        width = max(1, *map(len, cases))
        nothing = _Case(0, 0, relations)
        table = torch.tensor([[*some, *[nothing] * (width - len(some))] for some in cases])
        sources = table[..., :2].mT  # in both directions, (batch, directions, cases)
        members = nn.functional.one_hot(table[..., 2], relations + 1)[..., :-1].double()  # (batch, cases, relations)
        self.tensors = mean_of_pieces(pieces), pieces, competing, sources, members
        self.layers: dict[HeadSite, HeadLayer] = {}
        self.hits: dict[HeadSite, torch.Tensor] = {}
        self.blocks = RowBlocks()

    def add(self, call: AttentionCall) -> None:
        """Counts the cases in which each head is right."""
        self.layers |= call.layers_by_site
        if not any(self.sentences):
            return
        self.tensors = tuple(tensor.to(call.weights.device) for tensor in self.tensors)
        means, pieces, competing, sources, members = (tensor[call.sentences] for tensor in self.tensors)
        # From units to units, (sentences, heads, units, units).
        means = means[:, None, :, call.rows].to(call.weights)
        attention = self.blocks.add(call, means @ (call.weights @ pieces[:, None].to(call.weights)))
        if attention is None:
            return
        largest, found = attention.masked_fill(~competing[:, None], -1).max(-1)
        sources = sources[:, None].expand(-1, found.shape[1], -1, -1)  # (sentences, heads, directions, cases)
        # The source in one direction is the target in the other.
        right = found.gather(2, sources.flatten(2)).view_as(sources) == sources.flip(2)
        hits = torch.einsum("shdc,scr->drh", right.double(), members)
        # Propagates NaN, which comparisons hide.
        hits += 0 * largest.sum((0, 2), dtype=torch.float64)
        self.hits[call.site] = self.hits.get(call.site, 0) + hits
