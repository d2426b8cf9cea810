# Licensed under the Apache License, Version 2.0.
"""Cost tables of a model: seconds measured on this machine, or FLOPs."""

import copy
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.constants import HF_HOME
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from ... import __version__
from ..._files import read_json, write_text
from ...models.architecture_sizes import architecture_sizes
from ...models.compat import attention_kernel
from ...models.cost_table import CostTable, Grid
from ...models.device_names import device_name
from ...models.head_roles import locate_heads
from ...models.head_sites import HeadSite, config_value, kinds_of
from ...models.unit_pruning import apply_pruning
from ...models.unit_ranges import units_value
from ...models.unit_roles import prunable_units
from .measuring import (
    Inputs,
    alternating_times,
    built_anew,
    check_buildable,
    check_counts,
    check_phase,
    check_weights,
    checked_decoding,
    checked_length,
    count_flops,
    cpu_threads,
    decoding_inputs,
    example_inputs,
    moved,
)


logger = logging.get_logger(__name__)

NOISE = 0.05  # standard error of a ratio, as a fraction of the dense model, from which on measurements are unreliable

SMALLEST = 32  # this fraction of the units is the smallest number that is measured

# Heads and units left in all layers, by block and kind of site; missing ones are all left.
Left = dict[tuple[str, str], int]


