# Licensed under the Apache License, Version 2.0.
"""Train models that learn first what single words mean, and then to attend to them (Snell et al. 2021, tables).

    accelerate launch recipes/lexical_knowledge.py                                     # classes of embedded text
    accelerate launch recipes/lexical_knowledge.py recipes/configs/lexical_knowledge.yaml   # the same, explained
    accelerate launch recipes/lexical_knowledge.py --task translation                  # embedded number words
    accelerate launch recipes/lexical_knowledge.py --train_file SST-2/train.tsv --validation_file SST-2/dev.tsv
    accelerate launch recipes/lexical_knowledge.py --task translation --train_file train.de train.en \\
        --validation_file val.de val.en

The recipe trains, each with its own seed, an LSTM with attention (`standard`), the same model again (`second_seed`),
one with uniform attention (`uniform`), a bag of words without LSTM (`proxy`), and with `--frozen_beta true` a model
whose attention alone is trained (`frozen_beta`). On the validation text, it compares the attention α, the lexical
probe β and the saliency Δ of `standard`, the probes β_uf of `uniform` and β_px of `proxy`, the attention α_fr of
`frozen_beta` and, for translation, the alignment α_IBM of IBM Model 1. A(u, v) is the fraction of output words whose
highest position of u is among the highest 5 % of v, τ is Kendall's rank correlation, and ξ is the accuracy of
`second_seed` when its attention first agreed better with α. As in the paper, `uniform` is the checkpoint with the
largest A(α, β_uf); `frozen_beta` has the largest A(α, α_fr), and `proxy` the largest A(β_uf, β_px). With `--readout
additive`, the recipe computes the attention with minimal loss, α_opt, for some sentences and compares it with β.

For your own text, sizes and steps are the paper's; those of the embedded text are small. Without a validation text, it
is a fraction of the training text, drawn by the seed. Texts may also be `NAME=PATH` per class: a file with one text
per line, or a folder with one file per text, in `--encoding`.

Writes to `--output_dir`: `summary.json`, `table.csv`, `agreement.png` (agreement over training), `attention.png`
(α beside β_uf for two sentences), `.svg` of both, `config.yaml` (the values of the run), and the models `standard/`,
`uniform/`, `proxy/` and `frozen_beta/` with their cards. With `--resume true`, finished models are not trained again.
"""

import copy
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoConfig, PreTrainedModel, TrainingArguments, set_seed

from .. import (
    AgreementTracker,
    CheckpointCallback,
    HeadwiseTrainer,
    IbmModel1,
    ProxyConfig,
    agreement,
    chance_agreement,
    contextualized_agreement,
    ibm_rows,
    kendall_tau,
    row_mask,
    source_rows,
)
from .._tables import format_table
from ..analysis.plots.lexical import SourceMap, plot_source_maps
from ..hub.card import Metric, write_model_card
from ..training import check_trainer_arguments, checkpoint_steps, show_progress, train_from_newest
from .arguments.base import flag, refuse_flags
from .arguments.lexical_knowledge import LexicalArguments, choose_sizes
from .lexical_plots import plot_agreement
from .lexical_tasks import LEXICAL_TASKS, LexicalCorpus, LexicalTask, read_lexical_splits
from .pictures import draw
from .run import SUMMARY, Run, cpu_only, run_or_read, run_recipe, write_csv
from .summaries.lexical_knowledge import LexicalFacts, LexicalSummary, PairRow


# Attention settings of each model; the proxy has no attention. Their seeds are consecutive in this order.
LEXICAL_MODELS: dict[str, dict[str, Any]] = {
    "standard": {},
    "second_seed": {},
    "uniform": {"attention": "uniform"},
    "proxy": {},
    "frozen_beta": {"train_attention_only": True},
}
# Descriptions for the cards of the saved models.
DESCRIPTIONS = {
    "standard": "An LSTM with attention.",
    "uniform": "An LSTM with uniform attention.",
    "proxy": "A bag of words, without LSTM and attention.",
    "frozen_beta": "An LSTM with attention, whose attention alone was trained.",
}
AT_THEIR_BEST = ("uniform", "proxy", "frozen_beta")  # models that are saved at their best checkpoint
# Quantities u and v whose A(u, v) and τ are reported.
COMPARED_PAIRS = (
    ("alpha", "beta_uf"),
    ("beta_uf", "beta_px"),
    ("saliency", "beta_uf"),
    ("alpha", "beta"),
    ("alpha", "alpha_fr"),
    ("alpha", "alpha_ibm"),
    ("alpha", "alpha_ibm_em"),
)
OPTIMAL_PAIR = ("alpha_opt", "beta")  # on some sentences only
SYMBOLS = {
    "_".join((u, v)): f"{u}, {v}".replace("alpha", "α").replace("beta", "β").replace("saliency", "Δ")
    for u, v in (*COMPARED_PAIRS, OPTIMAL_PAIR)
}
MEASURES = {"agreement": agreement, "kendall_tau": kendall_tau}
MAP_SENTENCES, MAP_LENGTH = 2, 16  # number of sentences in the picture, and their approximate length in words
EM_STEPS = 5
OPTIMAL_SENTENCES = 50


