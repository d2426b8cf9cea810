# Licensed under the Apache License, Version 2.0.
"""Heads that attend most to rare words, to other occurrences of the same token, or to the token that comes next."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...models.number_checks import is_integer
from .base import AttentionCall, HeadMeans, Observer, neighbour_ids
from .excluded_tokens import SpecialTokens
from .roles import RoleScores
from .token_relations import most_queries


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
        self.special = SpecialTokens(excluded_ids, type(self).__name__)
        self._hits, self._chance = ({role: HeadMeans(type(self).__name__) for role in roles} for _ in range(2))

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
        competing, right, counted = self.targets(
            call,
            call.real_queries & ~self.special.among(call.query_ids),
            call.real_keys & ~self.special.among(call.key_ids),
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
            # Equal for all heads of a layer that are not removed.
            chance = self._chance[role].compute()
            results.baselines[role] = {kind: table.nanmean().item() for kind, table in chance.items()}
            results.counts[role] = most_queries(hits)
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
    or excluded tokens compete. The baseline is chance: the mean fraction of other occurrences among the competing
    tokens. The result is [`RoleScores`] with the role "duplicate".

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


class RetrievalScore(_TokenRoles):
    """How often each head attends most to a copy of the token that comes next (Wu et al. 2024, section 2).

    A case is a token whose successor occurs among the tokens that it can attend to, the successor itself aside, which
    encoders see. All these tokens compete, special tokens as well. The baseline is chance: the mean fraction of such
    copies among the competing tokens. The result is [`RoleScores`] with the role "retrieval". Heads
    with high scores on answers that are copied from the text are retrieval heads; induction heads are among them.

    The successor has to be known: let the model read the whole sequence that `generate()` has returned. In a causal
    model, it has the same attention as in the steps that generated it.

    Args:
        last (`int`, *optional*): Number of tokens at the end of each sentence that are answers: only they count as
            successors. By default all tokens do.
        excluded_ids (`list[int]`, *optional*): Token ids that count neither as targets nor as cases; by default
            `tokenizer.all_special_ids` of the tokenizer that [`observe`] is given.
        name (`str`): Name of the result.

    Raises:
        ValueError: if `last` is below 1; while observing, if token ids are unknown, or neither `excluded_ids` nor a
            tokenizer was given.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> from hf_attn_dynamics import observe
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4))
        >>> with torch.no_grad(), observe(model, RetrievalScore(last=1, excluded_ids=[])) as seen:
        ...     _ = model(input_ids=torch.tensor([[5, 7, 8, 9, 5, 7]]))  # the answer to 5 is 7
        >>> seen.retrieval.counts, round(seen.retrieval.baselines["retrieval"]["decoder"], 2)
        ({'retrieval': {'decoder': 1}}, 0.2)
    """

    def __init__(self, last: int | None = None, excluded_ids: Iterable[int] | None = None, *, name: str = "retrieval"):
        if last is not None and not (is_integer(last) and last >= 1):
            raise ValueError(f"last must be a number of tokens, at least 1, or None for all, got {last!r}.")
        super().__init__(("retrieval",), excluded_ids, name)
        self.last = last

    def targets(self, call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor) -> tuple:
        competing, tokens = call.visible_keys, call.queries
        successors = neighbour_ids(tokens, 1)[call.sentences, call.rows]
        copies = competing & keys[:, None] & (successors[..., None] == call.key_ids[:, None])
        if call.site.kind != "cross":
            copies = copies & (call.key_positions[:, None] != call.query_positions[..., None] + 1)
        counted = queries & (successors >= 0) & copies.any(-1)
        if self.last is not None:
            left = tokens.real.sum(-1, keepdim=True) - tokens.real.cumsum(-1)  # tokens after each
            counted = counted & (left <= self.last)[call.sentences, call.rows]
        return competing, {"retrieval": copies}, counted
