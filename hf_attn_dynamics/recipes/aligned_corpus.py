# Licensed under the Apache License, Version 2.0.
"""Word alignments of parallel text: targets for a head of cross-attention, a reference, and alignments of heads."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, PreTrainedTokenizerBase

from ..analysis import (
    IbmModel1,
    alignment_error_rate,
    attention_alignment,
    attention_maps,
    read_pharaoh,
    symmetrize,
)
from ..data import align_targets, encode_words, pharaoh_targets
from ..models.ignored_labels import IGNORED
from .arguments.align_translation import ROWS, AlignmentArguments
from .summaries.align_translation import IBM
from .translation import TranslationCorpus


TARGET = "aligned"  # of the guided head
COLUMN = f"guidance_{TARGET}"
Links = list[tuple[int, int]]
Pair = tuple[list[str], list[str]]  # words of both sides
WordMaps = dict[str, torch.Tensor]  # by the rows that they are read from


@dataclass
class AlignedCorpus:
    """A corpus with alignments; the pairs of the validation text are in its own order, by length.

    Attributes:
        plain (`TranslationCorpus`): The corpus without targets.
        guided (`TranslationCorpus`): The same with targets of the guided head in the training and validation text.
        guided_words (`float`): Fraction of the target words of the training text that have a target.
        sure, possible (`list[Links]`): Reference of the validation text.
        ibm (`dict[str, list[Links]]`): Alignments of the validation text by IBM Model 1, by the names in [`IBM`].
        measured (`list[bool]`): Whether heads are measured on the pair, or chosen on it.
        shown (`int`): The pair to draw.
    """

    plain: TranslationCorpus
    guided: TranslationCorpus
    guided_words: float
    sure: list[Links]
    possible: list[Links]
    ibm: dict[str, list[Links]]
    measured: list[bool]
    shown: int


def word_tokenizer(units: str) -> Callable[[Dataset, PreTrainedTokenizerBase], Dataset]:
    """A function that tokenizes pairs and adds what is aligned.

    Its columns `source_words` and `target_words` are the words or tokens of both sides, `source_indices` and
    `target_indices` the index of the word of each token, and `pair` is the number of the pair in the text.
    """

    def tokenize(pairs: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        encode = {
            side: cache(lambda word, as_target=side == "target": encode_words([word], tokenizer, as_target))
            for side in ("source", "target")
        }
        columns: dict[str, list] = {"pair": list(range(len(pairs)))}
        for side, ids_name in (("source", "input_ids"), ("target", "labels")):
            columns |= {name: [] for name in (ids_name, f"{side}_words", f"{side}_indices")}
            for text in pairs[side]:
                # A piece of SentencePiece never has parts of two words.
                pieces = [
                    [token for token, index in zip(*encode[side](word)) if index is not None] for word in text.split()
                ]
                ids = [token for word in pieces for token in word]
                words = [word.lower() for word in text.split()]
                indices: list[int | None] = [index for index, word in enumerate(pieces) for _ in word]
                if units == "tokens":
                    words, indices = tokenizer.convert_ids_to_tokens(ids), list(range(len(ids)))
                columns[ids_name].append(tokenizer.build_inputs_with_special_tokens(ids))
                columns[f"{side}_words"].append(words)
                columns[f"{side}_indices"].append([*indices, None])
        columns["attention_mask"] = [[1] * len(ids) for ids in columns["input_ids"]]
        return Dataset.from_dict(columns)

    return tokenize


def words_of(pairs: Dataset) -> list[Pair]:
    """Words of both sides of each pair."""
    return list(zip(pairs["source_words"], pairs["target_words"]))


def align(corpus: TranslationCorpus, args: AlignmentArguments) -> AlignedCorpus:
    """Alignments of a corpus, and targets of the guided head.

    IBM Model 1 is fitted in both directions on the training text, and aligns both texts.

    Args:
        corpus (`TranslationCorpus`): The corpus, tokenized by [`word_tokenizer`].
        args ([`AlignmentArguments`]): Flags.
    """
    symmetrize([], [], args.alignment_method)  # raises an error for an unknown method
    train, validation = words_of(corpus.train), words_of(corpus.validation)
    reference = None
    if args.reference_alignments:
        reference = [
            [links[pair] for pair in corpus.validation["pair"]]
            for links in read_references(args, len(corpus.validation))
        ]
        for links in reference:
            check_links(links, validation, args.reference_alignments)
    of_train, of_validation = align_by_ibm(train, [train, validation])
    ibm = dict(zip(("ibm_forward", "ibm_backward"), of_validation))
    ibm |= {name: symmetrize(*of_validation, method) for name, method in IBM.items() if method}
    sure, possible = reference or (ibm["ibm_intersection"], ibm["ibm_union"])
    guided, fractions = {}, {}
    for name, text, directions in (
        ("train", corpus.train, of_train),
        ("validation", corpus.validation, of_validation),
    ):
        links = symmetrize(*directions, args.alignment_method)
        targets = [pharaoh_targets(one, len(words)) for one, words in zip(links, text["target_words"])]
        fractions[name] = sum(word is not None for one in targets for word in one) / sum(map(len, targets))
        keys = align_targets(text["target_indices"], targets, "all", keys=text["source_indices"])
        guided[name] = text.add_column(COLUMN, [of_rows(one, args.guided_rows) for one in keys])
    measured = [pair >= len(validation) // 2 for pair in corpus.validation["pair"]]
    if not any(measured) or all(measured):
        raise ValueError("the validation text needs two pairs at least, to choose heads and to measure them.")
    return AlignedCorpus(
        plain=corpus,
        guided=replace(corpus, **guided, target_rows={COLUMN: "labels"}),
        guided_words=fractions["train"],
        sure=sure,
        possible=possible,
        ibm=ibm,
        measured=measured,
        shown=pair_to_show(measured, validation),
    )


def align_by_ibm(train: list[Pair], texts: list[list[Pair]]) -> list[tuple[list[Links], list[Links]]]:
    """Forward and backward alignments of each text by IBM Model 1, which is fitted on the training text."""
    forward, backward = IbmModel1().fit(train), IbmModel1().fit(exchanged(train))
    return [(forward.align(text), [exchanged(links) for links in backward.align(exchanged(text))]) for text in texts]


def exchanged(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Pairs of two sides with the sides exchanged."""
    return [(second, first) for first, second in pairs]


