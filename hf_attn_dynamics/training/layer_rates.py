# Licensed under the Apache License, Version 2.0.
"""Learning rates that fall from the last layer of a model to the first (Howard & Ruder 2018; Clark et al. 2020)."""

import re
from collections import Counter

from torch import nn
from torch.optim import Optimizer

from .training_hooks import TrainingHooksMixin


def layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Factor of the learning rate of each parameter.

    It is 1 for the last of n layers and for what comes after it, `decay` for the one before, and so on down to
    `decay ** n` for what comes before the first, the embeddings.

    Args:
        model (`nn.Module`): A model with one stack of layers, whose names differ by their numbers.
        decay (`float`): Factor from one layer to the one before, above 0 and at most 1.

    Returns:
        `dict[str, float]`: by the names of `model.named_parameters()`.

    Raises:
        ValueError: if the model has no stack of layers, or several.

    Example:
        >>> from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertForSequenceClassification
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
        >>> factors = layer_factors(HeadwiseBertForSequenceClassification(HeadwiseBertConfig(**sizes)), 0.5)
        >>> [factors[f"bert.{name}.weight"] for name in ("embeddings.word_embeddings", "pooler.dense")]
        [0.25, 1.0]
        >>> [factors[f"bert.encoder.layer.{number}.output.dense.bias"] for number in range(2)]
        [0.5, 1.0]
    """
    names = [name for name, _ in model.named_parameters()]
    numbered = {name: match for name in names if (match := re.match(r"(.*?)\.(\d+)\.", name))}
    stacks = Counter(match[1] for match in numbered.values())
    (stack, most), (_, next_most) = [*stacks.most_common(2), (None, 0), (None, 0)][:2]
    # A head may be numbered, too, but is smaller.
    if stack is None or 2 * next_most > most:
        found = "several stacks" if stacks else "no stack"
        raise ValueError(
            f"rates fall through one stack of layers, but {type(model).__name__} has {found}; set layer_rate_decay=1."
        )
    layers = {name: int(match[2]) for name, match in numbered.items() if match[1] == stack}
    last = max(layers.values())
    factors, below = {}, -1
    for name in names:
        # What comes after a layer and is of none follows the last one.
        layer = layers.get(name, below)
        below = last if name in layers else below
        factors[name] = float(decay ** (last - layer))
    return factors


def spread_rates(optimizer: Optimizer, model: nn.Module, decay: float) -> None:
    """Gives parameters of an optimizer groups by [`layer_factors`]; the first group keeps the rate of the last layer.

    Args:
        optimizer (`Optimizer`): Before its first step and its schedule; changed in place.
        model, decay: See [`layer_factors`].
    """
    factors = layer_factors(model, decay)
    of = {id(parameter): factors[name] for name, parameter in model.named_parameters()}
    for group in list(optimizer.param_groups):
        parts: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(of[id(parameter)], []).append(parameter)
        group["params"] = parts.pop(1.0, [])
        settings = {name: value for name, value in group.items() if name != "params"}
        for factor, parameters in sorted(parts.items(), reverse=True):
            optimizer.add_param_group({**settings, "params": parameters, "lr": group["lr"] * factor})


class LayerRatesMixin(TrainingHooksMixin):
    """A trainer with `args.layer_rate_decay`, the factor of the learning rate from one layer to the one before.

    Raises:
        ValueError: if the factor is given, and the model has no single stack of layers; while training, if it is, and
            an optimizer, too.
    """

    reads = ("layer_rate_decay",)

    def _read_arguments(self) -> None:
        super()._read_arguments()
        if (decay := self._argument("layer_rate_decay")) != 1:
            layer_factors(self._plain_model, decay)

    def create_optimizer(self, *args, **kwargs):
        """The stock optimizer, with rates by layers if asked for; one that the trainer was given stays as it is."""
        decay, is_new = self._argument("layer_rate_decay"), self.optimizer is None
        if decay != 1 and not is_new and not self._is_optimizer_own:
            raise ValueError(f"layer_rate_decay={decay}, but the trainer was given an optimizer with its own rates.")
        optimizer = super().create_optimizer(*args, **kwargs)
        if decay != 1 and is_new:
            spread_rates(optimizer, self._plain_model, decay)
        return optimizer
