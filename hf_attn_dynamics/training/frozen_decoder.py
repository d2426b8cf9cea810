# Licensed under the Apache License, Version 2.0.
"""Training the encoder of an encoder–decoder alone."""

from torch import nn

from .training_hooks import TrainingHooksMixin


class FrozenDecoderMixin(TrainingHooksMixin):
    """A trainer with `args.freeze_decoder`, whose decoder requires no gradients while it trains.

    Raises:
        ValueError: if it is given, and the model has no decoder beside an encoder.
    """

    reads = ("freeze_decoder",)

    def __init__(self, *args, **kwargs):
        self._freezes_decoder = False
        self._frozen: set[str] = set()  # by name, since tensors of pruned layers are others
        super().__init__(*args, **kwargs)

    def _read_arguments(self) -> None:
        super()._read_arguments()
        self._freezes_decoder = self._is_to_freeze()

    def _is_to_freeze(self) -> bool:
        frozen, config = self._argument("freeze_decoder"), self._plain_model.config
        is_seq2seq = getattr(config, "is_encoder_decoder", False)
        if frozen and not is_seq2seq:
            name = type(self._plain_model).__name__
            raise ValueError(f"freeze_decoder=True, but {name} has no decoder beside an encoder.")
        if frozen is None:
            is_priced = self._argument("target_heads") is not None or self._argument("gate_penalty") > 0
            is_gated = hasattr(config, "gate_settings")
            return is_seq2seq and is_priced and is_gated and set(config.gate_settings()) == {"encoder"}
        return frozen

    def _prepare_training(self) -> None:
        frozen = self._decoder_parameters() if self._freezes_decoder else {}
        self._frozen = set(frozen)
        for parameter in frozen.values():
            parameter.requires_grad_(False)
        super()._prepare_training()

    def train(self, *args, **kwargs):
        """The stock method; a decoder that is frozen requires gradients again afterwards."""
        try:
            return super().train(*args, **kwargs)
        finally:
            for name, parameter in self._all_parameters():
                if name in self._frozen:
                    parameter.requires_grad_(True)
            self._frozen = set()

    def _all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters by name, those that have several by each of them."""
        return list(self._plain_model.named_parameters(remove_duplicate=False))

    def _decoder_parameters(self) -> dict[str, nn.Parameter]:
        """All that the encoder does not own alone: embeddings that it shares with the decoder stay as they are."""
        model = self._plain_model
        encoder = next(name for name, module in model.named_modules() if module is model.get_encoder())
        named = self._all_parameters()
        return {name: p for name, p in named if not name.startswith(f"{encoder}.") and p.requires_grad}