def of_rows(keys: list[int], rows: str) -> list[int]:
    """Keys of the rows that predict a token (`output`), as keys of the rows that read it (`input`), or unchanged."""
    return keys if rows == "output" else [IGNORED, *keys[:-1]]


def read_references(args: AlignmentArguments, num_pairs: int) -> tuple[list[Links], list[Links]]:
    """Sure and possible links of the pairs that are read of the validation text."""
    files = args.reference_alignments
    if len(files) == 1:
        found = [read_pharaoh(files[0]), read_pharaoh(files[0], possible=True)]
    else:
        found = [read_pharaoh(file) for file in files]
    for file, links in zip(files, found):
        if len(links) < num_pairs or (len(links) > num_pairs and args.max_eval_examples is None):
            raise ValueError(
                f"reference_alignments {file} has {len(links)} lines, but the validation text {num_pairs} pairs; give "
                "a line for each pair."
            )
    found = [links[:num_pairs] for links in found]
    if len(files) == 1:
        return found[0], found[1]
    return symmetrize(*found, "intersection"), symmetrize(*found, "union")


def check_links(alignments: Iterable[Links], pairs: Iterable[Pair], files: Sequence[str]) -> None:
    """Raises ValueError for links of words that do not exist."""
    for links, (source, target) in zip(alignments, pairs):
        for link in links:
            if link[0] >= len(source) or link[1] >= len(target):
                raise ValueError(
                    f"reference_alignments {' '.join(files)} have the link {link[0]}-{link[1]} for a pair of "
                    f"{len(source)} and {len(target)} words: {' '.join(source)!r}; words are separated by spaces."
                )


