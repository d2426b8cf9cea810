# Licensed under the Apache License, Version 2.0.
"""Heads, feed-forward units, parameters, FLOPs, bytes and latency of a model before and after pruning."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..._tables import format_table
from ...models.compat import unsaved_names
from ...models.device_names import device_name
from ...models.head_roles import HeadLayer, locate_heads
from ...models.head_sites import SITE_KINDS
from ...models.unit_roles import UnitLayer, prunable_units
from ..model_views import evaluation_view
from ..notebook import html_table
from .measuring import (
    alternating_times,
    built_anew,
    cache_bytes,
    check_counts,
    check_phase,
    check_weights,
    checked_decoding,
    count_flops,
    cpu_threads,
    decoding_inputs,
    example_inputs,
    moved,
    without_mixed_precision,
)


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class HeadReport:
    """Comparison of a dense and a pruned model, see [`head_report`]; `print` it for a table.

    Args:
        layers (`dict[str, list[int]]`): Number of kept heads in each layer, by kind of site.
        layers_dense (`dict[str, list[int]]`): Number of heads in each layer of the dense model.
        parameters_dense, parameters_pruned (`int`): Parameters in a safetensors file, as the Hub counts them: tied
            weights once, buffers that are computed at initialization not at all.
        flops_dense, flops_pruned (`int`): Floating-point operations of the matrix products and convolutions of one
            forward pass; a multiplication and an addition count as two.
        bytes_dense, bytes_pruned (`int`): Size of the weights in a safetensors file, without its header.
        latency_dense, latency_pruned (`float`, *optional*): Median seconds of a forward pass; `None` if not measured.
        device, dtype, inputs (`str`): Device, data type and shapes of the inputs.
        threads, batch, length (`int`): CPU threads, batch size and tokens per sentence; no length for images.
        rounds (`int`): Number of timed rounds; 0 if latency is not measured.
        units (`dict[str, list[int]]`): Number of kept feed-forward units in each layer, by kind of site; empty if
            units of this architecture cannot be pruned.
        units_dense (`dict[str, list[int]]`): Number of units in each layer of the dense model.
        phase (`str`): `forward`, or `decode` for one token with a cache.
        cache_bytes_dense, cache_bytes_pruned (`float`, *optional*): Bytes of keys and values that the cache of
            self-attention holds for each token, if `phase` is `decode`.
    """

    layers: dict[str, list[int]]
    layers_dense: dict[str, list[int]]
    parameters_dense: int
    parameters_pruned: int
    flops_dense: int
    flops_pruned: int
    bytes_dense: int
    bytes_pruned: int
    latency_dense: float | None
    latency_pruned: float | None
    device: str
    dtype: str
    inputs: str
    threads: int
    batch: int
    length: int | None
    rounds: int
    units: dict[str, list[int]] = field(default_factory=dict)
    units_dense: dict[str, list[int]] = field(default_factory=dict)
    phase: str = "forward"
    cache_bytes_dense: float | None = None
    cache_bytes_pruned: float | None = None

    @property
    def heads_total(self) -> int:
        """Number of heads of the dense model."""
        return sum(map(sum, self.layers_dense.values()))

    @property
    def heads_kept(self) -> int:
        """Number of heads of the pruned model."""
        return sum(map(sum, self.layers.values()))

    @property
    def units_total(self) -> int:
        """Number of feed-forward units of the dense model."""
        return sum(map(sum, self.units_dense.values()))

    @property
    def units_kept(self) -> int:
        """Number of feed-forward units of the pruned model."""
        return sum(map(sum, self.units.values()))

    @property
    def blocks_total(self) -> int:
        """Number of attention and feed-forward blocks of the dense model that have heads or units."""
        return _num_blocks(self.layers_dense, self.units_dense)

    @property
    def blocks_kept(self) -> int:
        """Number of attention and feed-forward blocks of the pruned model that have heads or units."""
        return _num_blocks(self.layers, self.units)

    @property
    def flops_ratio(self) -> float:
        """FLOPs, pruned over dense."""
        return self.flops_pruned / self.flops_dense

    @property
    def latency_ratio(self) -> float | None:
        """Latency, pruned over dense; `None` if not measured."""
        return None if self.latency_dense is None else self.latency_pruned / self.latency_dense

    @property
    def latency_of_ideal(self) -> float | None:
        """Speed-up over the ideal speed-up by FLOPs; 1 if latency is proportional to FLOPs."""
        return None if self.latency_dense is None else self.flops_ratio / self.latency_ratio

    @property
    def _ideal_speedup(self) -> float:
        """Speed-up that the removed FLOPs allow; infinite if all were removed."""
        return 1 / self.flops_ratio if self.flops_ratio else math.inf

    def to_dict(self) -> dict[str, Any]:
        """All metrics under flat keys, for a summary."""
        pairs = {
            f"{name}_{which}": getattr(self, f"{name}_{which}")
            for name in ("parameters", "flops", "bytes", "latency", "cache_bytes")
            for which in ("dense", "pruned")
        }
        derived = ("flops_ratio", "latency_ratio", "latency_of_ideal")
        setting = ("device", "dtype", "inputs", "threads", "batch", "length", "rounds", "phase")
        layers = ("layers", "layers_dense", "units", "units_dense")
        counts = [f"{part}_{which}" for part in ("heads", "units", "blocks") for which in ("total", "kept")]
        return {
            **{name: getattr(self, name) for name in counts},
            **pairs,
            **{name: getattr(self, name) for name in (*derived, *setting, *layers)},
        }

    def _rows(self) -> list[list]:
        """Rows of the table: name, dense, pruned and ratio."""
        counts = [("heads", self.heads_total, self.heads_kept)]
        # Reports of models that only lose heads are about heads.
        counts += [("units", self.units_total, self.units_kept)] * (self.units_kept < self.units_total)
        counts += [("blocks", self.blocks_total, self.blocks_kept)] * (self.blocks_kept < self.blocks_total)
        rows = [
            *([name, f"{total:,}   ", f"{kept:,}   ", kept / total] for name, total, kept in counts),
            _row("parameters", self.parameters_dense, self.parameters_pruned, 1e6, "M "),
            _row("FLOPs", self.flops_dense, self.flops_pruned, 1e9, "G "),
            _row("weights", self.bytes_dense, self.bytes_pruned, 1e6, "MB"),
        ]
        if self.latency_dense is not None:
            rows.append(_row("latency", self.latency_dense, self.latency_pruned, 1e-3, "ms"))
        if self.cache_bytes_dense is not None:
            rows.append(_row("cache per token", self.cache_bytes_dense, self.cache_bytes_pruned, 1e3, "kB"))
        return rows

    def _repr_html_(self) -> str:
        """The table, and the heads and units kept in each layer, for notebooks."""
        metrics = [[name, dense.strip(), pruned.strip(), ratio] for name, dense, pruned, ratio in self._rows()]
        caption = f"Pruned beside dense model: {self.inputs}, {self.dtype}, {self.device}"
        tables = [html_table(["", "dense", "pruned", "ratio"], metrics, caption)]
        for part, counts, built in self._of_layers():
            rows = [
                [kind, layer, kept, total]
                for kind, of_kind in counts.items()
                for layer, (kept, total) in enumerate(zip(of_kind, built[kind]))
            ]
            tables.append(
                html_table(["site", "layer", f"{part} kept", "of"], rows, f"{part.title()} kept in each layer")
            )
        return "".join(tables)

    def _of_layers(self) -> list[tuple[str, dict[str, list[int]], dict[str, list[int]]]]:
        """Name of the parts, and their number in each layer of the pruned and the dense model, if any was removed."""
        shown = [("heads", self.layers, self.layers_dense)]
        return shown + [("units", self.units, self.units_dense)] * (self.units_kept < self.units_total)

    def plot(self, path: str | Path | None = None, title: str = "") -> "Figure":
        """Draws the number of heads that each layer keeps, and of units if any was removed.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
        """
        from ..plots.base import plot_heads_per_layer
        from ..plots.parts import plot_parts_per_layer

        if self.units_kept < self.units_total:
            left = {"": {"heads": self.layers, "units": self.units}}
            return plot_parts_per_layer(left, path, self.layers_dense, self.units_dense, title)
        total = {kind: max(built) for kind, built in self.layers_dense.items()}
        return plot_heads_per_layer(self.layers, path, total, title)

    def __str__(self) -> str:
        rows = self._rows()
        for column in (1, 2):
            width = max(len(row[column]) for row in rows)
            for row in rows:
                row[column] = row[column].rjust(width)
        lines = [format_table(["", "dense", "pruned", "ratio"], rows), ""]
        if self.latency_dense is not None:
            lines.append(
                f"Speed-up {1 / self.latency_ratio:.2f} ×; the removed FLOPs allow {self._ideal_speedup:.2f} × "
                f"({100 * self.latency_of_ideal:.0f} % of it reached)."
            )
        timing = f", median of {self.rounds} interleaved rounds" if self.rounds else ""
        threads = f", {self.threads} thread{'s' * (self.threads != 1)}" if not self.device.startswith("cuda") else ""
        lines += [f"{self.inputs}, {self.dtype}, {self.device}{threads}{timing}."]
        for part, counts, dense in self._of_layers():
            lines += ["", f"{part.title()} kept in each layer:"]
            for kind, kept in counts.items():
                built = dense[kind]
                cells = " ".join(f"{count or '·':>{len(str(max(built)))}}" for count in kept)
                lines.append(f"  {kind:<8} {cells}   = {sum(kept)} of {sum(built)}")
        return "\n".join(lines)


def _num_blocks(*counts: dict[str, list[int]]) -> int:
    return sum(count > 0 for by_kind in counts for of_kind in by_kind.values() for count in of_kind)


def _row(name: str, dense: float, pruned: float, unit: float, symbol: str) -> list:
    return [name, f"{dense / unit:,.2f} {symbol}", f"{pruned / unit:,.2f} {symbol}", pruned / dense]


def head_report(
    model: PreTrainedModel,
    batch: int | None = None,
    length: int | None = None,
    device: str | torch.device | None = None,
    rounds: int = 20,
    dense: PreTrainedModel | None = None,
    threads: int | None = None,
    latency: bool = True,
    inputs: dict[str, torch.Tensor] | None = None,
    phase: str = "forward",
) -> HeadReport:
    """Compares heads, feed-forward units, parameters, FLOPs, bytes and latency of a pruned model with its dense model.

    Both models run on the same random input in evaluation and inference mode. Latencies are medians over rounds in
    which the models alternate, so that both see the same load of the machine. They compute in the data type of their
    weights: mixed precision of a trainer is off. PyTorch counts FLOPs with attention as matrix products, since it does
    not count its fused kernels on all devices; masked scores count.

    Args:
        model (`PreTrainedModel`): The pruned model; it is not changed.
        batch (`int`, *optional*): Number of sentences, images or recordings; 8 by default.
        length (`int`, *optional*): Tokens per sentence, in encoder and decoder; 128 by default, or the number of the
            model's positions. Not for images.
        device (`str` or `torch.device`, *optional*): Device to run on; the device of the model by default.
        rounds (`int`): Number of timed rounds.
        dense (`PreTrainedModel`, *optional*): The dense model, which may have been pruned before. By default, a model
            of the same class with random weights, built from the configuration without `pruned_heads` and
            `pruned_units`.
        threads (`int`, *optional*): Number of CPU threads; PyTorch's current number by default.
        latency (`bool`): Whether to measure latency.
        inputs (`dict[str, torch.Tensor]`, *optional*): Inputs of both models, in place of `batch` and `length`.
        phase (`str`): `forward` for a forward pass on whole sentences; `decode` for one token with a cache of `length`
            tokens, of a model that generates text. FLOPs are counted for this phase.

    Returns:
        [`HeadReport`]

    Raises:
        ValueError: if a number is not positive, `length` exceeds the model's positions, `inputs` is needed for this
            kind of model or given for `decode`, `phase` is unknown or needs a cache that the model does not have, a
            model is quantized, or `dense` has another data type or other layers, or lacks heads or units of the model.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics.models.head_pruning import prune_heads
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model = prune_heads(BertModel(config), {0: [1, 2], 1: [0]})
        >>> report = head_report(model, batch=2, length=16, latency=False)
        >>> report.heads_kept, report.heads_total, report.layers
        (5, 8, {'encoder': [2, 3]})
        >>> report.flops_dense - report.flops_pruned
        73728
    """
    check_counts(batch=batch, length=length, rounds=rounds, threads=threads)
    if inputs is not None and (batch is not None or length is not None):
        raise ValueError("inputs already determine batch and length: leave out batch and length, or inputs.")
    check_phase(phase)
    if inputs is not None and phase == "decode":
        raise ValueError("phase='decode' makes its own inputs; leave inputs out.")
    if device is not None and getattr(model, "hf_device_map", None):
        raise ValueError(f"device={str(device)!r}: a model with a device map cannot be moved; leave device out.")
    for name, each in (("model", model), ("dense", dense)):
        if each is not None:
            check_weights(name, each)
    if dense is not None and dense.dtype != model.dtype:
        raise ValueError(
            f"dense is {dense.dtype} and model is {model.dtype}, so that the report would mix pruning with precision: "
            "convert one of them with .to(dtype)."
        )
    layers = locate_heads(model)
    if phase == "decode":
        # The last token is decoded.
        length = checked_decoding(model, length)
        inputs = example_inputs(model, batch or 8, length + 1)
    elif inputs is None:
        inputs = example_inputs(model, batch or 8, length)
    dense = built_anew(model, otherwise=", or pass the dense model as dense") if dense is None else dense
    kept, before = _checked_counts("heads", layers, locate_heads(dense))
    units, units_before = _checked_counts("units", prunable_units(model), prunable_units(dense))

    device = torch.device(model.device if device is None else device)
    with cpu_threads(threads), _at(device, model, dense):
        threads = torch.get_num_threads()
        inputs = moved(inputs, device, model.dtype)
        with torch.inference_mode():
            readers = [without_mixed_precision(evaluation_view(each)) for each in (dense, model)]
            is_decoding = phase == "decode"
            makers = [decoding_inputs(each, inputs) if is_decoding else lambda: inputs for each in readers]
            caches = [cache_bytes(make()["cache"]) for make in makers] if is_decoding else (None, None)
            flops = [count_flops(each, make()) for each, make in zip((dense, model), makers)]
            times = (None, None)
            if latency:
                seconds = alternating_times(readers, makers, rounds, device)
                times = [statistics.median(own) for own in seconds]

    shapes = ", ".join(f"{name} {' × '.join(map(str, value.shape))}" for name, value in inputs.items())
    first = inputs.get(model.main_input_name, next(iter(inputs.values())))
    tokens = next((inputs[name] for name in ("decoder_input_ids", "input_ids") if name in inputs), None)
    return HeadReport(
        layers=kept,
        layers_dense=before,
        parameters_dense=_parameters(dense),
        parameters_pruned=_parameters(model),
        flops_dense=flops[0],
        flops_pruned=flops[1],
        bytes_dense=_bytes(dense),
        bytes_pruned=_bytes(model),
        latency_dense=times[0],
        latency_pruned=times[1],
        device=device_name(device),
        dtype=str(model.dtype).removeprefix("torch."),
        inputs=f"one token after {length} in the cache, batch of {len(first)}" if is_decoding else shapes,
        threads=threads,
        batch=len(first),
        length=length if is_decoding else None if tokens is None else tokens.shape[1],
        rounds=rounds if latency else 0,
        units=units,
        units_dense=units_before,
        phase=phase,
        cache_bytes_dense=caches[0],
        cache_bytes_pruned=caches[1],
    )


def _checked_counts(
    part: str, layers: Sequence[HeadLayer | UnitLayer], layers_of_dense: Sequence[HeadLayer | UnitLayer]
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Number of heads or units by layer, of the model and of the dense model, which must have those of the model."""
    kept, before = (_counts_by_kind(part, each) for each in (layers, layers_of_dense))
    by_site = {layer.site: layer for layer in layers_of_dense}
    if by_site.keys() != {layer.site for layer in layers} or any(
        getattr(layer, f"num_{part}") != getattr(by_site[layer.site], f"num_{part}")
        or not set(getattr(layer, part)) <= set(getattr(by_site[layer.site], part))
        for layer in layers
    ):
        raise ValueError(
            f"dense has the {part} {before}, which do not include all {part} of the model, {kept}; give the model "
            "that was pruned."
        )
    return kept, before


