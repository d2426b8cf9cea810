# Licensed under the Apache License, Version 2.0.
"""Heads, parameters, FLOPs, bytes and latency of a model before and after pruning."""

import copy
import inspect
import math
import platform
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from ..._tables import format_table
from ...models.compat import build_from_config, unsaved_names
from ...models.head_roles import HeadLayer, locate_heads
from ...models.head_sites import SITE_KINDS
from ..model_views import evaluation_view
from ..notebook import html_table
from ..running import longest_input


if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARM_UP = 2  # forward passes of each model before timing


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

    @property
    def heads_total(self) -> int:
        """Number of heads of the dense model."""
        return sum(map(sum, self.layers_dense.values()))

    @property
    def heads_kept(self) -> int:
        """Number of heads of the pruned model."""
        return sum(map(sum, self.layers.values()))

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

    def to_dict(self) -> dict[str, Any]:
        """All metrics under flat keys, for a summary."""
        pairs = {
            f"{name}_{which}": getattr(self, f"{name}_{which}")
            for name in ("parameters", "flops", "bytes", "latency")
            for which in ("dense", "pruned")
        }
        derived = ("flops_ratio", "latency_ratio", "latency_of_ideal")
        setting = ("device", "dtype", "inputs", "threads", "batch", "length", "rounds", "layers", "layers_dense")
        return {
            "heads_total": self.heads_total,
            "heads_kept": self.heads_kept,
            **pairs,
            **{name: getattr(self, name) for name in (*derived, *setting)},
        }

    def _rows(self) -> list[list]:
        """Rows of the table: name, dense, pruned and ratio."""
        rows = [
            ["heads", f"{self.heads_total:,}   ", f"{self.heads_kept:,}   ", self.heads_kept / self.heads_total],
            _row("parameters", self.parameters_dense, self.parameters_pruned, 1e6, "M "),
            _row("FLOPs", self.flops_dense, self.flops_pruned, 1e9, "G "),
            _row("weights", self.bytes_dense, self.bytes_pruned, 1e6, "MB"),
        ]
        if self.latency_dense is not None:
            rows.append(_row("latency", self.latency_dense, self.latency_pruned, 1e-3, "ms"))
        return rows

    def _repr_html_(self) -> str:
        """The table, and the heads kept in each layer, for notebooks."""
        metrics = [[name, dense.strip(), pruned.strip(), ratio] for name, dense, pruned, ratio in self._rows()]
        caption = f"Pruned beside dense model: {self.inputs}, {self.dtype}, {self.device}"
        of_layers = [
            [kind, layer, kept, built]
            for kind, heads in self.layers.items()
            for layer, (kept, built) in enumerate(zip(heads, self.layers_dense[kind]))
        ]
        return html_table(["", "dense", "pruned", "ratio"], metrics, caption) + html_table(
            ["site", "layer", "heads kept", "of"], of_layers, "Heads kept in each layer"
        )

    def plot(self, path: str | Path | None = None, title: str = "") -> "Figure":
        """Draws the number of heads that each layer keeps.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
        """
        from ..plots.base import plot_heads_per_layer

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
                f"Speed-up {1 / self.latency_ratio:.2f} ×; the removed FLOPs allow {1 / self.flops_ratio:.2f} × "
                f"({100 * self.latency_of_ideal:.0f} % of it reached)."
            )
        timing = f", median of {self.rounds} interleaved rounds" if self.rounds else ""
        threads = f", {self.threads} thread{'s' * (self.threads != 1)}" if not self.device.startswith("cuda") else ""
        lines += [f"{self.inputs}, {self.dtype}, {self.device}{threads}{timing}.", "", "Heads kept in each layer:"]
        for kind, kept in self.layers.items():
            built = self.layers_dense[kind]
            cells = " ".join(f"{count or '·':>{len(str(max(built)))}}" for count in kept)
            lines.append(f"  {kind:<8} {cells}   = {sum(kept)} of {sum(built)}")
        return "\n".join(lines)


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
) -> HeadReport:
    """Compares heads, parameters, FLOPs, bytes and latency of a pruned model with its dense model.

    Both models run on the same random input in evaluation and inference mode. Latencies are medians over rounds in
    which the models alternate, so that both see the same load of the machine. PyTorch counts FLOPs with attention as
    matrix products, since it does not count its fused kernels on all devices; masked scores count.

    Args:
        model (`PreTrainedModel`): The pruned model; it is not changed.
        batch (`int`, *optional*): Number of sentences, images or recordings; 8 by default.
        length (`int`, *optional*): Tokens per sentence, in encoder and decoder; 128 by default, or the number of the
            model's positions. Not for images.
        device (`str` or `torch.device`, *optional*): Device to run on; the device of the model by default.
        rounds (`int`): Number of timed rounds.
        dense (`PreTrainedModel`, *optional*): The dense model, which may have been pruned before. By default, a model
            of the same class with random weights, built from the configuration without `pruned_heads`.
        threads (`int`, *optional*): Number of CPU threads; PyTorch's current number by default.
        latency (`bool`): Whether to measure latency.
        inputs (`dict[str, torch.Tensor]`, *optional*): Inputs of both models, in place of `batch` and `length`.

    Returns:
        [`HeadReport`]

    Raises:
        ValueError: if a number is not positive, `length` exceeds the model's positions, `inputs` is needed for this
            kind of model, a model is quantized, or `dense` has other layers or lacks heads of the model.

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
    given = {"batch": batch, "length": length, "rounds": rounds, "threads": threads}
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be an integer greater than 0, got {value!r}.")
    if inputs is not None and (batch is not None or length is not None):
        raise ValueError("inputs already determine batch and length: leave out batch and length, or inputs.")
    if device is not None and getattr(model, "hf_device_map", None):
        raise ValueError(f"device={str(device)!r}: a model with a device map cannot be moved; leave device out.")
    for name, each in (("model", model), ("dense", dense)):
        if each is not None:
            _check_weights(name, each)
    layers = locate_heads(model)
    inputs = _example_inputs(model, batch or 8, length) if inputs is None else inputs
    dense = _built_anew(model) if dense is None else dense
    layers_of_dense = {layer.site: layer for layer in locate_heads(dense)}
    kept, before = _heads_by_kind(layers), _heads_by_kind(layers_of_dense.values())
    if layers_of_dense.keys() != {layer.site for layer in layers} or any(
        layer.num_heads != layers_of_dense[layer.site].num_heads
        or not set(layer.heads) <= set(layers_of_dense[layer.site].heads)
        for layer in layers
    ):
        raise ValueError(
            f"dense has the heads {before}, which do not include all heads of the model, {kept}; give the model that "
            "was pruned."
        )

    device = torch.device(model.device if device is None else device)
    with _threads(threads), _at(device, model, dense):
        threads = torch.get_num_threads()
        inputs = {
            name: value.to(device, model.dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
        }
        with torch.inference_mode():
            flops = [_flops(each, inputs) for each in (dense, model)]
            readers = [evaluation_view(each).root for each in (dense, model)]
            times = _interleaved(readers, inputs, rounds, device) if latency else (None, None)

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
        device=_device_name(device),
        dtype=str(model.dtype).removeprefix("torch."),
        inputs=", ".join(f"{name} {' × '.join(map(str, value.shape))}" for name, value in inputs.items()),
        threads=threads,
        batch=len(first),
        length=None if tokens is None else tokens.shape[1],
        rounds=rounds if latency else 0,
    )


def _heads_by_kind(layers: Iterable[HeadLayer]) -> dict[str, list[int]]:
    ordered = sorted(layers, key=lambda layer: layer.site.layer)
    found = {kind: [len(layer.heads) for layer in ordered if layer.site.kind == kind] for kind in SITE_KINDS}
    return {kind: counts for kind, counts in found.items() if counts}


def _built_anew(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with all heads and random weights; the global random state is not changed."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}, which cannot be built with all its heads; pass the model inside "
            "(model.merge_and_unload() of adapters), or pass the dense model as dense."
        )
    config = copy.deepcopy(model.config)
    config.pruned_heads = None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return build_from_config(type(model), config, model.dtype)


def _example_inputs(model: PreTrainedModel, batch: int, length: int | None) -> dict[str, torch.Tensor]:
    """Random inputs for text, image and speech models, on the CPU."""
    config, name = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(0)
    arguments = inspect.signature(model.forward).parameters
    inputs = {}
    if name == "pixel_values" and hasattr(config, "image_size"):
        if length is not None:
            raise ValueError(
                f"length={length}: {type(model).__name__} reads images of a fixed size; leave length out."
            )
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs[name] = torch.randn(batch, config.num_channels, height, width, generator=generator)
    elif name == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        # Its convolutions halve the number of frames.
        shape = batch, config.num_mel_bins, 2 * config.max_source_positions
        inputs[name] = torch.randn(shape, generator=generator)
    elif name == "input_ids" and not hasattr(config, "vision_config"):
        length = _checked_length(model, length)
        inputs[name] = _random_ids(model, batch, length, generator)
        if "attention_mask" in arguments:
            inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
    else:
        raise ValueError(
            f"cannot make inputs for {type(model).__name__}, which reads {name!r}; pass inputs={{{name!r}: …}}."
        )
    if "decoder_input_ids" in arguments:
        length = _checked_length(model, length)
        inputs["decoder_input_ids"] = _random_ids(model, batch, length, generator)
    return inputs


def _checked_length(model: PreTrainedModel, length: int | None) -> int:
    longest = longest_input(model)
    if length is None:
        return 128 if longest is None else min(128, longest)
    if longest is not None and length > longest:
        raise ValueError(f"length is {length}, but {type(model).__name__} has positions for {longest} tokens.")
    return length


def _random_ids(model: PreTrainedModel, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random token ids without padding; the last one is the end of sentence, which some classification heads need."""
    config = model.config
    end = getattr(config, "eos_token_id", None)
    vocabulary = min(
        model.get_input_embeddings().num_embeddings,
        getattr(config, "decoder_vocab_size", None) or math.inf,
    )
    every = range(vocabulary)
    ordinary = torch.tensor([token for token in every if token not in (config.pad_token_id, end)] or list(every))
    ids = ordinary[torch.randint(len(ordinary), (batch, length), generator=generator)]
    # Small configurations keep the EOS token of the full vocabulary, which may be out of range.
    if end in every:
        ids[:, -1] = end
    return ids


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


