# Licensed under the Apache License, Version 2.0.
"""Translators that a recipe compares: training arguments, training, results and cards."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .. import HeadwiseMarianConfig, HeadwiseMarianMTModel, HeadwiseSeq2SeqTrainer
from ..training import LogWhenSaved, StepTimer
from .arguments.base import flag
from .arguments.translation import TextArguments, TransformerArguments
from .summaries.base import Summary
from .translation import (
    TranslationCorpus,
    TranslationTrainingArguments,
    evaluate_translator,
    train_translator,
    write_translation_card,
)


@dataclass
class ComparedTrainingArguments(TranslationTrainingArguments):
    """[`TranslationTrainingArguments`] with defaults for a comparison, beside those of a recipe and its preset."""

    eval_strategy: str = flag("steps", "When to evaluate on the validation text.")

    without_effect: ClassVar[dict[str, str]] = {
        **TranslationTrainingArguments.without_effect,
        **dict.fromkeys(
            ("gate_penalty", "target_heads", "target_warmup", "target_learning_rate", "gate_learning_rate"),
            "this recipe prunes no heads, see train_translation.py",
        ),
    }


def train_compared(
    name: str,
    model: HeadwiseMarianMTModel,
    args: TextArguments,
    training_args: ComparedTrainingArguments,
    corpus: TranslationCorpus,
    translated: TranslationCorpus | None = None,
) -> tuple[dict[str, Any], HeadwiseSeq2SeqTrainer]:
    """Trains and evaluates a translator, guided if its configuration has guidance.

    Args:
        name (`str`): Name of the model.
        model (`HeadwiseMarianMTModel`): The model.
        args ([`TextArguments`]): Flags.
        training_args ([`ComparedTrainingArguments`]): Flags of training.
        corpus ([`TranslationCorpus`]): The text.
        translated ([`TranslationCorpus`], *optional*): The same without columns of guidance targets, which is
            evaluated after training.

    Returns:
        `tuple`: results and log, and the trainer.
    """
    timer = StepTimer()
    settings = {} if model.config.guidance is not None else {"guidance_weight": 0.0}
    trainer = train_translator(
        name, model, training_args.max_steps, training_args, corpus, [timer, LogWhenSaved()], **settings
    )
    history = trainer.state.log_history
    if not any(entry["step"] == training_args.max_steps and "eval_loss" in entry for entry in history):
        trainer.evaluate()
    model = trainer.accelerator.unwrap_model(trainer.model)
    row = evaluate_translator(model, args, training_args, translated or corpus)
    results = {
        "validation_nll": row["nll"],
        **{key: row[key] for key in ("bleu", "exact_match", "parameters", "examples")},
        "seconds_per_step": timer.figures()["seconds_per_step"],
        "guidance_weight_initial": trainer.initial_guidance_weight,
        "history": history,
    }
    return results, trainer


def evaluation_losses(model: Mapping[str, Any]) -> list[list[float]]:
    """`[step, loss]` of every evaluation on the validation text, of the results of [`train_compared`]."""
    return [[entry["step"], entry["eval_loss"]] for entry in model["history"] if "eval_loss" in entry]


def write_compared_card(
    folder: Path,
    attention: str,
    description: str,
    config: HeadwiseMarianConfig,
    args: TransformerArguments,
    summary: Summary,
    figures: Mapping[str, Any],
) -> None:
    """Writes the card of a translator.

    Args:
        folder (`Path`): Folder of the model.
        attention (`str`): Name of its attention.
        description (`str`): Sentences at the end of its description.
        config (`HeadwiseMarianConfig`): Its configuration.
        args ([`TransformerArguments`]): Flags.
        summary ([`Summary`]): Results of the recipe, with `steps` and `corpus`.
        figures (`dict`): Metrics of the model, with `bleu`.
    """
    size = f"{args.encoder_layers} + {args.decoder_layers} layers × {args.hidden_size}"
    write_translation_card(
        folder,
        args,
        summary,
        figures,
        name=f"translation Transformer, {attention}, {size}",
        description=f"An encoder–decoder of {size}, {args.num_attention_heads} heads, trained to translate for "
        f"{summary.steps:,} steps. {description}",
        config=config,
    )