@dataclass(frozen=True)
class _Shape:
    """Numbers of heads and units of a dense model.

    Args:
        full (`dict`): Number of heads or units in each layer, by block and kind of site.
        steps (`dict`): Number of heads of a kind that can only be removed together.
        sites (`dict[str, int]`): Number of attention modules by kind of site.
    """

    full: Left
    steps: Left
    sites: dict[str, int]

    def grid(self, key: tuple[str, str], points: int) -> list[int]:
        """Numbers of heads or units from 0 to all, at about equal distances, and the smallest one.

        A block with a few heads or units costs much more than none: the first point after 0 shows how much.
        """
        full, step = self.full[key], self.steps.get(key, 1)
        numbers = {round(full * index / (points - 1) / step) * step for index in range(points)}
        smallest = step if key in self.steps else max(full // SMALLEST, 1)
        return sorted(numbers | {smallest} if points > 2 else numbers)


def measure_latency_table(
    model: PreTrainedModel,
    batch: int = 8,
    length: int | None = None,
    device: str | torch.device | None = None,
    phase: str = "forward",
    points: int = 5,
    rounds: int = 20,
    threads: int | None = None,
    cache_dir: str | Path | bool | None = None,
    progress: bool = True,
) -> CostTable:
    """Measures how the time of a model depends on its heads and feed-forward units, on this machine.

    Copies of the model in which all layers have lost the same number of heads, or of units, alternate with the dense
    model in the same rounds, so that both see the same load of the machine. An entry of the table is the median over
    rounds of the ratio of both times, multiplied by the median time of the dense model. A block without heads or units
    has cost 0, a block of a kind the difference that its heads or units make to the whole model, divided by the number
    of layers. This difference is the mean of two, since buffers and caches make it larger or smaller beside large
    blocks: one with all heads and units elsewhere, one with none (with two kinds of blocks, the Shapley value).
    Differences that do not add up to the one between the dense model and a model without any block are multiplied by
    the factor with which they do.

    Costs are those that were measured: they need not increase with the number of heads or units. Negative differences,
    which are noise, become 0. A warning says if rounds vary so much that the table is unreliable. Times on other
    devices, of other batch sizes or of other lengths are different.

    Weights do not matter, so all models are built from the configuration with random weights, without gates and
    guidance. A dense model and a copy are in memory at a time.

    Args:
        model (`PreTrainedModel`): The model, of which heads and units may have been removed; it is not changed.
        batch (`int`): Number of sentences, images or recordings.
        length (`int`, *optional*): Tokens per sentence, in encoder and decoder; 128 by default, or the number of the
            model's positions. Not for images. With `phase="decode"`, number of tokens in the cache.
        device (`str` or `torch.device`, *optional*): Device to measure on; the device of the model by default.
        phase (`str`): `forward` measures a forward pass on whole sentences, `decode` a forward pass on one token with
            a cache of `length` tokens, of a decoder or an encoder–decoder; the encoder then costs nothing.
        points (`int`): Number of grid points of each kind of block at equal distances, 0 and all included. From 3 on,
            the smallest block is measured as well: one head, or one group, and 1/32 of the units.
        rounds (`int`): Number of timed rounds of each copy.
        threads (`int`, *optional*): Number of CPU threads; PyTorch's current number by default.
        cache_dir (`str`, `Path` or `False`, *optional*): Folder of measured tables; `hf_attn_dynamics/latency` in the
            cache of the Hugging Face Hub by default, `False` for none. A stored table is returned if the sizes of the
            model, the device, all arguments and the versions of PyTorch, Transformers and this package agree.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        [`CostTable`]

    Raises:
        ValueError: if an argument is out of range, `length` exceeds the model's positions, the model is quantized, on
            several devices, or has no cache for `phase="decode"`, or its layers have different numbers of heads.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> table = measure_latency_table(BertModel(config), 1, 8, points=2, rounds=1, cache_dir=False, progress=False)
        >>> [heads for heads, seconds in table.attention["encoder"]]
        [0, 4]
    """
    check_counts(batch=batch, length=length, points=points, rounds=rounds, threads=threads)
    if points < 2:
        raise ValueError(f"points must be at least 2, for none and all, got {points}.")
    length = _checked(model, length, phase)
    if getattr(model, "hf_device_map", None):
        raise ValueError("a model with a device map is on several devices, or offloaded: load it on one device.")
    device = torch.device(model.device if device is None else device)
    with cpu_threads(threads):
        setting = {
            "device": device_name(device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "batch": batch,
            "length": length,
            "phase": phase,
            "fingerprint": architecture_sizes(model),
            "kernel": attention_kernel(model.config) or "",
        }
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "package": __version__}
        key = {**setting, **versions, "points": points, "rounds": rounds}
        file = _cache_file(key, cache_dir)
        if (cached := _cached(file, key)) is not None:
            return cached
        table = _measured(model, setting, points, rounds, device, progress)
    if file is not None:
        try:
            write_text(file, json.dumps({"key": key, "table": table.to_dict()}, indent=1) + "\n")
        except OSError as error:
            logger.warning(f"The table was not kept: {error}. Choose a writable cache_dir, or False for none.")
    return table


def count_flops_table(
    model: PreTrainedModel, batch: int = 1, length: int | None = None, phase: str = "forward"
) -> CostTable:
    """Counts how the FLOPs of a model depend on its heads and feed-forward units.

    FLOPs are those of [`head_report`] and linear in the number of heads and units, so that the FLOPs of a pruned model
    are exact if all layers of a kind have the same FLOPs. The model is counted on the meta device, without memory, if
    its forward pass does not depend on values.

    Args:
        model (`PreTrainedModel`): The model, of which heads and units may have been removed; it is not changed.
        batch, length, phase: See [`measure_latency_table`].

    Returns:
        [`CostTable`]

    Raises:
        ValueError: for the reasons given in [`measure_latency_table`].

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> print(count_flops_table(BertModel(config), batch=64, length=32))
        |             | GFLOPs | % of dense | largest speed-up |
        |-------------|--------|------------|------------------|
        | all heads   |  0.017 |       66.6 |           2.99 × |
        | all units   |  0.008 |       33.3 |           1.50 × |
        | all blocks  |  0.025 |       99.9 |         769.00 × |
        | the rest    |  0.000 |        0.1 |                  |
        | dense model |  0.025 |      100.0 |                  |
        <BLANKLINE>
        BertModel, batch of 64 × 32 tokens.
    """
    check_counts(batch=batch, length=length)
    length = _checked(model, length, phase)
    setting = {"batch": batch, "length": length, "phase": phase, "fingerprint": architecture_sizes(model)}
    try:
        return _counted(model, setting, torch.device("meta"))
    except RuntimeError:
        # Some forward passes read values, such as the positions of an end-of-sentence token.
        return _counted(model, setting, torch.device("cpu"))


def _checked(model: PreTrainedModel, length: int | None, phase: str) -> int | None:
    """Checks arguments before any work; returns the number of tokens, `None` for images."""
    check_phase(phase)
    check_buildable(model)
    check_weights("model", model)
    _shape_of(model)
    if phase == "decode":
        return checked_decoding(model, length)
    inputs = example_inputs(model, 1, length)
    is_text = {"input_ids", "decoder_input_ids"} & inputs.keys()
    return checked_length(model, length) if is_text else None


def _shape_of(model: PreTrainedModel) -> _Shape:
    """Numbers of heads and units of the dense model.

    Raises:
        ValueError: if they differ between the layers of a kind.
    """
    heads = locate_heads(model)
    units = prunable_units(model)
    full: Left = {}
    numbers = [("attention", layer.site.kind, layer.num_heads) for layer in heads]
    numbers += [("feed_forward", layer.site.kind, layer.num_units) for layer in units]
    for block, kind, number in numbers:
        if full.setdefault((block, kind), number) != number:
            raise ValueError(
                f"{type(model).__name__}: the {kind} layers have {full[block, kind]} or {number} "
                f"{'heads' if block == 'attention' else 'units'}; cost tables need the same number in all layers."
            )
    kinds = kinds_of({layer.site: layer for layer in heads})
    sites = {kind: sum(layer.site.kind == kind for layer in heads) for kind in kinds}
    return _Shape(full, {("attention", layer.site.kind): layer.group_size for layer in heads}, sites)


def _dense(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The dense model with random weights, in evaluation mode, without gates and guidance."""
    built = built_anew(model, "meta" if device.type == "meta" else "cpu", gates=None, guidance=None)
    return built.to(device).eval()


def _pruned(dense: PreTrainedModel, shape: _Shape, left: Left) -> PreTrainedModel:
    """A copy of the dense model with numbers of heads and units left in all layers."""
    pruned = copy.deepcopy(dense)

    def removed(block: str) -> dict[HeadSite, list[int]]:
        return {
            HeadSite(kind, layer): [*range(left[block, kind], shape.full[block, kind])]
            for kind, layers in shape.sites.items()
            for layer in range(layers)
            if (block, kind) in left and left[block, kind] < shape.full[block, kind]
        }

    pruned.config.pruned_heads = config_value(removed("attention"), [*shape.sites])
    pruned.config.pruned_units = units_value(
        removed("feed_forward"), [kind for kind in shape.sites if kind != "cross"]
    )
    apply_pruning(pruned)
    return pruned.eval()


def _maker_of_inputs(model: PreTrainedModel, inputs: Inputs, phase: str) -> Callable[[], Inputs]:
    return decoding_inputs(model, inputs) if phase == "decode" else lambda: inputs


def _inputs(model: PreTrainedModel, setting: Mapping[str, Any], device: torch.device) -> Inputs:
    """Example inputs; the decoder's have one more token, which is decoded, if the cache holds the others."""
    length = setting["length"]
    inputs = example_inputs(model, setting["batch"], length if setting["phase"] == "forward" else length + 1)
    if setting["phase"] == "decode" and "decoder_input_ids" in inputs:
        texts = {"input_ids", "attention_mask"} & inputs.keys()
        inputs |= {name: inputs[name][:, :length] for name in texts}
    if device.type == "meta":
        # Masks without padding are skipped, which depends on their values.
        inputs.pop("attention_mask", None)
    return moved(inputs, device, model.dtype)


def _measured(
    model: PreTrainedModel,
    setting: Mapping[str, Any],
    points: int,
    rounds: int,
    device: torch.device,
    progress: bool,
) -> CostTable:
    dense = _dense(model, device)
    shape = _shape_of(dense)
    grids = {key: shape.grid(key, points) for key in shape.full}
    if setting["phase"] == "decode":
        grids = {key: grid for key, grid in grids.items() if key[1] != "encoder"}
    ratios, errors, seconds_of_dense = {frozenset(shape.full.items()): 1.0}, [], []
    with torch.inference_mode():
        inputs = _inputs(dense, setting, device)
        make_dense = _maker_of_inputs(dense, inputs, setting["phase"])
        for left in tqdm(_copies(shape, grids), desc="Measuring", disable=not progress):
            pruned = _pruned(dense, shape, left)
            makers = [make_dense, _maker_of_inputs(pruned, inputs, setting["phase"])]
            before, after = alternating_times([dense, pruned], makers, rounds, device)
            ratios[frozenset(left.items())], error = _ratio(after, before)
            errors.append(error)
            seconds_of_dense += before
            # Before the next copy is made.
            del pruned, makers
    if max(errors) > NOISE:
        logger.warning(
            f"The measured times vary: the standard error of an entry is up to {100 * max(errors):.0f} % of the dense "
            f"model's time. Measure more than {rounds} rounds, or on a machine that runs nothing else."
        )
    fractions, rest = _fractions(lambda left: ratios[frozenset(left.items())], grids, shape)
    seconds = statistics.median(seconds_of_dense)
    # The encoder does not run while tokens are decoded.
    blocks = {key: [[0, 0.0], [full, 0.0]] for key, full in shape.full.items()}
    for key, costs in fractions.items():
        blocks[key] = [[left, seconds * cost] for left, cost in zip(grids[key], costs)]
    return _arranged("seconds", seconds * rest, blocks, shape, setting)


def _ratio(times: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Median over rounds of the ratio of two times, and its standard error, from the median absolute deviation."""
    ratios = [one / other for one, other in zip(times, others)]
    ratio = statistics.median(ratios)
    deviation = statistics.median(abs(one - ratio) for one in ratios)
    # Factors of normally distributed ratios: 1.48 for the deviation, 1.25 for the error of a median.
    return ratio, 1.86 * deviation / math.sqrt(len(ratios))


def _contexts(shape: _Shape) -> tuple[Left, Left]:
    """All other blocks of a copy: complete ones, and ones without heads and units."""
    return shape.full, dict.fromkeys(shape.full, 0)


def _copies(shape: _Shape, grids: Mapping[tuple[str, str], list[int]]) -> list[Left]:
    """Numbers of heads and units of the copies to measure: those of a grid in both contexts, each copy once."""
    every = [{**others, key: left} for others in _contexts(shape) for key, grid in grids.items() for left in grid]
    return [left for index, left in enumerate(every) if left != shape.full and left not in every[:index]]


def _fractions(
    ratio: Callable[[Left], float], grids: Mapping[tuple[str, str], list[int]], shape: _Shape
) -> tuple[dict[tuple[str, str], list[float]], float]:
    """Costs of single blocks and the rest as fractions of the dense model.

    Args:
        ratio (callable): Returns the time of a copy over the time of the dense model.
        grids (`dict`): Numbers of heads or units by block and kind of site.
        shape (`_Shape`): Numbers of the dense model.

    Returns:
        Costs of a single block at the points of each grid, and of the rest.
    """
    contexts = _contexts(shape)
    gains = {}
    for key, grid in grids.items():
        own = [sum(ratio({**others, key: left}) for others in contexts) / len(contexts) for left in grid]
        gains[key] = [max(mean - own[0], 0.0) for mean in own]
    total, rest = sum(own[-1] for own in gains.values()), min(ratio(contexts[1]), 1.0)
    if not total:
        return {key: [0.0] * len(own) for key, own in gains.items()}, 1.0
    factor = (1 - rest) / total
    return {key: [factor * gain / shape.sites[key[1]] for gain in own] for key, own in gains.items()}, rest


def _counted(model: PreTrainedModel, setting: Mapping[str, Any], device: torch.device) -> CostTable:
    dense = _dense(model, device)
    shape = _shape_of(dense)
    grids = {key: [0, full] for key, full in shape.full.items()}

    def flops_of(one: PreTrainedModel) -> int:
        return count_flops(one, _maker_of_inputs(one, inputs, setting["phase"])())

    with torch.inference_mode():
        inputs = _inputs(dense, setting, device)
        of_dense = flops_of(dense)
        removed = {key: of_dense - flops_of(_pruned(dense, shape, {key: 0})) for key in grids}
    blocks = {key: [[0, 0], [grids[key][-1], _divided(removed[key], shape.sites[key[1]])]] for key in grids}
    return _arranged("flops", of_dense - sum(removed.values()), blocks, shape, setting)


def _divided(total: int, layers: int) -> float:
    """An integer if all layers are the same."""
    return total // layers if total % layers == 0 else total / layers


def _arranged(
    quantity: str, rest: float, blocks: Mapping[tuple[str, str], Grid], shape: _Shape, setting: Mapping[str, Any]
) -> CostTable:
    parts = {
        part: {kind: blocks[part, kind] for kind in shape.sites if (part, kind) in blocks}
        for part in ("attention", "feed_forward")
    }
    return CostTable(quantity, rest, parts["attention"], parts["feed_forward"], dict(shape.sites), **setting)


def _cache_file(key: Mapping[str, Any], cache_dir: str | Path | bool | None) -> Path | None:
    """File of a measured table, named after everything that a measurement depends on."""
    if cache_dir is False:
        return None
    if cache_dir is True:
        raise ValueError("cache_dir must be a folder, None for the default one, or False for none, got True.")
    folder = Path(HF_HOME) / "hf_attn_dynamics" / "latency" if cache_dir is None else Path(cache_dir)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{key['fingerprint']['class']}-{digest[:24]}.json"


def _cached(file: Path | None, key: Mapping[str, Any]) -> CostTable | None:
    """A table that was measured before, unless a part of the key differs or the file is damaged."""
    if file is None or not file.is_file():
        return None
    try:
        stored = read_json(file)
        return CostTable.from_dict(stored["table"]) if stored["key"] == json.loads(json.dumps(key)) else None
    except (ValueError, TypeError, KeyError):
        return None
