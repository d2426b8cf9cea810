# Licensed under the Apache License, Version 2.0.
"""Training of an encoder–decoder with a frozen decoder."""

from torch import nn

from .training_hooks import TrainingHooksMixin


class FrozenDecoderMixin(TrainingHooksMixin):
    """A trainer with `args.freeze_decoder`, which freezes the decoder during training.

    Raises:
        ValueError: if `freeze_decoder` is set and the model is not an encoder–decoder.
    """

    reads = ("freeze_decoder",)

    def __init__(self, *args, **kwargs):
        self._freezes_decoder = False
        self._frozen: set[str] = set()  # names, since pruning replaces tensors
        super().__init__(*args, **kwargs)

    def _read_arguments(self) -> None:
        super()._read_arguments()
        self._freezes_decoder = self._is_to_freeze()

    def _is_to_freeze(self) -> bool:
        frozen, config = self._argument("freeze_decoder"), self._plain_model.config
        is_seq2seq = getattr(config, "is_encoder_decoder", False)
        if frozen and not is_seq2seq:
            name = type(self._plain_model).__name__
            raise ValueError(f"freeze_decoder=True needs an encoder–decoder, got {name}.")
        if frozen is None:
            targets = ("target_heads", "target_speedup", "target_flops")
            is_penalised = (
                any(self._argument(one) is not None for one in targets) or self._argument("gate_penalty") > 0
            )
            is_gated = hasattr(config, "gate_settings")
            return is_seq2seq and is_penalised and is_gated and set(config.gate_settings()) == {"encoder"}
        return frozen

    def _prepare_training(self) -> None:
        frozen = self._decoder_parameters() if self._freezes_decoder else {}
        self._frozen = set(frozen)
        for parameter in frozen.values():
            parameter.requires_grad_(False)
        super()._prepare_training()

    def train(self, *args, **kwargs):
        """The stock method; unfreezes the decoder afterwards."""
        try:
            return super().train(*args, **kwargs)
        finally:
            for name, parameter in self._all_parameters():
                if name in self._frozen:
                    parameter.requires_grad_(True)
            self._frozen = set()

    def _all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters by name, tied ones by each of their names."""
        return list(self._plain_model.named_parameters(remove_duplicate=False))

    def _decoder_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters of the decoder, including those that it shares with the encoder."""
        model = self._plain_model
        encoder = next(name for name, module in model.named_modules() if module is model.get_encoder())
        named = self._all_parameters()
        return {name: p for name, p in named if not name.startswith(f"{encoder}.") and p.requires_grad}
