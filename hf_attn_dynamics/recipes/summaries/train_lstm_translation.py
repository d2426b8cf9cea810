# Licensed under the Apache License, Version 2.0.
"""Summary of `train_lstm_translation`."""

from dataclasses import dataclass

from .base import Record, Summary, included, result
from .translation import BLEU, EXACT_MATCH, EXAMPLES, CorpusFacts


@dataclass(kw_only=True)
class LstmResults(Record):
    """Results of the trained model: the printed table."""

    bleu: float = result(BLEU)
    exact_match: float = result(EXACT_MATCH)
    nll: float = result("Negative log-likelihood of the validation text in nats, mean over target tokens.")
    token_accuracy: float = result(
        "Fraction of these tokens that the model ranks first, given the preceding tokens of the reference."
    )
    parameters: int = result("Number of parameters.")
    parameters_embeddings: int = result("Number of parameters of the embeddings.")
    seconds_per_step: float = result("Wall-clock time of a step in seconds, without evaluation and data loading.")


@dataclass(kw_only=True)
class LstmTranslationSummary(Summary):
    """Results of one LSTM."""

    results: LstmResults = included()
    steps: int = result("Number of optimizer steps.")
    eval_curve: list[list[float]] = result("[step, nll, token_accuracy] of every evaluation, as in table.csv.")
    attention: str = result("Value of --attention.")
    readout: str = result("Value of --readout.")
    num_beams: int = result("Number of beams.")
    examples: list[dict[str, str]] = result(f"{EXAMPLES}: source, target, and translation.")
    corpus: CorpusFacts = included()


SUMMARY = LstmTranslationSummary
