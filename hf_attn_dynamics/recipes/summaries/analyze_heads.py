# Licensed under the Apache License, Version 2.0.
"""Summary of `analyze_heads`."""

from dataclasses import dataclass
from typing import Any

from .base import Summary, result


@dataclass(kw_only=True)
class AnalyzeSummary(Summary):
    """Results of one pass over the sentences; dictionaries by kind of site have keys such as encoder and decoder."""

    model: str = result("Checkpoint, or the demonstration.")
    sentences: int = result("Number of sentences that were read.")
    tokens: int = result("Number of their tokens.")
    too_long: int = result("Number of sentences with more tokens than the model takes, which were left out.")
    sentences_with_trees: int = result("Number of sentences with dependency trees.")
    layers: dict[str, int] = result("Number of layers, by kind of site.")
    heads: dict[str, int] = result("Number of heads, by kind of site.")
    mean_confidence: float = result("Confidence (mean maximum attention weight), mean over heads.")
    mean_entropy: float = result("Entropy of the attention weights in nats, mean over heads.")
    positional_heads: dict[str, int | None] = result("Number of positional heads, by kind of site.")
    syntactic_heads: dict[str, int | None] = result("Number of syntactic heads; null without trees.")
    rare_word_heads: dict[str, int | None] = result("Number of heads for rare words; null if not measured.")
    duplicate_token_heads: dict[str, int | None] = result("Number of heads for repeated tokens; null if not measured.")
    delimiter_heads: dict[str, int | None] = result("Number of heads for special tokens; null without a tokenizer.")
    roles: dict[str, dict[str, Any]] = result(
        "Best head of each role: site, layer, head, score (its accuracy), baseline, and count of cases."
    )
    not_measured: dict[str, str] = result("Reason for each measure that is missing.")
    seconds: float = result("Time of the pass.")
    functions_kept: dict[str, dict[str, int | None]] = result(
        "Number of heads with each function, and of all heads (heads): in the model, in its more important half, and "
        "in each checkpoint of --pruned."
    )
    comparison: dict[str, Any] | None = result(
        "What moved from the model to that of --compare, null without it: names; number of heads in both models, "
        "removed in one, and with gained, lost, kept or no functions; the same counts for each function; means of "
        "each measure over the heads of both."
    )


SUMMARY = AnalyzeSummary
