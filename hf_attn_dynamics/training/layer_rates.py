# Licensed under the Apache License, Version 2.0.
"""Layer-wise learning rate decay (Howard & Ruder 2018; Clark et al. 2020)."""

import re
from collections import Counter

from torch import nn
from torch.optim import Optimizer

from .training_hooks import TrainingHooksMixin


def layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Factor of the learning rate of each parameter.

    It is 1 for the last of n layers and the task head, `decay` for the layer below, and so on down to `decay ** n` for
    the embeddings.

    Args:
        model (`nn.Module`): A model with one stack of numbered layers.
        decay (`float`): Factor from each layer to the one below, above 0 and at most 1.

    Returns:
        `dict[str, float]`: by the names of `model.named_parameters()`.

    Raises:
        ValueError: if the model does not have exactly one stack of layers.

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
    # Modules of a task head may be numbered, too, but are fewer.
    if stack is None or 2 * next_most > most:
        found = "several stacks" if stacks else "no stack"
        raise ValueError(
            f"layer_rate_decay needs one stack of layers, but {type(model).__name__} has {found}; set it to 1."
        )
    layers = {name: int(match[2]) for name, match in numbered.items() if match[1] == stack}
    last = max(layers.values())
    factors, below = {}, -1
    for name in names:
        # Parameters after the layers have the factor of the last layer.
        layer = layers.get(name, below)
        below = last if name in layers else below
        factors[name] = float(decay ** (last - layer))
    return factors


def spread_rates(optimizer: Optimizer, model: nn.Module, decay: float) -> None:
    """Splits the parameter groups of an optimizer by [`layer_factors`].

    Args:
        optimizer (`Optimizer`): Before its first step and its schedule; changed in place.
        model, decay: See [`layer_factors`].
    """
    factors = layer_factors(model, decay)
    factor_of = {id(parameter): factors[name] for name, parameter in model.named_parameters()}
    for group in list(optimizer.param_groups):
        parts: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(factor_of[id(parameter)], []).append(parameter)
        group["params"] = parts.pop(1.0, [])
        settings = {name: value for name, value in group.items() if name != "params"}
        for factor, parameters in sorted(parts.items(), reverse=True):
            optimizer.add_param_group({**settings, "params": parameters, "lr": group["lr"] * factor})


class LayerRatesMixin(TrainingHooksMixin):
    """A trainer with `args.layer_rate_decay`, the factor of the learning rate from each layer to the one below.

    Raises:
        ValueError: if the factor is set and the model does not have exactly one stack of layers; while training, if an
            optimizer was passed to the trainer, too.
    """

    reads = ("layer_rate_decay",)

    def _read_arguments(self) -> None:
        super()._read_arguments()
        if (decay := self._argument("layer_rate_decay")) != 1:
            layer_factors(self._plain_model, decay)

    def create_optimizer(self, *args, **kwargs):
        """The stock optimizer, with layer-wise rates if `layer_rate_decay` is set."""
        decay, is_new = self._argument("layer_rate_decay"), self.optimizer is None
        if decay != 1 and not is_new and not self._is_optimizer_own:
            raise ValueError(
                f"layer_rate_decay={decay} has no effect on the optimizer that was passed to the trainer; set it to 1."
            )
        optimizer = super().create_optimizer(*args, **kwargs)
        if decay != 1 and is_new:
            spread_rates(optimizer, self._plain_model, decay)
        return optimizer