def _counts_by_kind(part: str, layers: Iterable[HeadLayer | UnitLayer]) -> dict[str, list[int]]:
    ordered = sorted(layers, key=lambda layer: layer.site.layer)
    found = {kind: [len(getattr(layer, part)) for layer in ordered if layer.site.kind == kind] for kind in SITE_KINDS}
    return {kind: counts for kind, counts in found.items() if counts}


def _saved_tensors(model: PreTrainedModel) -> list[torch.Tensor]:
    """The tensors that `save_pretrained` writes, with tied weights once."""
    ignored = unsaved_names(model)
    tensors = {
        (tensor.data_ptr(), tensor.shape, tensor.stride()): tensor
        for name, tensor in model.state_dict().items()
        if name not in ignored and tensor.numel()
    }
    return list(tensors.values())


def _parameters(model: PreTrainedModel) -> int:
    return sum(tensor.numel() for tensor in _saved_tensors(model))


def _bytes(model: PreTrainedModel) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _saved_tensors(model))


@contextmanager
def _at(device: torch.device, *models: PreTrainedModel) -> Iterator[None]:
    """Context in which models are on a device; moves them back at the end."""
    away = [(model, model.device) for model in models if model.device != device]
    try:
        for model, _ in away:
            model.to(device)
        yield
    finally:
        for model, home in away:
            model.to(home)