@dataclass
class LexicalTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's defaults: Adam with a constant rate, and no gradient clipping."""

    output_dir: str = flag("runs/lexical_knowledge", "Output folder; it must not hold another run.")
    max_steps: int | None = flag(None, "Number of steps of each model.")
    per_device_train_batch_size: int | None = flag(None, "Examples per training batch.")
    per_device_eval_batch_size: int = flag(128, "Examples per evaluation batch.")
    learning_rate: float = flag(1e-3, "Learning rate.")
    lr_scheduler_type: str = flag("constant", "Learning rate schedule.")
    max_grad_norm: float = flag(0.0, "Maximum gradient norm; 0 disables clipping.")
    save_strategy: str = flag("no", "When to save checkpoints for --resume; finished models are saved in any case.")
    report_to: str | None = flag("none", "Trackers to report to.")

    # Flags that the recipe ignores, and what to do instead.
    without_effect: ClassVar[dict[str, str]] = {
        "num_train_epochs": "set max_steps",
        "eval_strategy": "set checkpoints",
        "eval_steps": "set checkpoints",
    }

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        refuse_flags(self, self.without_effect)
        super().__post_init__()


def prepare_lexical_corpus(
    task: LexicalTask, args: LexicalArguments, training_args: LexicalTrainingArguments
) -> tuple[LexicalCorpus, LexicalFacts]:
    """Reads and tokenizes all text."""
    (train, validation), name = read_lexical_splits(task, args, training_args.seed)
    if len(validation) > args.max_eval_examples:
        validation = validation.shuffle(seed=training_args.seed).take(args.max_eval_examples)
    corpus = task.corpus(train, validation, training_args.per_device_eval_batch_size)
    # Sentences of a batch have similar lengths.
    order = np.argsort([-len(ids) for ids in corpus.evaluation["input_ids"]], kind="stable")
    corpus.evaluation = corpus.evaluation.select(order)
    facts = LexicalFacts(
        task=args.task,
        text=name,
        vocab_size=len(corpus.tokenizer),
        train_examples=len(corpus.train),
        eval_examples=len(corpus.evaluation),
        max_steps=training_args.max_steps,
    )
    return corpus, facts


def build_lexical_model(
    name: str, task: LexicalTask, args: LexicalArguments, corpus: LexicalCorpus
) -> PreTrainedModel:
    if name == "proxy":
        tokenizer = corpus.tokenizer
        return task.proxy(
            ProxyConfig(
                vocab_size=len(tokenizer),
                embedding_size=args.embedding_size,
                pad_token_id=tokenizer.pad_token_id,
                **task.proxy_settings(corpus),
            )
        )
    model = task.lstm(task.lstm_config(corpus, **LEXICAL_MODELS[name]))
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        for word, vector in corpus.vectors.items():
            table[corpus.tokenizer.convert_tokens_to_ids(word)] = torch.from_numpy(vector)
    return model


def load_lexical_model(name: str, task: LexicalTask, folder: Path, device: torch.device) -> PreTrainedModel:
    """Loads a trained model; those of [`AT_THEIR_BEST`] are their best checkpoint."""
    return (task.proxy if name == "proxy" else task.lstm).from_pretrained(folder / name).to(device)


