# Licensed under the Apache License, Version 2.0.
"""Learning the hidden states of a teacher, layers matched as in CoFi (Xia et al. 2022, section 3.2)."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..analysis.running import is_seq2seq, real_tokens
from ..models.head_losses import SENTENCES
from ..models.head_roles import locate_heads
from ..models.head_sites import kinds_of
from ..models.precision import at_least_single
from ..models.token_mask import num_sentences
from ..models.unit_roles import locate_units
from .resumable_callback import ResumableCallback


HiddenStates = Sequence[torch.Tensor | None]
NUM_LEARNED = 4  # layers of the teacher, at most


def learned_layers(num_layers: int) -> list[int]:
    """Layers of a teacher that a student learns by default: every k-th with k = ⌈layers / 4⌉, down from the last.

    Example:
        >>> learned_layers(12), learned_layers(6)
        ([2, 5, 8, 11], [1, 3, 5])
    """
    step = math.ceil(num_layers / NUM_LEARNED)
    return list(range(num_layers - 1, -1, -step))[::-1]


def hidden_distillation_loss(
    student_hidden: HiddenStates,
    teacher_hidden: HiddenStates,
    mask: torch.Tensor | None,
    pairs: Mapping[int, int],
    num_tokens: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Mean squared difference of the hidden states of student and teacher, summed over pairs of layers.

    The mean is over non-padding tokens and hidden features. CoFi (Xia et al. 2022) multiplies the student's states by
    a trained matrix `W_layer`, which starts as the identity. There is none here: both models have the same hidden
    size, and the projections of a layer can learn the same.

    Args:
        student_hidden, teacher_hidden (`tuple[torch.Tensor]`): `hidden_states` of the outputs of both models: the
            embeddings, then the output of each layer, of shape `(batch, length, hidden_size)`. In models with a final
            norm, the last one is its output. Those that no pair names may be `None`. The teacher gets no gradient.
        mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 0 at padding; by default there is none.
        pairs (`dict[int, int]`): `{layer of the student: layer of the teacher}`, counted from 0, such as from
            [`match_hidden_layers`].
        num_tokens (`torch.Tensor`, *optional*): Number of tokens that the loss is averaged over, such as that of an
            accumulated batch; defaults to the non-padding tokens of this batch.

    Returns:
        `torch.Tensor`: a float32 scalar (float64 in double precision).

    Raises:
        ValueError: if a model lacks a layer or the shapes of the states differ.

    Example:
        >>> states = torch.zeros(3, 1, 2, 4).unbind()
        >>> others = torch.ones(3, 1, 2, 4).unbind()
        >>> hidden_distillation_loss(states, others, torch.tensor([[1, 0]]), {0: 1, 1: 0})
        tensor(2.)
    """
    index, count = _tokens(mask, student_hidden)
    count = count if num_tokens is None else num_tokens
    anchor = next(one for one in student_hidden if one is not None)
    total = at_least_single(anchor.new_zeros(()))
    for own, other in pairs.items():
        one = _rows(_output(student_hidden, own, "student"), index)
        taught = _rows(_output(teacher_hidden, other, "teacher").detach(), index).to(one)
        _check_shapes(one, taught)
        squares = nn.functional.mse_loss(one, taught, reduction="sum")
        total = total + (squares / (one.shape[-1] * count)).to(total.device)
    return total


