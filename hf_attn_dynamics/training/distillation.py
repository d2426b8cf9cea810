# Licensed under the Apache License, Version 2.0.
"""Learning from a teacher: its attention (KL, squared distance, MiniLM's relations), logits and hidden states."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import nn
from transformers import PreTrainedModel

from ..analysis.attention_inputs import AttentionReader, unlabelled_arguments
from ..analysis.model_views import ModelView, evaluation_view
from ..analysis.running import longest_input, on_device, real_tokens, unwrapped
from ..models.attention_distillation import AttentionInputs, taught_loss
from ..models.guidance_settings import GuidanceSettings
from ..models.guidance_targets import GuidanceTargets, Tokens
from ..models.head_losses import decoder_inputs_of
from ..models.head_roles import HeadLayer, locate_heads
from ..models.head_sites import HeadSite, by_kind, kinds_of
from ..models.precision import at_least_single
from ..models.teacher_settings import RELATIONS, TeacherSettings
from .hidden_distillation import check_hidden_states, hidden_states_of


class TeacherOutput(NamedTuple):
    """What a student learns in one batch.

    Attributes:
        attention (`dict[HeadSite, AttentionInputs]`): Inputs of the teacher's layer, by layer of the student.
        logits (`torch.Tensor`, *optional*): Logits of the teacher.
        hidden_states (`dict[str, tuple]`, *optional*): Embeddings and outputs of the layers by stack, `encoder` or
            `decoder`; `None` for layers that are not learned.
    """

    attention: dict[HeadSite, AttentionInputs]
    logits: torch.Tensor | None
    hidden_states: dict[str, tuple[torch.Tensor | None, ...]] | None = None


class Teacher:
    """A model whose attention a student learns; it runs in evaluation mode, without gradients.

    Args:
        model (`PreTrainedModel`): Any model that uses the attention interface of Transformers and reads the same
            tokens. It is not changed.
        student (`PreTrainedModel`): The student, headwise or not; heads of both may have been removed.
        settings (`dict[str, TeacherSettings]`, *optional*): What is learned, by kind of site. Defaults to
            `guidance["teacher"]` of the student, if it is headwise.
        hidden_layers (`dict[str, list[int]]`, *optional*): Layers whose hidden states are learned, by stack,
            `encoder` or `decoder`, such as `{"encoder": [2, 5]}`.

    Raises:
        ValueError: if the teacher has other tokens than the student, lacks a layer or head that is named, or its
            vectors cannot be split into the relation heads; or, for hidden states, another hidden size.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertModel
        >>> sizes = {"vocab_size": 50, "num_attention_heads": 2, "intermediate_size": 32}
        >>> teacher = BertModel(BertConfig(hidden_size=32, num_hidden_layers=4, **sizes))
        >>> guidance = {"teacher": {"layers": {0: 1, 1: 3}}}
        >>> config = HeadwiseBertConfig(hidden_size=16, num_hidden_layers=2, guidance=guidance, **sizes)
        >>> student = HeadwiseBertModel(config)
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8, 3]])}
        >>> attention = Teacher(teacher, student)(batch).attention
        >>> loss = student(**batch, teacher_attention=attention, output_guidance_loss=True).guidance_loss
    """

    def __init__(
        self,
        model: PreTrainedModel,
        student: PreTrainedModel,
        settings: Mapping[str, TeacherSettings] | None = None,
        hidden_layers: Mapping[str, Sequence[int]] | None = None,
    ):
        check_is_model(model)
        if settings is None:
            found = student.head_settings.guidance.items() if hasattr(student, "head_settings") else ()
            settings = {kind: one.taught for kind, one in found if one.taught is not None}
        self.model, self.settings = unwrapped(model), dict(settings)
        self.hidden_layers = dict(hidden_layers or {})
        _check_vocabulary(self.model, student)
        if self.hidden_layers:
            check_hidden_states(self.model, student)
        self._site_of = {
            HeadSite(kind, own): HeadSite(kind, other)
            for kind, one in self.settings.items()
            for own, other in one.layers.items()
        }
        # For logits alone, attention need not be readable.
        self._reader = self._new_reader() if self._site_of else None
        self._view: ModelView | None = None  # without a reader
        own_layers = {layer.site: layer for layer in locate_heads(student)} if self._site_of else {}
        for own, other in self._site_of.items():
            if own in own_layers:
                self._check_layer(own_layers[own], other)

    def _new_reader(self) -> AttentionReader:
        values = any(one.relations for one in self.settings.values())
        return AttentionReader(self.model, self._site_of.values(), values=values)

    def _check_layer(self, own: HeadLayer, site: HeadSite) -> None:
        """Raises ValueError if the student cannot learn from this layer of the teacher."""
        settings, name, other = self.settings[site.kind], type(self.model).__name__, self._reader.layer_at(site)
        known = other.heads
        for head, learned in settings.taught.get(own.site.layer, {}).items():
            if head in own.heads and learned not in known:
                raise ValueError(
                    f"head {head} of the student's {own.site} learns from head {learned} of the teacher's {site}, but "
                    f"this layer of {name} has the heads {', '.join(map(str, known)) or 'none'}; name others with "
                    'guidance["teacher"]["heads"] = {head of the student: head of the teacher}.'
                )
        count = settings.relation_heads or len(known)
        for relation in settings.relations or ():
            for side in RELATIONS[relation]:
                for owner, layer in (("student", own), ("teacher", other)):
                    size = len(layer.heads) * layer.head_dim
                    if side != "query" and relation != "query_key":
                        size //= layer.group_size
                    if size % count:
                        raise ValueError(
                            f"relation_heads={count} does not divide {size}, the size of the {side} vectors of the "
                            f"{owner}'s {layer.site}; choose a common divisor of the sizes of student and teacher."
                        )

    def is_current(self) -> bool:
        """Whether the teacher still has the layers and heads that it had."""
        return self._reader is None or locate_heads(self.model) == [*self._reader.layers.values()]

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Any]) -> TeacherOutput:
        """Runs the teacher on a batch.

        Args:
            batch (`dict[str, torch.Tensor]`): Inputs of the student; those that the teacher does not take are left
                out. An encoder–decoder needs the decoder's input.
        """
        _check_length(self.model, batch)
        options = {"output_hidden_states": self._chosen_states} if self.hidden_layers else {}
        if self._reader is None:
            arguments = {**unlabelled_arguments(self.model, batch), **options}
            if self._view is None or not self._view.is_current():
                self._view = evaluation_view(self.model)
            outputs, found = self._view.root(**arguments, return_dict=True), {}
        else:
            outputs, found = self._reader(batch, **options)
        attention = {own: found[other] for own, other in self._site_of.items()}
        return TeacherOutput(attention, outputs.get("logits"), self._learned_states(outputs))

    @property
    def _chosen_states(self) -> list[int] | bool:
        """Indices of the hidden states to keep. Models that keep all of them take a list as True."""
        chosen = sorted({layer + 1 for layers in self.hidden_layers.values() for layer in layers})
        # Larger ones, as of a decoder with more layers than its encoder, would be dropped.
        return chosen if max(chosen) <= self.model.config.get_text_config().num_hidden_layers else True

    def _learned_states(self, outputs: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor | None, ...]] | None:
        """Hidden states of the layers that are learned; all others can be freed."""
        if not self.hidden_layers:
            return None
        return {
            kind: tuple(state if place - 1 in self.hidden_layers[kind] else None for place, state in enumerate(states))
            for kind, states in hidden_states_of(self.model, outputs, self.hidden_layers).items()
        }


def check_is_model(teacher: Any) -> None:
    """Raises ValueError unless a teacher is a model, or an adapter of one."""
    if not isinstance(teacher, nn.Module) or not isinstance(unwrapped(teacher), PreTrainedModel):
        raise ValueError(f"teacher must be a PreTrainedModel, got {type(teacher).__name__}.")


def vocabulary_sizes(*models: PreTrainedModel) -> list[int | None]:
    """Number of tokens of each model that reads tokens."""
    return [getattr(model.config.get_text_config(), "vocab_size", None) for model in models]


def _check_vocabulary(teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    sizes = vocabulary_sizes(teacher, student)
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the teacher reads a vocabulary of {sizes[0]} tokens, the student one of {sizes[1]}: both need the same "
            "tokenizer."
        )


def check_tokenizers(student: Any, teacher: Any) -> None:
    """Raises ValueError unless two tokenizers have the same tokens.

    Args:
        student, teacher (`PreTrainedTokenizerBase`): The tokenizers.
    """
    own, other = student.get_vocab(), teacher.get_vocab()
    if own == other:
        return
    token, index = min(own.items() ^ other.items(), key=lambda pair: (pair[1], pair[0]))
    raise ValueError(
        f"student and teacher need the same tokenizer, but token {token!r} is number {own.get(token)} in the "
        f"student's tokenizer, and {other.get(token)} in the teacher's."
    )


def _check_length(teacher: PreTrainedModel, batch: Mapping[str, Any]) -> None:
    """Raises ValueError for inputs longer than the teacher's position embeddings."""
    ids, most = batch.get("input_ids"), longest_input(teacher)
    if ids is None or most is None or getattr(teacher.config, "rope_parameters", None):
        return
    if ids.shape[1] > most:
        raise ValueError(
            f"a sentence of the batch has {ids.shape[1]} tokens, but the teacher {type(teacher).__name__} reads at "
            f"most {most}: truncate sentences to that length."
        )


