# Licensed under the Apache License, Version 2.0.
"""Heads that attend to rare words, or to the same token elsewhere (Voita et al. 2019, section 5)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from .base import AttentionCall, HeadMeans, ObservedBatch, Observer
from .excluded_tokens import checked_token_ids
from .roles import RoleScores


class _TokenRoles(Observer):
    """Shares of tokens whose largest weight is on a target.

    Args:
        roles (sequence of `str`): Names of the roles.
        excluded_ids (iterable of `int`, *optional*): Tokens that neither attend nor are attended to here; by default
            all special tokens of the tokenizer that [`observe`] is given.
        name (`str`): Under which the result is found.
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
                f"{type(self).__name__} does not know which tokens are no words: observe(model, …, "
                f"tokenizer=tokenizer), or pass excluded_ids=tokenizer.all_special_ids, or [] if all are."
            )

    def targets(self, call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor) -> tuple:
        """What is looked for.

        Args:
            call (`AttentionCall`): Some rows.
            queries, keys (`torch.Tensor` of shape `(sentences, rows)` and `(sentences, keys)`): Those that are tokens
                and not excluded.

        Returns:
            Keys that compete, `(sentences, rows or 1, keys)`; those that are right in each role, of the same shape,
            by name; and the rows that count, `(sentences, rows)`.
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
            share = targets.sum(-1) / competing.sum(-1).clamp(min=1)
            self._hits[role].add(call, hits, counted)
            self._chance[role].add(call, share[:, None].expand(hits.shape), counted)

    def compute(self) -> RoleScores:
        results = RoleScores({}, {}, {})
        for role, hits in self._hits.items():
            results.accuracy[role] = hits.compute()
            # The same for all heads that are there.
            chance = self._chance[role].compute()
            results.baselines[role] = {kind: table.nanmean().item() for kind, table in chance.items()}
            results.counts[role] = {site.kind: int(count) for site, count in hits.counts.items()}
        return results


class RareWords(_TokenRoles):
    """How often each head attends most to the rarest tokens of a sentence (Voita et al. 2019, section 5.3).

    Sentences count in which the rarest token is not among the most frequent of the vocabulary. A case is a token of
    such a sentence; it is right if its largest weight is on the rarest token ("rarest"), or on that or the second
    rarest ("two rarest"). Tokens that are as rare, count as well, so that there may be more than one or two. The
    baseline is chance: the mean share of these tokens among all that compete. The result is [`RoleScores`].

    Where attention is causal, tokens cannot attend to what comes later; such cases count, and are missed. Of
    cross-attention, the sentence of the keys is meant.

    Args:
        counts (`torch.Tensor` or array of shape `(vocab_size,)`): How often each token occurs in some corpus, see
            `token_counts`; tokens beyond its end never do.
        excluded_ids (iterable of `int`, *optional*): Tokens that are no words and count neither as targets nor as
            cases; by default `tokenizer.all_special_ids` of the tokenizer that [`observe`] is given.
        frequent (`int`): Number of tokens that are called frequent; those that are as frequent as the last of them are
            called so, too.
        name (`str`): Under which the result is found.

    Raises:
        ValueError: if `counts` are no counts, or not more than `frequent` tokens have any; while observing, if token
            ids are not known, nor which are excluded.

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

    A case is a token that occurs elsewhere in the sentence or, in cross-attention, in that of the encoder, at a place
    that it may attend to: where attention is causal, the first occurrence is no case. Neither the token itself nor
    those that it may not attend to compete. The baseline is chance: the mean share of the other occurrences among all
    tokens that compete. The result is [`RoleScores`] with the role "duplicate".

    Args:
        excluded_ids (iterable of `int`, *optional*): Tokens that count neither as targets nor as cases; by default
            `tokenizer.all_special_ids` of the tokenizer that [`observe`] is given.
        name (`str`): Under which the result is found.

    Raises:
        ValueError: while observing, if token ids are not known, nor which are excluded.

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