def _check_weights(name: str, model: PreTrainedModel) -> None:
    """Checks that weights are not quantized: their parameters and operations cannot be counted."""
    packed = [key for key, value in model.state_dict().items() if not torch.is_tensor(value)]
    if packed or getattr(model, "is_quantized", False):
        raise ValueError(
            f"{name} is a quantized {type(model).__name__}{f' ({packed[0]})' if packed else ''}, whose parameters and "
            "operations cannot be counted; pass the model before quantization."
        )


def _flops(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> int:
    """FLOPs of one forward pass, with attention as matrix products: the counter misses fused kernels on CPUs."""
    view = evaluation_view(model)
    view.name_attention(model, lambda part, before: before if before in ("eager", "sdpa") else "eager")
    # The counter keeps references to tensors that require gradients.
    view.detach_parameters()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        view.root(**inputs)
    return counter.get_total_flops()


def _interleaved(
    models: list[PreTrainedModel], inputs: dict[str, torch.Tensor], rounds: int, device: torch.device
) -> list[float]:
    """Median seconds of a forward pass of each model; the models alternate, and so does the first of a round."""
    for model in models * WARM_UP:
        model(**inputs)
    times: dict[int, list[float]] = {which: [] for which in range(len(models))}
    for turn in range(rounds):
        for which in sorted(times, reverse=bool(turn % 2)):
            _synchronize(device)
            start = time.perf_counter()
            models[which](**inputs)
            _synchronize(device)
            times[which].append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times.values()]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


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


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    if device.type != "cpu":
        return device.type
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = (line.partition(":") for line in information.read_text(encoding="utf-8").splitlines())
        name = next((value.strip() for key, _, value in lines if key.strip() == "model name"), name)
    return f"cpu ({name})"