@torch.no_grad()
def hidden_layer_distances(
    student_hidden: HiddenStates,
    teacher_hidden: HiddenStates,
    mask: torch.Tensor | None = None,
    layers: Collection[int] | None = None,
    num_tokens: torch.Tensor | float | None = None,
) -> dict[int, torch.Tensor]:
    """Mean squared differences of some layers of a teacher from all layers of a student, for [`match_hidden_layers`].

    Args:
        student_hidden, teacher_hidden, mask, num_tokens: See [`hidden_distillation_loss`].
        layers (`list[int]`, *optional*): Layers of the teacher, counted from 0. By default those whose states are not
            `None`, if some are; otherwise every k-th with k = ⌈layers / 4⌉, down from the last: 2, 5, 8 and 11 of
            twelve layers, as in CoFi.

    Returns:
        `dict[int, torch.Tensor]`: distances of shape `(layers of the student,)`, by layer of the teacher, without
        gradients.

    Raises:
        ValueError: if the teacher lacks a layer or the shapes of the states differ.
    """
    if layers is None:
        given = [layer for layer, states in enumerate(teacher_hidden[1:]) if states is not None]
        every = len(teacher_hidden) - 1
        layers = learned_layers(every) if len(given) == every else given
    index, count = _tokens(mask, student_hidden)
    count = count if num_tokens is None else num_tokens
    taught = {layer: _rows(_output(teacher_hidden, layer, "teacher"), index) for layer in sorted(layers)}
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in taught}
    for number in range(len(student_hidden) - 1):
        own = _rows(_output(student_hidden, number, "student"), index)
        for layer, other in taught.items():
            _check_shapes(own, other)
            squares = nn.functional.mse_loss(own, other.to(own), reduction="sum") / (own.shape[-1] * count)
            found[layer].append(squares.to(student_hidden[-1].device))
    return {layer: torch.stack(distances) for layer, distances in found.items()}


def match_hidden_layers(
    distances: Mapping[int, torch.Tensor | Sequence[float]], removed: Collection[int] = ()
) -> dict[int, int]:
    """Matches layers of a teacher to the nearest layers of a student, in order (Xia et al. 2022, section 3.2).

    As in the code of CoFi, the last layer of the teacher is the first to choose. Each one takes the remaining layer of
    the student with the least distance below those that are taken, so that the order of the layers is kept. If there
    is none, a layer of the teacher remains without a pair; CoFi's code gives it the last layer that was taken.

    Args:
        distances (`dict`): Distances to each layer of the student, by layer of the teacher, as from
            [`hidden_layer_distances`].
        removed (collection of `int`): Layers of the student without attention and feed-forward block, which are not
            matched.

    Returns:
        `dict[int, int]`: `{layer of the student: layer of the teacher}`, in ascending order.

    Example:
        >>> match_hidden_layers({1: [0.1, 0.4, 0.0], 3: [0.9, 0.2, 0.3]})
        {0: 1, 1: 3}
        >>> match_hidden_layers({1: [0.1, 0.4, 0.0], 3: [0.9, 0.2, 0.3]}, removed=[1])
        {0: 1, 2: 3}
    """
    pairs, upper = {}, None
    for layer in sorted(distances, reverse=True):
        own = distances[layer]
        values = own.tolist() if torch.is_tensor(own) else list(own)
        left = [number for number in range(len(values) if upper is None else upper) if number not in removed]
        if not left:
            break
        upper = min(left, key=values.__getitem__)
        pairs[upper] = layer
    return dict(sorted(pairs.items()))


def _tokens(mask: torch.Tensor | None, states: HiddenStates) -> tuple[torch.Tensor | None, int]:
    """Indices of the non-padding tokens, `None` for all, and their number, at least 1."""
    shape = next(one for one in states if one is not None).shape[:2]
    if mask is None:
        return None, max(shape.numel(), 1)
    if mask.shape != shape:
        raise ValueError(f"mask must have the shape {tuple(shape)} of the hidden states, got {tuple(mask.shape)}.")
    index = mask.flatten().nonzero().squeeze(1)
    # A part of an accumulated batch may have no token.
    return (None if len(index) == shape.numel() else index), max(len(index), 1)


