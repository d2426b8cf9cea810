# Licensed under the Apache License, Version 2.0.
"""Trainers of headwise models, and of any other model that is averaged, resumed or pruned while it trains."""

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from ..models.compat import generation_arguments
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
    """`Trainer` for headwise models: adds what heads cost, and makes gradients exact under accumulation.

    How heads are trained says [`HeadwiseTrainerMixin`], which goes before other trainers as well. All arguments of
    [`HeadwiseTrainingArguments`] are read here: with `ema_decay` the model that is evaluated, saved and returned has
    the moving average of the weights, see [`WeightAverageMixin`]; learning rates may fall by layers, see
    [`LayerRatesMixin`], and the decoder may be frozen, see [`FrozenDecoderMixin`]. A loss that is not finite stops
    training, see [`FiniteLossMixin`]. Models that are not headwise are trained as the stock Trainer does.

    Under plain `TrainingArguments` the defaults of [`HeadwiseTrainingArguments`] hold: a model with guidance is
    guided, and one with gates is charged nothing for them.
    """


class HeadwiseSeq2SeqTrainer(HeadwiseTrainer, Seq2SeqTrainer):
    """[`HeadwiseTrainer`] for encoder–decoder models; evaluates by generating, as `Seq2SeqTrainer` does.

    Raises:
        TypeError: if its arguments are not `Seq2SeqTrainingArguments`.
    """

    def __init__(self, model=None, args=None, *rest, **kwargs):
        if not isinstance(args, Seq2SeqTrainingArguments):
            raise TypeError(
                f"{type(self).__name__} needs args of HeadwiseSeq2SeqTrainingArguments or Seq2SeqTrainingArguments, "
                f"got {type(args).__name__}."
            )
        super().__init__(model, args, *rest, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        """The loop of [`HeadwiseTrainer`], without the sentences that only fill up the last batch of a process.

        With `num_return_sequences` above 1 they are kept, as by the stock loop: of the last batch, only as many
        sequences as it has sentences would be left.
        """
        asked = generation_arguments(self).get("num_return_sequences")
        default = getattr(getattr(self.model, "generation_config", None), "num_return_sequences", None)
        if not self.args.predict_with_generate or (asked or default or 1) == 1:
            self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        """The stock step, with the loss averaged over labels when it generates, too."""
        step = Seq2SeqTrainer.prediction_step
        if not self.args.predict_with_generate or prediction_loss_only or self._evaluation is None:
            return step(self, model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        losses = []

        def forward(**batch):
            """What the stock step takes for the model when it has generated, for a loss of its own."""
            _, num_items = Trainer.get_batch_samples(self, iter([batch]), 1, self.args.device)
            loss, outputs = self.compute_loss(model, batch, return_outputs=True, num_items_in_batch=num_items)
            losses.append(loss.detach().mean())
            return {**outputs, "loss": loss}

        _, generated, labels = step(self, forward, inputs, False, ignore_keys, **gen_kwargs)
        return (losses[0] if losses else None), generated, labels
