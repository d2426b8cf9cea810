# Licensed under the Apache License, Version 2.0.
"""Summary of `train_translation`."""

from dataclasses import dataclass

from ...models.head_sites import SITE_KINDS
from .base import Record, Summary, included, result
from .translation import BLEU, EXACT_MATCH, EXAMPLES, CorpusFacts


NLL = "Negative log-likelihood of the validation text in nats, mean over target tokens, without label smoothing."
MODELS = ("dense", "pruned", "from_scratch")


@dataclass(kw_only=True)
class TranslationRow(Record):
    """One model."""

    method: str = result("dense, pruned, or from scratch.")
    gate_penalty: float | None = result("Penalty coefficient λ of an open head; null without --gate_penalty.")
    heads: int = result("Number of heads at the gated sites.")
    heads_at: dict[str, int] = result("Number of heads at each kind of site.", key="heads_{per}", per=SITE_KINDS)
    mean_layer_at: dict[str, float] = result(
        "Layer of a head, from 0, mean over the heads of each kind of site; null without any.",
        key="mean_layer_{per}",
        per=SITE_KINDS,
    )
    bleu: float = result(BLEU)
    exact_match: float = result(EXACT_MATCH)
    nll: float = result(NLL)
    parameters: int = result("Number of parameters, including fixed position embeddings.")
    steps: int = result("Number of optimizer steps up to its weights, with those of the models that it comes from.")


@dataclass(kw_only=True)
class TranslationSummary(Summary):
    """Results of the first number of heads, or of the first λ, unless a description says otherwise.

    Keys of from_scratch are null without --from_scratch.
    """

    bleu: dict[str, float] = result(BLEU, per=MODELS)
    exact_match: dict[str, float] = result(EXACT_MATCH, per=MODELS)
    nll: dict[str, float] = result(NLL, per=MODELS)
    heads_total: int = result("Number of heads at the gated sites before pruning.")
    heads_kept: int = result("Number of heads at the gated sites after pruning.")
    heads_at: dict[str, int] = result(
        "Number of heads at each kind of site after pruning.", key="heads_{per}", per=SITE_KINDS
    )
    parameters: dict[str, int] = result(
        "Number of parameters, including fixed position embeddings.", per=("dense", "pruned")
    )
    steps: dict[str, int] = result(
        "Total number of optimizer steps; with --early_stopping_patience, up to the best weights.", per=MODELS
    )
    seconds_per_step_dense: float = result(
        "Wall-clock time of a step of the dense model in seconds, without evaluation and data loading."
    )
    rows: list[TranslationRow] = result("All models.")
    relevance: dict[str, list[list[float]]] | None = result(
        "With --relevance_examples: relevance of each head of the dense model, as a fraction of its layer; by kind of "
        "site, layer and head.",
        optional=True,
    )
    relevance_largest: dict[str, float] | None = result(
        "With --relevance_examples: the largest relevance of a layer, mean over the layers of each kind of site.",
        per=SITE_KINDS,
        optional=True,
    )
    relevance_median: dict[str, float] | None = result(
        "With --relevance_examples: the median relevance of a layer, mean over the layers of each kind of site.",
        per=SITE_KINDS,
        optional=True,
    )
    num_beams: int = result("Number of beams.")
    examples: list[dict[str, str]] = result(f"{EXAMPLES}: source, target, and translations of dense and pruned.")
    corpus: CorpusFacts = included()


SUMMARY = TranslationSummary