def logit_distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    temperature: float = 2.0,
    rows: torch.Tensor | None = None,
    num_rows: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """`T² · KL(softmax(teacher / T)‖softmax(student / T))`, the mean over rows (Hinton et al. 2015).

    Args:
        logits, teacher_logits (`torch.Tensor` of shape `(…, classes)`): Logits of student and teacher; the teacher
            gets no gradient.
        temperature (`float`, defaults to 2.0): T.
        rows (`torch.BoolTensor` of shape `(…)`, *optional*): Rows that count; defaults to all.
        num_rows (`torch.Tensor`, *optional*): Number of rows that the loss is averaged over, such as that of an
            accumulated batch; defaults to those that count.

    Returns:
        `torch.Tensor`: a float32 scalar (float64 in double precision).

    Raises:
        ValueError: if the teacher has no logits, or the shapes differ.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> logit_distillation_loss(logits, logits).item()
        0.0
    """
    if teacher_logits is None:
        raise ValueError(
            "distillation_weight needs a teacher with logits, but its output has none: load it with the head of the "
            "student's task."
        )
    if logits.shape != teacher_logits.shape:
        raise ValueError(
            f"the student has logits of shape {tuple(logits.shape)}, the teacher of {tuple(teacher_logits.shape)}: "
            "both need the same classes and the same tokens."
        )
    teacher_logits = teacher_logits.detach().to(logits.device)
    if rows is not None:
        logits, teacher_logits = logits[rows], teacher_logits[rows]
    own, other = (
        nn.functional.log_softmax(at_least_single(one) / temperature, -1).flatten(0, -2)
        for one in (logits, teacher_logits)
    )
    total = nn.functional.kl_div(own, other.to(own.dtype), reduction="sum", log_target=True) * temperature**2
    # A part of an accumulated batch may have no row.
    return total / (max(len(own), 1) if num_rows is None else num_rows)


