# Licensed under the Apache License, Version 2.0.
"""Trainers of headwise models, and of other models with weight averaging, exact resumption and pruning."""

from typing import Any

from transformers import PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from ..models.compat import generation_arguments, prepared_batch
from .finite_loss import FiniteLossMixin
from .frozen_decoder import FrozenDecoderMixin
from .head_loss import INITIAL_WEIGHT_KEY
from .head_training import HeadwiseTrainerMixin
from .label_watch import UNLABELLED_STEPS
from .layer_rates import LayerRatesMixin
from .resumed_training import EPOCH_RNG_STATE
from .sharding import ShardedEmbeddingsMixin
from .trainer_checks import check_trainer_arguments
from .weight_average import WeightAverageMixin


__all__ = [
    "EPOCH_RNG_STATE",
    "HeadwiseSeq2SeqTrainer",
    "HeadwiseTrainer",
    "HeadwiseTrainerMixin",
    "INITIAL_WEIGHT_KEY",
    "UNLABELLED_STEPS",
    "check_trainer_arguments",
]


class HeadwiseTrainer(
    HeadwiseTrainerMixin,
    FiniteLossMixin,
    WeightAverageMixin,
    LayerRatesMixin,
    FrozenDecoderMixin,
    ShardedEmbeddingsMixin,
    Trainer,
):
    """A `Trainer` that adds the guidance loss and the gate penalty, with exact gradients under accumulation.

    See [`HeadwiseTrainerMixin`], which can also be combined with other trainers. This class reads all arguments of
    [`HeadwiseTrainingArguments`]: `ema_decay` ([`WeightAverageMixin`]), `layer_rate_decay` ([`LayerRatesMixin`]) and
    `freeze_decoder` ([`FrozenDecoderMixin`]). Training stops at a NaN loss and saves that batch
    ([`FiniteLossMixin`]). Models that are not headwise are trained as by the stock Trainer.

    Plain `TrainingArguments` get the defaults of [`HeadwiseTrainingArguments`]: a model with guidance is guided, and
    gates are not penalised.
    """


class HeadwiseSeq2SeqTrainer(HeadwiseTrainer, Seq2SeqTrainer):
    """[`HeadwiseTrainer`] for encoder–decoders, with evaluation by generation as in `Seq2SeqTrainer`.

    Raises:
        TypeError: if its arguments are not `Seq2SeqTrainingArguments`.
    """

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        args: Seq2SeqTrainingArguments | None = None,
        *rest: Any,
        **kwargs: Any,
    ):
        if not isinstance(args, Seq2SeqTrainingArguments):
            raise TypeError(
                f"{type(self).__name__} needs args of HeadwiseSeq2SeqTrainingArguments or Seq2SeqTrainingArguments, "
                f"got {type(args).__name__}."
            )
        super().__init__(model, args, *rest, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        """The loop of [`HeadwiseTrainer`], without the duplicate sentences that fill the last batch of a process.

        With `num_return_sequences` above 1 they are kept, as by the stock loop, since only as many sequences as
        sentences of the last batch would remain otherwise.
        """
        given = generation_arguments(self).get("num_return_sequences")
        default = getattr(getattr(self.model, "generation_config", None), "num_return_sequences", None)
        if not self.args.predict_with_generate or (given or default or 1) == 1:
            self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        """The stock step, with the loss averaged over labels also under `predict_with_generate`."""
        step = Seq2SeqTrainer.prediction_step
        if not self.args.predict_with_generate or prediction_loss_only:
            return step(self, model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        # Generation does not take the targets of guided heads.
        columns = {name: inputs[name] for name in getattr(self.model, "target_columns", ()) if name in inputs}
        inputs = {name: value for name, value in inputs.items() if name not in columns}
        if self._evaluation is None:
            return step(self, model, inputs, False, ignore_keys, **gen_kwargs)
        losses = []

        def forward(**batch):
            """Replaces the model in the stock step, which calls it for the loss after generation."""
            _, num_items = Trainer.get_batch_samples(self, iter([batch]), 1, self.args.device)
            if columns:
                batch |= prepared_batch(self, columns)
            loss, outputs = self.compute_loss(model, batch, return_outputs=True, num_items_in_batch=num_items)
            losses.append(loss.detach().mean())
            return {**outputs, "loss": loss}

        _, generated, labels = step(self, forward, inputs, False, ignore_keys, **gen_kwargs)
        return (losses[0] if losses else None), generated, labels