def pair_to_show(measured: Sequence[bool], pairs: Sequence[Pair]) -> int:
    """The longest measured pair whose sides have at most ten words, or the shortest one."""
    sizes = {index: max(map(len, pair)) for index, pair in enumerate(pairs) if measured[index]}
    short = [index for index, size in sizes.items() if size <= 10]
    return max(short, key=sizes.get) if short else min(sizes, key=sizes.get)


def quality(predicted: Sequence[Links], sure: Sequence[Links], possible: Sequence[Links]) -> dict[str, float]:
    """Alignment error rate, precision and recall."""
    in_possible = sum(len({*links} & {*may}) for links, may in zip(predicted, possible))
    in_sure = sum(len({*links} & {*must}) for links, must in zip(predicted, sure))
    return {
        "aer": alignment_error_rate(predicted, sure, possible),
        "precision": in_possible / max(1, sum(map(len, predicted))),
        "recall": in_sure / max(1, sum(map(len, sure))),
    }


def measured_quality(predicted: Sequence[Links], aligned: AlignedCorpus, is_measured: bool = True) -> dict[str, float]:
    """[`quality`] on the measured pairs, or on those that heads are chosen on."""
    kept = [index for index, measured in enumerate(aligned.measured) if measured == is_measured]
    return quality(*([links[index] for index in kept] for links in (predicted, aligned.sure, aligned.possible)))


def head_word_maps(model: PreTrainedModel, corpus: TranslationCorpus, batch_size: int) -> list[WordMaps]:
    """Attention of words of the validation text to source words in all heads of cross-attention.

    The attention to a source word is the sum over its tokens, and the attention of a target word the mean over its
    tokens.

    Returns:
        `list[WordMaps]`: for each pair, and the rows that predict (`output`) or read (`input`) the
        tokens, attention of shape `(layers, heads, target words, source words)`.
    """
    collator = DataCollatorForSeq2Seq(corpus.tokenizer, model=model)
    layers = {"cross": list(range(model.config.decoder_layers))}
    found = []
    for start in range(0, len(corpus.validation), batch_size):
        pairs = corpus.validation[start : start + batch_size]
        sides = ("input_ids", "attention_mask", "labels")
        batch = collator([dict(zip(sides, values)) for values in zip(*(pairs[side] for side in sides))])
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
        maps = attention_maps(model, inputs, layers)["cross"].cpu()
        for index, (source, target) in enumerate(zip(pairs["source_indices"], pairs["target_indices"])):
            weights = maps[:, index, :, : len(target), : len(source)] @ word_sums(source).T
            read = [None, *target[:-1]]
            found.append({rows: mean_rows(which) @ weights for rows, which in zip(ROWS, (target, read), strict=True)})
    return found


def word_sums(indices: Sequence[int | None]) -> torch.Tensor:
    """Matrix of shape `(words, tokens)` that is 1 where a token belongs to a word."""
    words = torch.tensor([-1 if index is None else index for index in indices])
    return (torch.arange(max(int(words.max()), -1) + 1)[:, None] == words).float()


def mean_rows(indices: Sequence[int | None]) -> torch.Tensor:
    """Matrix of shape `(words, tokens)` that takes the mean over the tokens of a word."""
    sums = word_sums(indices)
    return sums / sums.sum(-1, keepdim=True).clamp(min=1)


def score_heads(maps: Sequence[WordMaps], aligned: AlignedCorpus) -> list[dict[str, Any]]:
    """Alignments of all heads, as the summary has them."""
    scores = []
    layers, heads = maps[0][ROWS[0]].shape[:2]
    for rows in ROWS:
        links = [attention_alignment(one[rows].flatten(0, 1)) for one in maps]
        for number in range(layers * heads):
            predicted = [one[number] for one in links]
            scores.append(
                {
                    "layer": number // heads,
                    "head": number % heads,
                    "rows": rows,
                    "aer_chosen_on": measured_quality(predicted, aligned, is_measured=False)["aer"],
                    **measured_quality(predicted, aligned),
                }
            )
    return scores