def _rows(states: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """States of the tokens with these indices, in single precision at least."""
    rows = states.flatten(0, 1)
    return at_least_single(rows if index is None else rows.index_select(0, index.to(rows.device)))


def _output(states: HiddenStates, layer: int, whose: str) -> torch.Tensor:
    """Output of a layer; the first of the states are the embeddings."""
    found = states[layer + 1] if 0 <= layer < len(states) - 1 else None
    if found is None:
        raise ValueError(f"the {whose} has no hidden states of layer {layer}; its layers are 0 to {len(states) - 2}.")
    return found


def _check_shapes(own: torch.Tensor, other: torch.Tensor) -> None:
    if own.shape != other.shape:
        raise ValueError(
            f"the student has hidden states of {own.shape[0]} tokens × {own.shape[1]} features, the teacher of "
            f"{other.shape[0]} × {other.shape[1]}: both need the same hidden size and the same tokens."
        )


# ---- Models ----


def stacks_of(model: PreTrainedModel) -> list[str]:
    """Stacks of layers of a model, `encoder`, `decoder`, or both."""
    return [kind for kind in kinds_of({layer.site: None for layer in locate_heads(model)}) if kind != "cross"]


def hidden_states_of(model: PreTrainedModel, outputs: Mapping[str, Any], stacks: Sequence[str]) -> dict[str, tuple]:
    """Hidden states of each stack of a model.

    Raises:
        ValueError: if the model returns none.
    """
    names = {kind: f"{kind}_hidden_states" if is_seq2seq(model) else "hidden_states" for kind in stacks}
    for kind, name in names.items():
        if not outputs.get(name):
            raise ValueError(
                f"{type(model).__name__} returns no hidden states of its {kind}, which cannot be learned."
            )
    return {kind: outputs[name] for kind, name in names.items()}


def num_layers_of(model: PreTrainedModel, kind: str) -> int | None:
    """Number of layers of a stack of a model; `None` if its configuration does not tell."""
    config = model.config.get_text_config()
    of_stack = {"encoder": ("encoder_layers",), "decoder": ("decoder_layers", "num_decoder_layers")}
    names = (*(of_stack[kind] if is_seq2seq(model) else ()), "num_hidden_layers")
    count = next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
    # A layer of ALBERT may be several.
    return count if count is None else count * getattr(config, "inner_group_num", 1)


def checked_layers(
    model: PreTrainedModel, stacks: Sequence[str], layers: Mapping[str, Sequence[int]] | Sequence[int] | None
) -> dict[str, list[int]]:
    """Layers of a teacher by stack: those that are given, or every k-th, see [`hidden_layer_distances`].

    Args:
        model (`PreTrainedModel`): The teacher.
        stacks (`list[str]`): Stacks of the student.
        layers (`list[int]` or `dict[str, list[int]]`, *optional*): The layers, by stack if there are several; stacks
            that a dictionary leaves out are not learned.

    Raises:
        ValueError: if the teacher lacks a layer, or layers are not given by stack.
    """
    name = type(model).__name__
    if layers is not None and not isinstance(layers, Mapping):
        if len(stacks) > 1:
            raise ValueError(
                f"hidden_distillation_layers={list(layers)} must name stacks of {name}: pass "
                f"{{{', '.join(f'{kind!r}: {list(layers)}' for kind in stacks)}}}, for instance."
            )
        layers = dict.fromkeys(stacks, layers)
    found = {}
    for kind in stacks if layers is None else layers:
        count = num_layers_of(model, kind) if kind in stacks else None
        if count is None:
            raise ValueError(
                f"hidden_distillation_layers name the {kind}, but the stacks of the models are {', '.join(stacks)}."
                if kind not in stacks
                else f"the number of layers of the {kind} of {name} is unknown; choose another teacher."
            )
        found[kind] = learned_layers(count) if layers is None else sorted(layers[kind])
        if wrong := [layer for layer in found[kind] if layer >= count]:
            raise ValueError(
                f"hidden_distillation_layers name layer {wrong[0]}, but the layers of the {kind} of {name} are 0 to "
                f"{count - 1}."
            )
    return found


def check_hidden_states(teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    """Raises ValueError unless student and teacher have the same hidden size and stacks."""
    sizes = [getattr(model.config.get_text_config(), "hidden_size", None) for model in (student, teacher)]
    names = [type(model).__name__ for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"distillation of hidden states needs the same hidden size, but the student, {names[0]}, has "
            f"{sizes[0]}, and the teacher, {names[1]}, has {sizes[1]}; set hidden_distillation_weight=0, or "
            "choose another teacher."
        )
    if is_seq2seq(student) != is_seq2seq(teacher):
        raise ValueError(
            f"distillation of hidden states needs the same stacks, but only one of {names[0]} and {names[1]} is an "
            "encoder–decoder."
        )


@torch.no_grad()
def removed_layers(model: PreTrainedModel) -> dict[str, set[int]]:
    """Layers without attention and feed-forward block, by stack: pruned, or with deterministic gates that are closed.

    Args:
        model (`PreTrainedModel`): A model; heads, units and blocks may have gates or have been removed.
    """
    if not any(hasattr(module, "unit_gate") or hasattr(module, "pruned_units") for module in model.modules()):
        return {}
    layers, remaining, gated, flags = set(), set(), [], []
    for layer, left, name in _blocks(model):
        place = ("decoder" if layer.site.kind == "cross" else layer.site.kind, layer.site.layer)
        layers.add(place)
        gate = getattr(layer.module, name, None)
        if left and gate is None:
            remaining.add(place)
        elif left:
            gated.append(place)
            flags.append(gate.settled().ne(0).any())
    if flags:
        # One transfer from the device for all gates.
        is_open = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        remaining |= {place for place, own in zip(gated, is_open) if own}
    found: dict[str, set[int]] = {}
    for kind, layer in layers - remaining:
        found.setdefault(kind, set()).add(layer)
    return found


def _blocks(model: PreTrainedModel) -> Iterator[tuple[Any, list[int], str]]:
    """Attention and feed-forward blocks, their remaining heads or units, and the name of their gate."""
    for layer in locate_heads(model):
        yield layer, layer.heads, "gate"
    for layer in locate_units(model):
        yield layer, layer.units, "unit_gate"


def _text_shape(model: PreTrainedModel, kind: str, batch: Mapping[str, Any]) -> tuple[int, int] | None:
    """Number of sentences and tokens that a stack reads; `None` for images and audio."""
    names = ["input_ids", "inputs_embeds"]
    if kind == "decoder" and is_seq2seq(model):
        own = ["decoder_input_ids", "decoder_inputs_embeds", *(["labels"] if model.labels_are_target else [])]
        names = [*own, *names]
    elif batch.get("pixel_values") is not None:
        return None
    for name in names:
        if (value := batch.get(name)) is not None:
            # Choices of multiple choice are sentences of their own.
            shape = value.shape[:-1] if name.endswith("embeds") else value.shape
            return math.prod(shape[:-1]), shape[-1]
    return None


def token_column(kind: str) -> str:
    """Name of the number of tokens of a stack, among the counts of an accumulated batch."""
    return f"{kind}_tokens"


def count_tokens(model: PreTrainedModel, batch: Mapping[str, Any], stacks: Sequence[str]) -> dict[str, torch.Tensor]:
    """Number of non-padding tokens of each stack that reads text, a scalar.

    Args:
        model (`PreTrainedModel`): The student.
        batch (`dict`): Inputs and labels of a forward pass.
        stacks (`list[str]`): See [`stacks_of`].
    """
    device = num_sentences(batch).device
    shapes = {kind: _text_shape(model, kind, batch) for kind in stacks}
    return {
        token_column(kind): real_tokens(model, kind, batch, shape, device).sum()
        for kind, shape in shapes.items()
        if shape is not None
    }


class HiddenMatching(ResumableCallback):
    """Matches layers of a student to those of its teacher while [`HeadwiseTrainer`] trains, and computes their loss.

    The layers of a step are matched by the distances in the whole accumulated batch of the step before, over all
    processes: no micro-batch knows the distances in the others of its step. For the first step, the trainer measures
    them in evaluation mode.

    Args:
        layers (`dict[str, list[int]]`): Learned layers of the teacher, by stack.
        sum_over_processes (callable): Sums a tensor over processes if their losses are summed, too.

    Attributes:
        distances (`dict[str, dict[int, list[float]]]`): Distances in the last step to each layer of the student, by
            stack and layer of the teacher; empty before the first step.
        pairs (`dict[str, dict[int, int]]`): `{layer of the student: layer of the teacher}` of each stack.
    """

    made_of = "the layers of the teacher"

    def __init__(
        self, layers: Mapping[str, Sequence[int]], sum_over_processes: Callable[[torch.Tensor], torch.Tensor]
    ):
        self.layers, self._sum_over_processes = {kind: sorted(own) for kind, own in layers.items()}, sum_over_processes
        self._forget()

    def _forget(self) -> None:
        self.distances: dict[str, dict[int, list[float]]] = {}
        self.pairs: dict[str, dict[int, int]] = {}
        self._removed: dict[str, set[int]] = {}
        self._sums: dict[tuple[str, int], torch.Tensor] = {}

    def _remembered(self) -> dict[str, Any]:
        return {
            "distances": {
                kind: {str(layer): values for layer, values in own.items()} for kind, own in self.distances.items()
            }
        }

    def _recall(self, remembered: dict[str, Any]) -> None:
        self.distances = {
            kind: {int(layer): values for layer, values in own.items() if int(layer) in self.layers.get(kind, ())}
            for kind, own in remembered["distances"].items()
        }
        if any(set(self.distances.get(kind, ())) != set(own) for kind, own in self.layers.items()):
            self.distances = {}  # of other layers of the teacher

    def on_step_end(self, args, state, control, **kwargs):
        self.finish_step()

    @property
    def stacks(self) -> list[str]:
        """Stacks of the models."""
        return list(self.layers)

    def begin_step(self, model: PreTrainedModel) -> None:
        """Matches the layers of the next step."""
        self._removed = removed_layers(model)
        self.pairs = self._matched(self.distances)

    def finish_step(self) -> None:
        """Sums the distances in the micro-batches of a step over all processes."""
        if self._sums:
            sums = [*self._sums.values()]
            sizes = [len(one) for one in sums]
            totals = self._sum_over_processes(torch.cat([one.to(sums[0].device) for one in sums])).split(sizes)
            self.distances = {}
            for (kind, layer), values in zip(self._sums, totals):
                self.distances.setdefault(kind, {})[layer] = values.tolist()
        self._sums = {}

    def _matched(self, distances: Mapping[str, Mapping[int, Any]]) -> dict[str, dict[int, int]]:
        return {kind: match_hidden_layers(own, self._removed.get(kind, ())) for kind, own in distances.items()}

    def loss(
        self,
        model: PreTrainedModel,
        outputs: Mapping[str, Any],
        taught: Mapping[str, HiddenStates],
        batch: Mapping[str, Any],
        counts: Mapping[str, torch.Tensor],
        is_alone: bool,
        is_measured: bool,
    ) -> torch.Tensor:
        """The loss of a micro-batch, summed over stacks, see [`hidden_distillation_loss`].

        Args:
            model (`PreTrainedModel`): The student.
            outputs (`ModelOutput`): Its outputs, with hidden states.
            taught (`dict`): Hidden states of the teacher, by stack.
            batch (`dict`): The micro-batch, with labels.
            counts (`dict`): Numbers of tokens and of sentences of the whole accumulated batch.
            is_alone (`bool`): Whether to match layers by the distances in this batch.
            is_measured (`bool`): Whether the batch is a part of the distances of the step.
        """
        if is_alone:
            self._removed = removed_layers(model)
        found, arguments = {}, {}
        for kind, own in hidden_states_of(model, outputs, self.stacks).items():
            own = _with_last_layer(own, self._removed.get(kind, ()))
            shape, length = _text_shape(model, kind, batch), own[-1].shape[1]
            if shape == own[-1].shape[:2]:
                mask = real_tokens(model, kind, batch, shape, own[-1].device)
                number = counts[token_column(kind)]
            else:
                # Images and audio have no padding.
                mask, number = None, counts[SENTENCES] * length
            number = torch.as_tensor(number, device=own[-1].device)
            found[kind] = hidden_layer_distances(own, taught[kind], mask, self.layers[kind], number)
            arguments[kind] = own, taught[kind], mask, number
        if is_measured:
            for kind, own in found.items():
                for layer, values in own.items():
                    before = self._sums.get((kind, layer))
                    self._sums[kind, layer] = values if before is None else before + values
        pairs = self._matched(found) if is_alone else self.pairs
        terms = [
            hidden_distillation_loss(own, other, mask, pairs.get(kind, {}), number)
            for kind, (own, other, mask, number) in arguments.items()
        ]
        return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def _with_last_layer(states: HiddenStates, removed: Collection[int]) -> HiddenStates:
    """Hidden states that end with the output of the last remaining layer.

    Removed layers above it pass on its output, to the final norm if the model has one.
    """
    left = [layer for layer in range(len(states) - 1) if layer not in removed]
    if not left or left[-1] == len(states) - 2:
        return states
    return [states[-1] if place == left[-1] + 1 else state for place, state in enumerate(states)]
