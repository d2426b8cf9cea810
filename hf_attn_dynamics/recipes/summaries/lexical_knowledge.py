# Licensed under the Apache License, Version 2.0.
"""Summary of `lexical_knowledge`."""

from dataclasses import dataclass
from typing import Any

from .base import Record, Summary, included, result


PERFORMANCE = (
    "ξ{}: accuracy of second_seed at the checkpoint at which its attention first agrees better with α than u agrees "
    "with v; its last accuracy if no checkpoint agrees better; null if a τ is undefined."
)


@dataclass(kw_only=True)
class PairRow(Record):
    """Agreement of two quantities u and v: a line of `table.csv`."""

    pair: str = result("Names of u and v, joined by _.")
    agreement: float = result(
        "A(u, v): fraction of output words whose highest position of u is among the highest 5 % of v."
    )
    agreement_xi: float | None = result(PERFORMANCE.format(""))
    agreement_xi_step: int | None = result("Step of the checkpoint of ξ; null if no checkpoint agrees better.")
    kendall_tau: float = result("Kendall's τ of u and v, mean over output words.")
    kendall_tau_xi: float | None = result(PERFORMANCE.format(" of τ"))
    kendall_tau_xi_step: int | None = result("Step of the checkpoint of ξ of τ; null if no checkpoint agrees better.")


@dataclass(kw_only=True)
class LexicalFacts(Record):
    """Task, text and steps of a run."""

    task: str = result("Value of --task.")
    text: str = result("Name of the data.")
    vocab_size: int = result("Number of tokens in the vocabulary.")
    train_examples: int = result("Number of examples to train on.")
    eval_examples: int = result("Number of examples to evaluate on.")
    max_steps: int = result("Number of optimizer steps of each model.")


@dataclass(kw_only=True)
class LexicalSummary(Summary):
    """Results per pair of quantities, and by model."""

    agreement: dict[str, float] = result(
        "A(u, v): fraction of output words whose highest position of u is among the highest 5 % of v. PAIR is "
        "alpha_beta_uf, beta_uf_beta_px, saliency_beta_uf, alpha_beta, alpha_alpha_fr, alpha_alpha_ibm (one step of "
        "EM, as in the paper), alpha_alpha_ibm_em (five steps), or alpha_opt_beta (on --optimal_sentences sentences).",
        per="PAIR",
    )
    agreement_xi: dict[str, float | None] = result(PERFORMANCE.format(""), per="PAIR")
    kendall_tau: dict[str, float] = result("Kendall's τ of u and v, mean over output words.", per="PAIR")
    kendall_tau_xi: dict[str, float | None] = result(PERFORMANCE.format(" of τ"), per="PAIR")
    agreement_chance: float = result("Agreement A(…, β_uf) by chance: with β_uf shuffled.")
    xi_star: float = result("Last accuracy of second_seed.")
    rows: list[PairRow] = result("One row per pair, as in table.csv.")
    accuracy: dict[str, float] = result(
        "By model: fraction of correct classes, or of correct next tokens, after the last step."
    )
    loss: dict[str, float] = result(
        "By model: negative log-likelihood in nats, mean over texts or target tokens, after the last step."
    )
    best_step: dict[str, int] = result("By model that is saved at its best checkpoint: the step of this checkpoint.")
    history: dict[str, list[dict[str, Any]]] = result("By model: measurements at each checkpoint.")
    seconds: dict[str, float] = result("By model: time of training in seconds, including measurements.")
    output_words: int = result("Number of output words (classes or target tokens) that A and τ are averaged over.")
    agreement_seconds: float = result("Time to compute A and τ of all pairs but alpha_opt_beta, in seconds.")
    parameters: int = result("Number of parameters of standard.")
    parameters_without_embeddings: int = result("Number of parameters of standard without its input embeddings.")
    corpus: LexicalFacts = included()


SUMMARY = LexicalSummary