def train_lexical_model(
    name: str,
    tracker: AgreementTracker,
    task: LexicalTask,
    args: LexicalArguments,
    training_args: LexicalTrainingArguments,
    corpus: LexicalCorpus,
) -> tuple[dict, HeadwiseTrainer, str | None]:
    """Results of a model, its trainer, and the folder of the model; None if its best checkpoint is saved."""
    folder = Path(training_args.output_dir)
    best = {"best_by": "agreement", "best_folder": folder / name} if name in AT_THEIR_BEST else {}
    steps = checkpoint_steps(args.task, training_args.max_steps) if args.checkpoints is None else args.checkpoints
    callback = CheckpointCallback(steps, tracker, **best)
    run_args = copy.copy(training_args)
    run_args.output_dir = str(folder / "checkpoints" / name)
    run_args.seed = training_args.seed + list(LEXICAL_MODELS).index(name)
    set_seed(run_args.seed)
    model = build_lexical_model(name, task, args, corpus)
    trainer = HeadwiseTrainer(
        model,
        run_args,
        data_collator=corpus.collator,
        train_dataset=corpus.train,
        processing_class=corpus.tokenizer,
        callbacks=[callback],
    )
    callback.log = trainer.log
    show_progress(trainer, name)
    started = time.perf_counter()
    train_from_newest(trainer)
    results = {
        "history": callback.history,
        "best_step": callback.best()["step"] if best else None,
        "seconds": time.perf_counter() - started,
        "parameters": model.num_parameters(),
        "parameters_without_embeddings": model.num_parameters() - model.get_input_embeddings().weight.numel(),
    }
    return results, trainer, "standard" if name == "standard" else None


def train_lexical_models(
    task: LexicalTask, args: LexicalArguments, training_args: LexicalTrainingArguments, corpus: LexicalCorpus
) -> tuple[dict[str, dict], dict[str, torch.Tensor]]:
    """Results by model, and rows by name of the quantity."""
    folder, device = Path(training_args.output_dir), training_args.device
    batches = corpus.batches()
    rows: dict[str, torch.Tensor] = {}
    results: dict[str, dict] = {}

    def make(name: str, quantity: str | None = None, reference: str | None = None) -> None:
        tracker = AgreementTracker(batches, quantity, rows.get(reference))
        make_model = partial(train_lexical_model, name, tracker, task, args, training_args, corpus)
        results[name] = run_or_read(name, folder, make_model)

    make("standard")
    standard = load_lexical_model("standard", task, folder, device)
    for name, quantity in (("alpha", "attention"), ("beta", "probe"), ("saliency", "saliency")):
        rows[name] = source_rows(standard, batches, quantity)
    make("second_seed", "attention", "alpha")
    make("uniform", "probe", "alpha")
    rows["beta_uf"] = source_rows(load_lexical_model("uniform", task, folder, device), batches, "probe")
    make("proxy", "probe", "beta_uf")
    rows["beta_px"] = source_rows(load_lexical_model("proxy", task, folder, device), batches, "probe")
    if args.frozen_beta:
        make("frozen_beta", "attention", "alpha")
        rows["alpha_fr"] = source_rows(load_lexical_model("frozen_beta", task, folder, device), batches, "attention")
    if args.task == "translation":
        pairs = list(zip(corpus.train["input_ids"], corpus.train["labels"]))
        for name, iterations in (("alpha_ibm", 1), ("alpha_ibm_em", EM_STEPS)):
            rows[name] = ibm_rows(IbmModel1(null_word=False).fit(pairs, iterations), batches)
    return results, rows


def compare_pair(
    pair: tuple[str, str], rows: dict[str, torch.Tensor], mask: torch.Tensor, second_seed: list[dict]
) -> PairRow:
    """A and τ of a pair, and ξ of both."""
    values: dict[str, Any] = {"pair": "_".join(pair)}
    performances = [entry["accuracy"] for entry in second_seed]
    u, v = (rows[name].double() for name in pair)
    for name, measure in MEASURES.items():
        value, reached = measure(u, v, mask).item(), [entry[name] for entry in second_seed]
        performance = checkpoint = None
        # Rank correlation is undefined where all ranks are equal.
        if not any(map(math.isnan, [value, *reached])):
            performance, checkpoint = contextualized_agreement(value, reached, performances)
        step = None if checkpoint is None else second_seed[checkpoint]["step"]
        values |= {name: value, f"{name}_xi": performance, f"{name}_xi_step": step}
    return PairRow(**values)


