# Licensed under the Apache License, Version 2.0.
"""Heads that attend to rare words or to other occurrences of the same token (Voita et al. 2019, section 5)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from .base import AttentionCall, HeadMeans, ObservedBatch, Observer
from .excluded_tokens import checked_token_ids
from .roles import RoleScores


class _TokenRoles(Observer):
    """Fraction of tokens whose largest weight is on a target.

    Args:
        roles (sequence of `str`): Names of the roles.
        excluded_ids (iterable of `int`, *optional*): Token ids that are neither queries nor keys; by default all
            special tokens of the tokenizer that [`observe`] is given.
        name (`str`): Name of the result.
    """

    def __init__(self, roles: Sequence[str], excluded_ids: Iterable[int] | None, name: str):
        self.name = name
        self.roles = tuple(roles)
        self._are_given = excluded_ids is not None
        self._excluded = torch.tensor(checked_token_ids(excluded_ids), dtype=torch.long) if self._are_given else None
        self._hits, self._chance = ({role: HeadMeans(type(self).__name__) for role in roles} for _ in range(2))

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not self._are_given:
            self._excluded = torch.tensor(checked_token_ids(tokenizer.all_special_ids), dtype=torch.long)

    def begin(self, batch: ObservedBatch) -> None:
        if self._excluded is None:
            raise ValueError(
                f"{type(self).__name__} does not know which tokens are special: pass observe(model, …, "
                f"tokenizer=tokenizer), or excluded_ids=tokenizer.all_special_ids, or [] if none is."
            )

    def targets(self, call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor) -> tuple:
        """Masks of competing keys, targets and cases.

        Args:
            call (`AttentionCall`): The attention weights.
            queries, keys (`torch.Tensor` of shape `(sentences, rows)` and `(sentences, keys)`): Masks of tokens that
                are not excluded.

        Returns:
            Competing keys, `(sentences, rows or 1, keys)`; targets by role, of the same shape; and queries that count
            as cases, `(sentences, rows)`.
        """
        raise NotImplementedError

    def update(self, call: AttentionCall) -> None:
        self._excluded = self._excluded.to(call.weights.device)
        competing, right, counted = self.targets(
            call,
            call.real_queries & ~torch.isin(call.query_ids, self._excluded),
            call.real_keys & ~torch.isin(call.key_ids, self._excluded),
        )
        largest = call.weights.masked_fill(~competing[:, None], -1).argmax(-1, keepdim=True)
        for role, targets in right.items():
            hits = targets[:, None].expand(call.weights.shape).gather(-1, largest)[..., 0]
            chance = targets.sum(-1) / competing.sum(-1).clamp(min=1)
            self._hits[role].add(call, hits, counted)
            self._chance[role].add(call, chance[:, None].expand(hits.shape), counted)

    def compute(self) -> RoleScores:
        results = RoleScores({}, {}, {})
        for role, hits in self._hits.items():
            results.accuracy[role] = hits.compute()
            # Equal for all heads that are not removed.
            chance = self._chance[role].compute()
            results.baselines[role] = {kind: table.nanmean().item() for kind, table in chance.items()}
            results.counts[role] = {site.kind: int(count) for site, count in hits.counts.items()}
        return results


class RareWords(_TokenRoles):
    """How often each head attends most to the rarest tokens of a sentence (Voita et al. 2019, section 5.3).

    Only sentences count whose rarest token is not among the most frequent tokens of the vocabulary. Each token of such
    a sentence is a case: it is right if its largest weight is on the rarest token ("rarest"), or on one of the two
    rarest ("two rarest"). Equally rare tokens are targets as well. The baseline is chance: the mean fraction of
    targets among the competing tokens. The result is [`RoleScores`].

    Under a causal mask, cases whose target comes later count as wrong. In cross-attention, the targets are tokens of
    the encoder.

    Args:
        counts (`torch.Tensor` or array of shape `(vocab_size,)`): Frequency of each token in a corpus, see
            `token_counts`; tokens beyond the end have frequency 0.
        excluded_ids (iterable of `int`, *optional*): Token ids that count neither as targets nor as cases; by default
            `tokenizer.all_special_ids` of the tokenizer that [`observe`] is given.
        frequent (`int`): Number of tokens that are called frequent, plus ties.
        name (`str`): Name of the result.

    Raises:
        ValueError: if `counts` does not hold counts, or at most `frequent` tokens occur; while observing, if token ids
            are unknown, or neither `excluded_ids` nor a tokenizer was given.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import observe
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertModel(config)
        >>> with torch.no_grad(), observe(model, RareWords(range(50, 0, -1), [3], frequent=5)) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 8, 3], [1, 2, 4, 3]]))
        >>> seen.rare_words.counts["rarest"], round(seen.rare_words.baselines["two rarest"]["encoder"], 2)
        ({'encoder': 3}, 0.67)
    """

    def __init__(
        self,
        counts: Any,
        excluded_ids: Iterable[int] | None = None,
        frequent: int = 500,
        *,
        name: str = "rare_words",
    ):
        super().__init__(("rarest", "two rarest"), excluded_ids, name)
        counts = torch.as_tensor(counts, dtype=torch.float64).cpu()
        if counts.dim() != 1 or not bool((counts >= 0).all()):
            raise ValueError(f"counts must be a number ≥ 0 for each token, got the shape {tuple(counts.shape)}.")
        if not 1 <= frequent < (counts > 0).sum():
            raise ValueError(
                f"frequent must be at least 1 and less than {(counts > 0).sum()}, the number of tokens that occur, "
                f"got {frequent}; count tokens in a larger corpus or lower it."
            )
        self._limit = counts.topk(frequent).values[-1].item()
        self._counts = nn.functional.pad(counts, (0, 1))

    def targets(self, call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor) -> tuple:
        self._counts = self._counts.to(call.weights.device)
        counts = self._counts[call.key_ids.clamp(max=len(self._counts) - 1)].where(keys, torch.inf)
        rarest, second = (counts.kthvalue(min(rank, counts.shape[1]), dim=1, keepdim=True).values for rank in (1, 2))
        right = {role: (keys & (counts <= most))[:, None] for role, most in zip(self.roles, (rarest, second))}
        return keys[:, None], right, queries & (rarest < self._limit)


class DuplicateTokens(_TokenRoles):
    """How often each head attends most to another occurrence of the same token (Wang et al. 2022, section 3.2).

    A case is a token that can attend to another occurrence of itself in the sentence or, in cross-attention, in the
    sentence of the encoder; under a causal mask, first occurrences are not cases. Neither the token itself nor masked
    tokens compete. The baseline is chance: the mean fraction of other occurrences among the competing tokens. The
    result is [`RoleScores`] with the role "duplicate".

    Args:
        excluded_ids (iterable of `int`, *optional*): Token ids that count neither as targets nor as cases; by default
            `tokenizer.all_special_ids` of the tokenizer that [`observe`] is given.
        name (`str`): Name of the result.

    Raises:
        ValueError: while observing, if token ids are unknown, or neither `excluded_ids` nor a tokenizer was given.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import observe
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertModel(config)
        >>> with torch.no_grad(), observe(model, DuplicateTokens([3])) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 5, 3], [9, 6, 4, 3]]))
        >>> seen.duplicate_tokens.counts, seen.duplicate_tokens.baselines
        ({'duplicate': {'encoder': 2}}, {'duplicate': {'encoder': 0.5}})
    """

    def __init__(self, excluded_ids: Iterable[int] | None = None, *, name: str = "duplicate_tokens"):
        super().__init__(("duplicate",), excluded_ids, name)

    def targets(self, call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor) -> tuple:
        competing = keys[:, None] & call.visible_keys
        if call.site.kind != "cross":
            competing = competing & (call.query_positions[..., None] != call.key_positions[:, None])
        same = competing & (call.query_ids[..., None] == call.key_ids[:, None])
        return competing, {"duplicate": same}, queries & same.any(-1)
