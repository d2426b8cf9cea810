# Licensed under the Apache License, Version 2.0.
"""Train an LSTM with attention to translate.

    accelerate launch recipes/train_lstm_translation.py                                    # embedded number words
    accelerate launch recipes/train_lstm_translation.py recipes/configs/train_lstm_translation.yaml   # explained
    accelerate launch recipes/train_lstm_translation.py --preset paper --source_file train.de --target_file train.en \\
        --validation_source_file val.de --validation_target_file val.en --test_source_file test.de \\
        --test_target_file test.en

The model is the one of Snell et al. (2021), section 2.1, see [`LstmSeq2SeqConfig`]. `--attention uniform` trains it
without learnt attention, and `--readout additive` is the model of their appendix A.1.

Writes to `--output_dir`: `summary.json`, `table.csv` (all evaluations), `curve.png` and `.svg`, `config.yaml` (the
values of the run) and `model/`, with tokenizer, code and card. With `--push_to_hub true --hub_model_id USER/NAME`, the
model is pushed to the Hub after everything is written.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import set_seed

from .. import LstmSeq2SeqConfig, LstmSeq2SeqForConditionalGeneration
from .._tables import format_table
from ..analysis.plots.base import plot_pretraining
from ..training import (
    LogWhenSaved,
    SimilarLengthSeq2SeqTrainer,
    StepTimer,
    target_token_metrics,
    target_token_scores,
)
from .arguments.base import flag
from .arguments.train_lstm_translation import PRESETS, LstmArguments
from .curves import drawn_log
from .pictures import draw
from .run import SUMMARY, Run, run_recipe, write_csv
from .summaries.base import rows_table
from .summaries.train_lstm_translation import LstmResults, LstmTranslationSummary
from .translation import (
    TranslationCorpus,
    TranslationTrainingArguments,
    generating_trainer,
    prepare_translation_corpus,
    print_examples,
    train_translator,
    translate_and_score,
    write_translation_card,
)


MODEL_FOLDER = "model"
METRICS = {"compute_metrics": target_token_metrics, "preprocess_logits_for_metrics": target_token_scores}


@dataclass
class LstmTrainingArguments(TranslationTrainingArguments):
    """[`TranslationTrainingArguments`] with defaults for an LSTM, beside those of the preset."""

    output_dir: str = flag("runs/train_lstm_translation", "Output folder; it must not hold another run.")
    eval_strategy: str = flag("steps", "When to evaluate on the validation text.")
    lr_scheduler_type: str = flag("constant", "Learning rate schedule.")
    adam_beta2: float = flag(0.999, "β2 of Adam.")
    adam_epsilon: float = flag(1e-8, "ε of Adam.")

    without_effect: ClassVar[dict[str, str]] = {
        **TranslationTrainingArguments.without_effect,
        **dict.fromkeys(
            (
                "guidance_weight", "guidance_schedule", "guidance_hold_steps", "gate_penalty", "target_heads",
                "target_warmup", "target_learning_rate", "gate_learning_rate", "freeze_decoder",
            ),
            "an LSTM has no heads to guide or to prune, see train_translation.py",
        ),
    }  # fmt: skip


def lstm_translation_config(args: LstmArguments, corpus: TranslationCorpus) -> LstmSeq2SeqConfig:
    tokenizer = corpus.tokenizer
    return LstmSeq2SeqConfig(
        **args.model_settings(),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )


def train_lstm_translator(
    config: LstmSeq2SeqConfig, args: LstmArguments, training_args: LstmTrainingArguments, corpus: TranslationCorpus
) -> tuple[dict[str, Any], SimilarLengthSeq2SeqTrainer, str]:
    """Results and log of the model, its trainer, and the folder of the model."""
    set_seed(training_args.seed)
    model = LstmSeq2SeqForConditionalGeneration(config)
    timer = StepTimer()
    trainer = train_translator(
        "lstm",
        model,
        training_args.max_steps,
        training_args,
        corpus,
        [timer, LogWhenSaved()],
        metrics=METRICS,
        trainer_class=SimilarLengthSeq2SeqTrainer,
    )
    history = trainer.state.log_history
    if not any(entry["step"] == training_args.max_steps and "eval_nll" in entry for entry in history):
        trainer.evaluate()
    last = next(entry for entry in reversed(history) if "eval_nll" in entry)
    results = {
        "nll": last["eval_nll"],
        "token_accuracy": last["eval_token_accuracy"],
        **translate_and_score(generating_trainer(model, args, training_args, corpus), corpus),
        "parameters": model.num_parameters(),
        "parameters_embeddings": model.get_input_embeddings().weight.numel(),
        "seconds_per_step": timer.figures()["seconds_per_step"],
        "history": history,
    }
    return results, trainer, MODEL_FOLDER


def main(args: LstmArguments, training_args: LstmTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args, PRESETS)
    with run.preparing():
        LstmSeq2SeqConfig(**args.model_settings())  # raises ValueError before the text is read
        corpus, facts = prepare_translation_corpus(args, training_args)
        config = lstm_translation_config(args, corpus)
    model = run.once("lstm", lambda: train_lstm_translator(config, args, training_args, corpus))
    summary = LstmTranslationSummary(
        results=LstmResults.from_dict(model),
        steps=training_args.max_steps,
        eval_curve=[list(row.values()) for row in evaluations(model)],
        attention=args.attention,
        readout=args.readout,
        num_beams=args.num_beams,
        examples=model["examples"],
        corpus=facts,
    )
    return run.finish(
        summary,
        lambda: publish(model, summary, config, args, run.folder),
        lambda: print_report(summary, run.folder),
        pushed=MODEL_FOLDER,
    )


def evaluations(model: dict[str, Any]) -> list[dict[str, float]]:
    """Lines of the table: every evaluation on the validation text."""
    return [
        {"step": entry["step"], **{key: entry[f"eval_{key}"] for key in ("nll", "token_accuracy")}}
        for entry in model["history"]
        if "eval_nll" in entry
    ]


def publish(
    model: dict[str, Any],
    summary: LstmTranslationSummary,
    config: LstmSeq2SeqConfig,
    args: LstmArguments,
    folder: Path,
) -> None:
    """Writes the table, the picture and the card."""
    results, corpus = summary.results, summary.corpus
    write_csv(folder / "table.csv", evaluations(model))
    keys = "loss", "eval_nll"
    draw(
        plot_pretraining,
        folder / "curve.png",
        {f"LSTM, {args.attention} attention": drawn_log(model["history"], keys)},
        title=f"Translation: {corpus.text}",
        loss="negative log-likelihood (nats per token)",
        keys=keys,
    )
    directions = "bidirectional encoder" if args.bidirectional else "encoder"
    layers = f"{args.num_hidden_layers} layer{'s' * (args.num_hidden_layers > 1)} × {args.hidden_size}"
    write_translation_card(
        folder / MODEL_FOLDER,
        args,
        summary,
        {key: value for key, value in results.to_dict().items() if key != "seconds_per_step"},
        name=f"translation LSTM, {args.attention} attention, {layers}",
        description=f"An LSTM with a {directions}, {args.attention} dot attention and {layers}, trained to translate "
        f"for {summary.steps:,} steps.",
        config=config,
        methods=["lexical"],
    )


def print_report(summary: LstmTranslationSummary, folder: Path) -> None:
    header, (values,) = rows_table([summary.results])
    print("\n" + format_table(["metric", "value"], [list(line) for line in zip(header, values)]))
    print_examples(summary.examples)
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv, curve.png, {MODEL_FOLDER}/.")


if __name__ == "__main__":
    run_recipe(main, PRESETS, LstmTranslationSummary)