def optimal_rows(
    task: LexicalTask, args: LexicalArguments, training_args: LexicalTrainingArguments, corpus: LexicalCorpus
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """α_opt and β of some sentences, and their mask."""
    number = min(args.optimal_sentences or OPTIMAL_SENTENCES, len(corpus.evaluation))
    # Sentences are sorted by length: these have different lengths.
    chosen = np.linspace(0, len(corpus.evaluation) - 1, number, dtype=int).tolist()
    batches = corpus.batches(chosen)
    model = load_lexical_model("standard", task, Path(training_args.output_dir), training_args.device)
    quantities = zip(OPTIMAL_PAIR, ("optimal_attention", "probe"))
    return {name: source_rows(model, batches, quantity) for name, quantity in quantities}, row_mask(batches)


def summarise(
    results: dict[str, dict],
    rows: dict[str, torch.Tensor],
    task: LexicalTask,
    args: LexicalArguments,
    training_args: LexicalTrainingArguments,
    corpus: LexicalCorpus,
    facts: LexicalFacts,
) -> LexicalSummary:
    mask, second_seed = row_mask(corpus.batches()), results["second_seed"]["history"]
    started = time.perf_counter()
    table = [compare_pair(pair, rows, mask, second_seed) for pair in COMPARED_PAIRS if set(pair) <= set(rows)]
    chance = chance_agreement(rows["beta_uf"], mask).item()
    seconds = time.perf_counter() - started
    if args.readout == "additive":
        table.append(compare_pair(OPTIMAL_PAIR, *optimal_rows(task, args, training_args, corpus), second_seed))
    last = {name: own["history"][-1] for name, own in results.items()}
    per_pair = ("agreement", "agreement_xi", "kendall_tau", "kendall_tau_xi")
    return LexicalSummary(
        **{key: {row.pair: getattr(row, key) for row in table} for key in per_pair},
        agreement_chance=chance,
        xi_star=last["second_seed"]["accuracy"],
        rows=table,
        accuracy={name: entry["accuracy"] for name, entry in last.items()},
        loss={name: entry["loss"] for name, entry in last.items()},
        best_step={name: own["best_step"] for name, own in results.items() if own["best_step"] is not None},
        history={name: own["history"] for name, own in results.items()},
        seconds={name: own["seconds"] for name, own in results.items()},
        output_words=len(mask),
        agreement_seconds=seconds,
        **{key: results["standard"][key] for key in ("parameters", "parameters_without_embeddings")},
        corpus=facts,
    )


def example_maps(
    task: LexicalTask, args: LexicalArguments, folder: Path, device: torch.device, corpus: LexicalCorpus
) -> list[list[SourceMap]]:
    """Maps of α beside β_uf, for sentences of moderate length."""
    lengths = np.array([len(ids) for ids in corpus.evaluation["input_ids"]])
    nearest = np.argsort(np.abs(lengths - MAP_LENGTH), kind="stable")[:MAP_SENTENCES]
    standard, uniform = (load_lexical_model(name, task, folder, device) for name in ("standard", "uniform"))
    panels = []
    for row in nearest.tolist():
        batches = corpus.batches([row])
        alpha, saliency = (source_rows(standard, batches, name) for name in ("attention", "saliency"))
        beta = source_rows(uniform, batches, "probe").sigmoid()
        words = corpus.tokenizer.convert_ids_to_tokens(batches[0]["input_ids"][0].tolist())
        labels = batches[0]["labels"][0]
        if args.task == "classification":
            values = torch.cat([alpha, beta, saliency.clamp(min=0)])
            panels.append(
                [
                    SourceMap(
                        f"a text of class {corpus.labels[labels]}",
                        ("attention α", "lexical β_uf", "saliency Δ > 0"),
                        words,
                        values,
                    )
                ]
            )
        else:
            targets = corpus.tokenizer.convert_ids_to_tokens(labels.tolist())
            panels.append(
                [
                    SourceMap("attention α", targets, words, alpha),
                    SourceMap("lexical knowledge β_uf", targets, words, beta),
                ]
            )
    return panels


def publish(
    summary: LexicalSummary,
    task: LexicalTask,
    args: LexicalArguments,
    training_args: LexicalTrainingArguments,
    corpus: LexicalCorpus,
    folder: Path,
) -> None:
    """Writes the table and the pictures, and a card for each model."""
    write_csv(folder / "table.csv", [row.to_dict() for row in summary.rows])
    for name in ("standard", *summary.best_step):
        write_lexical_card(name, summary, args, folder / name)
    names = {
        "second_seed": "A(α, α′): second seed",
        "uniform": "A(α, β_uf)",
        "proxy": "A(β_uf, β_px)",
        "frozen_beta": "A(α, α_fr)",
    }
    curves = {
        names[name]: ([entry["step"] for entry in history], [entry["agreement"] for entry in history])
        for name, history in summary.history.items()
        if name in names
    }
    levels = {f"A({SYMBOLS[pair]})": summary.agreement[pair] for pair in ("alpha_beta", "saliency_beta_uf")}
    examples = {"classification": "texts", "translation": "sentence pairs"}[args.task]
    title = f"{summary.corpus.text}\n{args.task}, {summary.corpus.train_examples:,} {examples} to train on"
    draw(plot_agreement, folder / "agreement", curves, title, summary.agreement_chance, levels)
    maps = example_maps(task, args, folder, training_args.device, corpus)
    draw(plot_source_maps, folder / "attention", maps, title)


def write_lexical_card(name: str, summary: LexicalSummary, args: LexicalArguments, folder: Path) -> None:
    history, corpus = summary.history[name], summary.corpus
    step = summary.best_step.get(name, history[-1]["step"])
    reached = next(entry for entry in history if entry["step"] == step)
    accuracy, loss = reached["accuracy"], reached["loss"]
    predicted = "" if args.task == "classification" else " of next tokens"
    write_model_card(
        folder,
        name=f"{name.replace('_', ' ')} model of Snell et al. 2021, {args.task}",
        description=f"{DESCRIPTIONS[name]} It learnt {args.task} of text; this is its checkpoint at step {step:,} of "
        f"{corpus.max_steps:,}.",
        config=AutoConfig.from_pretrained(folder),
        task={"classification": "text-classification", "translation": "translation"}[args.task],
        figures={"accuracy": accuracy, "loss": loss},
        metric=[
            Metric("accuracy", f"accuracy{predicted}", accuracy),
            Metric("loss", "negative log-likelihood (nats)", loss),
        ],
        dataset=corpus.text,
        provenance=summary.provenance,
        methods=["lexical"],
        license=args.license,
        hub_dataset=args.dataset_name,
    )


def print_report(summary: LexicalSummary, folder: Path) -> None:
    rows = [
        [SYMBOLS[row.pair], row.agreement, row.agreement_xi, row.kendall_tau, row.kendall_tau_xi]
        for row in summary.rows
    ]
    rows.append(["chance", summary.agreement_chance, None, 0.0, None])
    print("\n" + format_table(["u, v", "A(u, v)", "ξ", "τ", "ξ of τ"], rows))
    print("Accuracy: " + ", ".join(f"{name} {value:.3f}" for name, value in summary.accuracy.items()) + ".")
    print(f"Everything is in {folder}: {SUMMARY}, table.csv, agreement.png, attention.png, models.")


def main(args: LexicalArguments, training_args: LexicalTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args, pushes=False)
    with run.preparing(partial(choose_sizes, args, training_args)):
        task = LEXICAL_TASKS[args.task](args)
        check_trainer_arguments(training_args)
        for name in ("max_steps", "per_device_train_batch_size"):
            if getattr(training_args, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(training_args, name)}.")
        if max(args.checkpoints or [0]) > training_args.max_steps:
            raise ValueError(
                f"checkpoints contain step {max(args.checkpoints)}, but max_steps is {training_args.max_steps}; leave "
                "it out."
            )
        # The main process fills the cache that the others read.
        with PartialState().main_process_first():
            corpus, facts = prepare_lexical_corpus(task, args, training_args)
        for name in LEXICAL_MODELS:
            if args.frozen_beta or name != "frozen_beta":
                build_lexical_model(name, task, args, corpus)
    results, rows = train_lexical_models(task, args, training_args, corpus)
    summary = summarise(results, rows, task, args, training_args, corpus, facts)
    return run.finish(
        summary,
        lambda: publish(summary, task, args, training_args, corpus, run.folder),
        lambda: print_report(summary, run.folder),
    )


if __name__ == "__main__":
    run_recipe(main, summary=LexicalSummary)