@overload
def attention_distillation_loss(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batch: Mapping[str, Any],
    layers: Mapping,
    heads: str | Mapping | None = None,
    loss: str = "kl",
    relations: list[str] | None = None,
    relation_heads: int | None = None,
    return_outputs: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def attention_distillation_loss(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batch: Mapping[str, Any],
    layers: Mapping,
    heads: str | Mapping | None = None,
    loss: str = "kl",
    relations: list[str] | None = None,
    relation_heads: int | None = None,
    *,
    return_outputs: Literal[True],
) -> tuple[torch.Tensor, Any]: ...


def attention_distillation_loss(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batch: Mapping[str, Any],
    layers: Mapping,
    heads: str | Mapping | None = None,
    loss: str = "kl",
    relations: list[str] | None = None,
    relation_heads: int | None = None,
    return_outputs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, Any]:
    """Divergence of the attention of a student from the attention of a teacher, for training loops of your own.

    `loss="kl"` is KL(teacher‖student) = Σ T log(T / S), the divergence of the attention S of a row of a head of the
    student from the attention T of the head that it learns from; `"squared"` is Σ (S − T)². The loss is the mean over
    non-padding rows, heads and sentences, summed over layers. Value and gradient are exact, and no attention matrix is
    stored. The teacher runs in evaluation mode and gets no gradient. The student runs in its own mode, but attention
    is compared before dropout. Keys that the student does not see are left out of the teacher's attention.

    Args:
        student (`PreTrainedModel`): Any model that uses the attention interface of Transformers.
        teacher (`PreTrainedModel`): Another one with the same tokens, of any size.
        batch (`dict[str, torch.Tensor]`): Inputs of both models. Labels are not needed.
        layers (`dict`): `{layer of the student: layer of the teacher}`; by kind of site for an encoder–decoder,
            `{"decoder": {0: 1}, "cross": {0: 1}}`.
        heads (`str` or `dict`, *optional*): `same`, the default without relations, if both have as many heads;
            `{head of the student: head of the teacher}`, or that by layer of the student.
        loss (`str`, defaults to `"kl"`): `kl` or `squared`.
        relations (`list[str]`, *optional*): Relations between tokens to learn (Wang et al. 2021, MiniLMv2): `value`,
            `query`, `key` (of vectors with themselves) or `query_key`. These need neither equal numbers of heads nor
            equal sizes.
        relation_heads (`int`, *optional*): Number of heads of the relations; defaults to the teacher's.
        return_outputs (`bool`, defaults to `False`): Whether to return the output of the student, too.

    Returns:
        `torch.Tensor`: a float32 scalar (float64 in double precision) with gradients for the student; with
        `return_outputs`, a tuple of it and the output of the student.

    Raises:
        ValueError: if the models have other tokens, a layer or head does not exist, or attention cannot be read.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"vocab_size": 50, "num_attention_heads": 2, "intermediate_size": 32}
        >>> teacher = BertModel(BertConfig(hidden_size=32, num_hidden_layers=4, **sizes))
        >>> student = BertModel(BertConfig(hidden_size=16, num_hidden_layers=2, **sizes))
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8, 3]])}
        >>> attention_distillation_loss(student, teacher, batch, layers={0: 1, 1: 3}).backward()
    """
    student = unwrapped(student)
    own_layers = locate_heads(student)
    sites = {layer.site: layer.num_heads for layer in own_layers}
    kinds = kinds_of(sites)
    given = {"heads": heads, "loss": loss, "relations": relations, "relation_heads": relation_heads}
    settings = {
        kind: TeacherSettings.from_dict(
            {"layers": own, **given}, kind, [count for site, count in sites.items() if site.kind == kind], kind
        )
        for kind, own in by_kind(layers, kinds, "layers").items()
    }
    batch = dict(on_device(batch, student))
    is_pair = getattr(student.config, "is_encoder_decoder", False)
    if is_pair and batch.get("decoder_input_ids") is None and batch.get("labels") is not None:
        batch["decoder_input_ids"] = decoder_inputs_of(student, batch["labels"])
    lesson = Teacher(teacher, student, settings)(batch)
    by_site = {layer.site: layer for layer in own_layers}
    outputs, found = AttentionReader(student, lesson.attention.keys(), evaluates=False)(batch)
    terms = []
    for site, own in found.items():
        left = by_site[site].heads
        taught = settings[site.kind].taught.get(site.layer, {})
        learned = {left.index(head): other for head, other in taught.items() if head in left}
        targets = _rows_of(student, site, batch, own)
        terms.append(
            taught_loss(
                settings[site.kind], learned, own, lesson.attention[site], targets.row_weights, targets.key_mask
            )
        )
    total = torch.stack([term.to(terms[0].device) for term in terms]).sum()
    return (total, outputs) if return_outputs else total


def _rows_of(
    student: PreTrainedModel, site: HeadSite, batch: Mapping[str, Any], own: AttentionInputs
) -> GuidanceTargets:
    """Keys and rows of a layer, and their weights."""
    device, (size, _, num_rows, _), length = own.query.device, own.query.shape, own.key.shape[2]
    rows = real_tokens(student, site.kind, batch, (size, num_rows), device)
    shape = (size, length)
    keys = rows if site.kind != "cross" else real_tokens(student, "encoder", batch, shape, device)
    return GuidanceTargets(
        GuidanceSettings(),
        {},
        Tokens(None, keys.long(), shape, device),
        Tokens(None, rows.long(), (size, num_rows), device),
        counted=rows,
        sentences=rows.any(1) & keys.any(1),
        causal=own.band[1] == 0,
    )
