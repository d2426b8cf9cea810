# Licensed under the Apache License, Version 2.0.
"""Train an LSTM with attention to translate.

    accelerate launch recipes/train_translation.py --model lstm                            # embedded number words
    accelerate launch recipes/train_lstm_translation.py                                    # the same
    accelerate launch recipes/train_lstm_translation.py recipes/configs/train_lstm_translation.yaml   # explained
    accelerate launch recipes/train_lstm_translation.py --preset paper --source_file train.de --target_file train.en \\
        --validation_source_file val.de --validation_target_file val.en --test_source_file test.de \\
        --test_target_file test.en

The model is that of Snell et al. (2021), section 2.1, see [`LstmSeq2SeqConfig`]: with `--attention uniform`, it learns
what it can without attention; with `--readout additive`, it is that of their appendix A.1.

Writes to `--output_dir`: `summary.json`, `table.csv` (all evaluations), `curve.png` and `.svg`, `config.yaml` (the
values of the run) and `model/`, with tokenizer, code and card. With `--push_to_hub true --hub_model_id USER/NAME`, the
model is pushed to the Hub once all of it is on disk.

Keys of `summary.json`:
    bleu                        corpus BLEU, on the test text if there is one, else on the validation text
    exact_match                 share of its sentences that are exactly right
    nll                         nats for a target token of the validation text, mean over its tokens
    token_accuracy              share of these tokens that are the most likely ones after the right ones before them
    parameters                  all that the model consists of
    parameters_embeddings       those of its embeddings
    steps                       optimizer steps
    seconds_per_step            wall time of a step; evaluation and fetching apart
    eval_curve                  [step, nll, token_accuracy] of all evaluations, as in table.csv
    attention, readout          as asked for
    bleu_text, bleu_signature, num_beams    what BLEU is of, how sacreBLEU counts it, width of the search
    examples                    some of the sentences: source, target and translation
    vocab_size, train_examples, eval_examples, bleu_examples, text
    num_processes, and seed, device, command and versions
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from transformers import set_seed

from .. import LstmSeq2SeqConfig, LstmSeq2SeqForConditionalGeneration
from .._tables import format_table
from ..analysis.plots.base import plot_pretraining
from ..hub.card import Metric, write_model_card
from ..training import (
    LogWhenSaved,
    SimilarLengthSeq2SeqTrainer,
    StepTimer,
    target_token_metrics,
    target_token_scores,
)
from .arguments.train_lstm_translation import LSTM, PRESETS, LstmArguments
from .run import SUMMARY, Run, run_recipe, write_csv
from .translation import (
    Corpus,
    TranslationTrainingArguments,
    evaluator,
    prepare_corpus,
    print_examples,
    train,
    translated,
)


MODEL = "model"  # folder of the model that is saved
FIGURES = ("bleu", "exact_match", "nll", "token_accuracy", "parameters", "parameters_embeddings", "seconds_per_step")
METRICS = {"compute_metrics": target_token_metrics, "preprocess_logits_for_metrics": target_token_scores}


@dataclass
class LstmTrainingArguments(TranslationTrainingArguments):
    """[`TranslationTrainingArguments`] with defaults for an LSTM, beside those of the preset.

    These defaults differ: `output_dir` runs/train_lstm_translation, `eval_strategy` steps, `lr_scheduler_type`
    constant, `adam_beta2` 0.999, `adam_epsilon` 1e-8. There is no label smoothing, so that losses are likelihoods.
    """

    output_dir: str = field(
        default="runs/train_lstm_translation", metadata={"help": "Where to write; may not hold another run."}
    )
    eval_strategy: str = field(default="steps", metadata={"help": "When to evaluate on the validation text."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "How the learning rate falls."})
    adam_beta2: float = field(default=0.999, metadata={"help": "Adam's β2."})
    adam_epsilon: float = field(default=1e-8, metadata={"help": "Adam's ε."})

    without_effect: ClassVar[dict[str, str]] = {
        **TranslationTrainingArguments.without_effect,
        **dict.fromkeys(
            (
                "guidance_weight", "guidance_schedule", "guidance_hold_steps", "gate_penalty", "target_heads",
                "target_warmup", "target_learning_rate", "gate_learning_rate", "freeze_decoder",
            ),
            "an LSTM has no heads to guide or to remove, see train_translation.py",
        ),
    }  # fmt: skip


def build_config(args: LstmArguments, corpus: Corpus) -> LstmSeq2SeqConfig:
    """Configuration of a model for some text."""
    tokenizer = corpus.tokenizer
    return LstmSeq2SeqConfig(
        **args.model_settings(),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )


def train_lstm(
    config: LstmSeq2SeqConfig, args: LstmArguments, training_args: LstmTrainingArguments, corpus: Corpus
) -> tuple[dict[str, Any], Any, str]:
    """Figures and log of the model, its trainer, and the folder of the model."""
    set_seed(training_args.seed)
    model = LstmSeq2SeqForConditionalGeneration(config)
    timer = StepTimer()
    callbacks = [timer, LogWhenSaved()]
    trainer = train(LSTM, model, training_args.max_steps, training_args, corpus, callbacks, metrics=METRICS,
                    trainer_class=SimilarLengthSeq2SeqTrainer)  # fmt: skip
    history = trainer.state.log_history
    if not any(entry["step"] == training_args.max_steps and "eval_nll" in entry for entry in history):
        trainer.evaluate()
    last = next(entry for entry in reversed(history) if "eval_nll" in entry)
    figures = {
        "nll": last["eval_nll"],
        "token_accuracy": last["eval_token_accuracy"],
        **translated(evaluator(model, args, training_args, corpus), corpus),
        "parameters": model.num_parameters(),
        "parameters_embeddings": model.get_input_embeddings().weight.numel(),
        "seconds_per_step": timer.figures()["seconds_per_step"],
        "history": history,
    }
    return figures, trainer, MODEL


# ---------------------------------------------------------------------------------------------------------------------


def main(args: LstmArguments, training_args: LstmTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args, PRESETS)
    with run.preparing():
        LstmSeq2SeqConfig(**args.model_settings())  # refuses what cannot be
        corpus, facts = prepare_corpus(args, training_args)
        config = build_config(args, corpus)
    found = run.once(LSTM, lambda: train_lstm(config, args, training_args, corpus))
    figures = {
        **{key: found[key] for key in FIGURES},
        "steps": training_args.max_steps,
        "eval_curve": [[row["step"], row["nll"], row["token_accuracy"]] for row in evaluations(found)],
        "attention": args.attention,
        "readout": args.readout,
        "num_beams": args.num_beams,
        "examples": found["examples"],
        **facts,
    }
    return run.finish(
        figures,
        lambda summary: publish(found, summary, config, args, run.folder),
        lambda summary: print_report(summary, run.folder),
        pushed=MODEL,
    )


def evaluations(run: dict) -> list[dict[str, float]]:
    """Lines of the table: each evaluation of the validation text."""
    return [
        {"step": entry["step"], **{key: entry[f"eval_{key}"] for key in ("nll", "token_accuracy")}}
        for entry in run["history"]
        if "eval_nll" in entry
    ]


def publish(run: dict, summary: dict, config: LstmSeq2SeqConfig, args: LstmArguments, folder: Path) -> None:
    """Table, picture and card."""
    write_csv(folder / "table.csv", evaluations(run))
    plot_pretraining(
        {f"LSTM, {args.attention} attention": run["history"]},
        folder / "curve.png",
        title=f"Translation: {summary['text']}",
        loss="negative log-likelihood (nats for a token)",
        keys=("loss", "eval_nll"),
    )
    directions = "bidirectional encoder" if args.bidirectional else "encoder"
    layers = f"{args.num_hidden_layers} layer{'s' * (args.num_hidden_layers > 1)} × {args.hidden_size}"
    write_model_card(
        folder / MODEL,
        name=f"translation LSTM, {args.attention} attention, {layers}",
        description=f"An LSTM with a {directions}, {args.attention} dot attention and {layers}, trained to translate "
        f"for {summary['steps']:,} steps.",
        config=config,
        task="translation",
        figures={key: run[key] for key in FIGURES if key != "seconds_per_step"},
        metric=[
            Metric("bleu", f"sacreBLEU ({summary['bleu_signature']})", run["bleu"], summary["bleu_text"]),
            Metric("loss", "negative log-likelihood (nats)", run["nll"]),
        ],
        dataset=summary["text"],
        provenance=summary,
        methods=["lexical"],
        language=args.languages,
        license=args.license,
        hub_dataset=args.dataset_name,
    )


def print_report(summary: dict, folder: Path) -> None:
    print("\n" + format_table(["figure", "value"], [[key, summary[key]] for key in FIGURES]))
    print_examples(summary["examples"])
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv, curve.png, {MODEL}/.")


if __name__ == "__main__":
    run_recipe(main, PRESETS)
