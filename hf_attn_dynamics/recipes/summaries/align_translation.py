# Licensed under the Apache License, Version 2.0.
"""Summary of `align_translation`."""

from dataclasses import dataclass
from typing import Any

from ..arguments.align_translation import MODELS
from .base import Record, Summary, included, result
from .translation import BLEU, EXACT_MATCH, EXAMPLES, CorpusFacts


NAMES = tuple(MODELS)
# Names of the alignments of IBM Model 1 -> how its directions are combined.
IBM = {
    "ibm_forward": None,
    "ibm_backward": None,
    "ibm_intersection": "intersection",
    "ibm_union": "union",
    "ibm_grow_diag": "grow-diag",
}
ALIGNERS = (*NAMES, *IBM)


@dataclass(kw_only=True)
class HeadAlignment(Record):
    """Alignments of a head of cross-attention, read in one way."""

    layer: int = result("Layer of the decoder, from 0.")
    head: int = result("Head of the layer, from 0.")
    rows: str = result("Rows that alignments are read from: output (they predict a token) or input (they read it).")
    aer_chosen_on: float = result("Alignment error rate on the pairs that heads are chosen on.")
    aer: float = result("Alignment error rate on the measured pairs.")
    precision: float = result("Precision on the measured pairs.")
    recall: float = result("Recall on the measured pairs.")


@dataclass(kw_only=True)
class AlignmentSummary(Summary):
    """Alignments and translations of an unguided and a guided model.

    Alignments are those of the guided head, of the best head of the unguided model, and of IBM Model 1. A head links
    each target word to the source word with the largest attention; special tokens have no links. Without reference
    alignments, those of IBM Model 1 are the reference, and its results are null.
    """

    aer: dict[str, float] = result(
        "Alignment error rate on the measured pairs, 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|) with sure links S and "
        "possible links P of the reference.",
        per=ALIGNERS,
        column="aer",
    )
    precision: dict[str, float] = result("|A ∩ P| / |A| on the measured pairs.", per=ALIGNERS, column="precision")
    recall: dict[str, float] = result("|A ∩ S| / |S| on the measured pairs.", per=ALIGNERS, column="recall")
    validation_nll: dict[str, float] = result(
        "Negative log-likelihood of the validation text in nats, mean over target tokens, after the last step; "
        "without guidance loss and label smoothing.",
        per=NAMES,
        column="validation_nll",
    )
    bleu: dict[str, float] = result(BLEU, per=NAMES, column="bleu")
    exact_match: dict[str, float] = result(EXACT_MATCH, per=NAMES)
    seconds_per_step: dict[str, float] = result(
        "Wall-clock time of a step in seconds, without evaluation and data loading.",
        per=NAMES,
        column="seconds_per_step",
    )
    chosen_head: dict[str, dict[str, Any]] = result(
        "Layer, head and rows of the head whose alignments are measured: the guided head, and the head and rows of "
        "the unguided model with the smallest alignment error rate on the pairs that heads are chosen on.",
        per=NAMES,
    )
    heads: dict[str, list[HeadAlignment]] = result("Alignments of all heads, by model.")
    guided_accuracy: float = result(
        "Fraction of the guided rows of the validation text whose strongest key is the target, after the last step."
    )
    eval_curve: dict[str, list] = result(
        "[step, loss] of every evaluation on the validation text; with a label_smoothing_factor above 0, the smoothed "
        "loss.",
        per=NAMES,
    )
    steps: int = result("Number of optimizer steps of each model.")
    guidance_weight_initial: float = result("Guidance weight α_0 at the first step.")
    parameters: int = result("Number of parameters, including fixed position embeddings.")
    reference: str = result("Origin of the reference alignments: the names of the files, or IBM Model 1.")
    units: str = result("What is aligned: words or tokens.")
    alignment_method: str = result("Value of --alignment_method.")
    guided_words: float = result(
        "Fraction of the target words of the training text with a target for the guided head."
    )
    chosen_on_pairs: int = result("Number of pairs that heads are chosen on: the first half of the validation text.")
    measured_pairs: int = result("Number of measured pairs: the second half of the validation text.")
    num_beams: int = result("Number of beams.")
    examples: list[dict[str, str]] = result(f"{EXAMPLES}: source, target, and the translation of each model.")
    corpus: CorpusFacts = included()


SUMMARY = AlignmentSummary
