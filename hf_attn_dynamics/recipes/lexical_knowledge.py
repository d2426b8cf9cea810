# Licensed under the Apache License, Version 2.0.
"""Watch a model learn first what single words mean, and then to attend to them: a row of the tables of Snell et al.

    accelerate launch recipes/lexical_knowledge.py                                     # classes of embedded text
    accelerate launch recipes/lexical_knowledge.py recipes/configs/lexical_knowledge.yaml   # the same, explained
    accelerate launch recipes/lexical_knowledge.py --task translation                  # embedded number words
    accelerate launch recipes/lexical_knowledge.py --train_file SST-2/train.tsv --validation_file SST-2/dev.tsv
    accelerate launch recipes/lexical_knowledge.py --task translation --train_file train.de train.en \\
        --validation_file val.de val.en

Trained are, each with a seed of its own: an LSTM with attention (`standard`), the same once more (`second_seed`), one
whose attention is uniform (`uniform`), a bag of words without LSTM (`proxy`), and with `--frozen_beta true` a model of
which only attention is trained (`frozen_beta`). On the validation text, some of their quantities are compared: the
attention α, the lexical probe β and the saliency Δ of `standard`, the probes β_uf of `uniform` and β_px of `proxy`,
the attention α_fr of `frozen_beta` and, for translation, the alignment α_IBM of IBM Model 1. A(u, v) says how often
the highest position of u is among the highest 5 % of v, τ is Kendall's rank correlation, and ξ the performance of
`second_seed` when its attention first agreed better with α (Snell et al. 2021). `uniform` is taken at the checkpoint
where A(α, β_uf) is largest, as in the paper; so is `frozen_beta` for A(α, α_fr), and `proxy` for A(β_uf, β_px). With
`--readout additive`, the attention that minimises the loss, α_opt, is found for some sentences and compared with β.

For text of one's own, sizes and steps are the paper's; those of the embedded text are small. A validation text that is
not named is a share of the training text, drawn by the seed. Texts may also come as `NAME=PATH` for each class, a file
with a text a line or a folder of files with a text each, in `--encoding`.

Writes to `--output_dir`: `summary.json`, `table.csv`, `agreement.png` (agreement over training), `attention.png`
(α beside β_uf for two sentences), `.svg` of both, `config.yaml` (the values of the run), and the models `standard/`,
`uniform/`, `proxy/` and `frozen_beta/` with their cards. With `--resume true`, a model that is finished is not trained
again.

Keys of `summary.json`; PAIR is alpha_beta_uf, beta_uf_beta_px, saliency_beta_uf, alpha_beta, alpha_alpha_fr,
alpha_alpha_ibm or alpha_alpha_ibm_em (one step of EM as in the paper, or five), or alpha_opt_beta (of some sentences):
    agreement_PAIR, agreement_xi_PAIR       A, and its ξ
    kendall_tau_PAIR, kendall_tau_xi_PAIR   τ, and its ξ
    agreement_chance                        Â: what A(…, β_uf) is if β_uf is shuffled
    xi_star                                 performance of second_seed at the end
    rows                                    table.csv: the pair, these figures, and agreement_xi_step and
                                            kendall_tau_xi_step, the checkpoints that ξ is of (empty if none agreed
                                            better, so that ξ is ξ*)
    accuracy                                by model: share of correct classes, or of correct next tokens, at the end
    loss                                    by model: nats for each of them, at the end
    best_step                               by model that is taken at its best checkpoint: which that is
    history                                 by model: what was measured at each checkpoint
    seconds                                 by model: of its training, measuring included
    output_words, agreement_seconds         rows that are averaged over, and time that all A and τ took, rows given
    parameters, parameters_without_embeddings       of standard
    task, text, vocab_size, train_examples, eval_examples, max_steps
And num_processes, seed, device, command and versions.
"""

import copy
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoConfig, PreTrainedModel, set_seed

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
from ..hub.card import Metric, write_model_card
from ..training import check_trainer_arguments, checkpoint_steps, show_progress, train_from_newest
from .lexical_arguments import LexicalArguments, LexicalTrainingArguments, choose_sizes
from .lexical_plots import SourceMap, plot_agreement, plot_source_maps
from .lexical_tasks import TASKS, LexicalCorpus, Task, read_splits
from .run import SUMMARY, Run, run_or_read, run_recipe, write_csv


# What each model is told of its attention; the proxy has none. Their seeds count on in this order.
MODELS: dict[str, dict[str, Any]] = {
    "standard": {},
    "second_seed": {},
    "uniform": {"attention": "uniform"},
    "proxy": {},
    "frozen_beta": {"train_attention_only": True},
}
# What a card says of those that are kept.
MODELS_IN_WORDS = {
    "standard": "An LSTM with attention.",
    "uniform": "An LSTM with uniform attention.",
    "proxy": "A bag of words, without LSTM and attention.",
    "frozen_beta": "An LSTM with attention, of which nothing but attention was trained.",
}
AT_THEIR_BEST = ("uniform", "proxy", "frozen_beta")  # models that are taken at their best checkpoint
# A(u, v) and τ of these are reported.
PAIRS = (
    ("alpha", "beta_uf"),
    ("beta_uf", "beta_px"),
    ("saliency", "beta_uf"),
    ("alpha", "beta"),
    ("alpha", "alpha_fr"),
    ("alpha", "alpha_ibm"),
    ("alpha", "alpha_ibm_em"),
)
OPTIMAL_PAIR = ("alpha_opt", "beta")  # of some sentences only
SYMBOLS = {
    "_".join((u, v)): f"{u}, {v}".replace("alpha", "α").replace("beta", "β").replace("saliency", "Δ")
    for u, v in (*PAIRS, OPTIMAL_PAIR)
}
MEASURES = {"agreement": agreement, "kendall_tau": kendall_tau}
SHOWN = ("agreement", "agreement_xi", "kendall_tau", "kendall_tau_xi")
EXAMPLES, EXAMPLE_LENGTH = 2, 16  # sentences in the picture, and about how many words they have
EM_STEPS = 5
OPTIMAL_SENTENCES = 50


def prepare_corpus(
    task: Task, args: LexicalArguments, training_args: LexicalTrainingArguments
) -> tuple[LexicalCorpus, dict[str, Any]]:
    """All text as models take it, and what the summary says of it."""
    (train, validation), name = read_splits(task, args, training_args.seed)
    if len(validation) > args.max_eval_examples:
        validation = validation.shuffle(seed=training_args.seed).take(args.max_eval_examples)
    corpus = task.corpus(train, validation, training_args.per_device_eval_batch_size)
    # Sentences of a batch are of nearly the same length.
    order = np.argsort([-len(ids) for ids in corpus.evaluation["input_ids"]], kind="stable")
    corpus.evaluation = corpus.evaluation.select(order)
    facts = {
        "task": args.task,
        "text": name,
        "vocab_size": len(corpus.tokenizer),
        "train_examples": len(corpus.train),
        "eval_examples": len(corpus.evaluation),
        "max_steps": training_args.max_steps,
    }
    return corpus, facts


def build_lexical_model(name: str, task: Task, args: LexicalArguments, corpus: LexicalCorpus) -> PreTrainedModel:
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
    model = task.lstm(task.lstm_config(corpus, **MODELS[name]))
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        for word, vector in corpus.vectors.items():
            table[corpus.tokenizer.convert_tokens_to_ids(word)] = torch.from_numpy(vector)
    return model


def load_finished(name: str, task: Task, folder: Path, device: torch.device) -> PreTrainedModel:
    """A model that was trained before; of some, their best checkpoint."""
    return (task.proxy if name == "proxy" else task.lstm).from_pretrained(folder / name).to(device)


def train_lexical_model(
    name: str,
    tracker: AgreementTracker,
    task: Task,
    args: LexicalArguments,
    training_args: LexicalTrainingArguments,
    corpus: LexicalCorpus,
) -> tuple[dict, HeadwiseTrainer, str | None]:
    """Figures of a model over its training, its trainer, and where to save it at the end."""
    folder = Path(training_args.output_dir)
    best = {"best_by": "agreement", "best_folder": folder / name} if name in AT_THEIR_BEST else {}
    steps = checkpoint_steps(args.task, training_args.max_steps) if args.checkpoints is None else args.checkpoints
    callback = CheckpointCallback(steps, tracker, **best)
    run_args = copy.copy(training_args)
    run_args.output_dir = str(folder / "checkpoints" / name)
    run_args.seed = training_args.seed + list(MODELS).index(name)
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
    figures = {
        "history": callback.history,
        "best_step": callback.best()["step"] if best else None,
        "seconds": time.perf_counter() - started,
        "parameters": model.num_parameters(),
        "parameters_without_embeddings": model.num_parameters() - model.get_input_embeddings().weight.numel(),
    }
    return figures, trainer, "standard" if name == "standard" else None


def train_lexical_models(
    task: Task, args: LexicalArguments, training_args: LexicalTrainingArguments, corpus: LexicalCorpus
) -> tuple[dict[str, dict], dict[str, torch.Tensor]]:
    """Figures of all models, and the rows of quantities that are compared."""
    folder, device = Path(training_args.output_dir), training_args.device
    batches = corpus.batches()
    rows: dict[str, torch.Tensor] = {}
    figures: dict[str, dict] = {}

    def make(name: str, quantity: str | None = None, reference: str | None = None) -> None:
        tracker = AgreementTracker(batches, quantity, rows.get(reference))
        figures[name] = run_or_read(
            name, folder, partial(train_lexical_model, name, tracker, task, args, training_args, corpus)
        )

    make("standard")
    standard = load_finished("standard", task, folder, device)
    for name, quantity in (("alpha", "attention"), ("beta", "probe"), ("saliency", "saliency")):
        rows[name] = source_rows(standard, batches, quantity)
    make("second_seed", "attention", "alpha")
    make("uniform", "probe", "alpha")
    rows["beta_uf"] = source_rows(load_finished("uniform", task, folder, device), batches, "probe")
    make("proxy", "probe", "beta_uf")
    rows["beta_px"] = source_rows(load_finished("proxy", task, folder, device), batches, "probe")
    if args.frozen_beta:
        make("frozen_beta", "attention", "alpha")
        rows["alpha_fr"] = source_rows(load_finished("frozen_beta", task, folder, device), batches, "attention")
    if args.task == "translation":
        pairs = list(zip(corpus.train["input_ids"], corpus.train["labels"]))
        for name, iterations in (("alpha_ibm", 1), ("alpha_ibm_em", EM_STEPS)):
            rows[name] = ibm_rows(IbmModel1(null_word=False).fit(pairs, iterations), batches)
    return figures, rows


def compare(
    pair: tuple[str, str], rows: dict[str, torch.Tensor], mask: torch.Tensor, second_seed: list[dict]
) -> dict[str, Any]:
    """A and τ of a pair, and the ξ of both: a line of the table."""
    line: dict[str, Any] = {"pair": "_".join(pair)}
    performances = [entry["accuracy"] for entry in second_seed]
    u, v = (rows[name].double() for name in pair)
    for name, measure in MEASURES.items():
        value, reached = measure(u, v, mask).item(), [entry[name] for entry in second_seed]
        line[name] = value
        performance = checkpoint = None
        # Rank correlation is undefined where all ranks are equal.
        if not any(map(math.isnan, [value, *reached])):
            performance, checkpoint = contextualized_agreement(value, reached, performances)
        line[f"{name}_xi"] = performance
        line[f"{name}_xi_step"] = None if checkpoint is None else second_seed[checkpoint]["step"]
    return line


def optimal_rows(
    task: Task, args: LexicalArguments, training_args: LexicalTrainingArguments, corpus: LexicalCorpus
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """α_opt and β over sentences of all lengths, and their mask."""
    number = min(args.optimal_sentences or OPTIMAL_SENTENCES, len(corpus.evaluation))
    # Of each length some, since they come by length.
    chosen = np.linspace(0, len(corpus.evaluation) - 1, number, dtype=int).tolist()
    batches = corpus.batches(chosen)
    model = load_finished("standard", task, Path(training_args.output_dir), training_args.device)
    quantities = zip(OPTIMAL_PAIR, ("optimal_attention", "probe"))
    return {name: source_rows(model, batches, quantity) for name, quantity in quantities}, row_mask(batches)


def summarise(
    figures: dict[str, dict],
    rows: dict[str, torch.Tensor],
    task: Task,
    args: LexicalArguments,
    training_args: LexicalTrainingArguments,
    corpus: LexicalCorpus,
    facts: dict[str, Any],
) -> dict[str, Any]:
    mask, second_seed = row_mask(corpus.batches()), figures["second_seed"]["history"]
    started = time.perf_counter()
    table = [compare(pair, rows, mask, second_seed) for pair in PAIRS if set(pair) <= set(rows)]
    chance = chance_agreement(rows["beta_uf"], mask).item()
    seconds = time.perf_counter() - started
    if args.readout == "additive":
        table.append(compare(OPTIMAL_PAIR, *optimal_rows(task, args, training_args, corpus), second_seed))
    last = {name: own["history"][-1] for name, own in figures.items()}
    return {
        **{f"{key}_{line['pair']}": line[key] for line in table for key in SHOWN},
        "agreement_chance": chance,
        "xi_star": last["second_seed"]["accuracy"],
        "rows": table,
        "accuracy": {name: entry["accuracy"] for name, entry in last.items()},
        "loss": {name: entry["loss"] for name, entry in last.items()},
        "best_step": {name: own["best_step"] for name, own in figures.items() if own["best_step"] is not None},
        "history": {name: own["history"] for name, own in figures.items()},
        "seconds": {name: own["seconds"] for name, own in figures.items()},
        "output_words": len(mask),
        "agreement_seconds": seconds,
        "parameters": figures["standard"]["parameters"],
        "parameters_without_embeddings": figures["standard"]["parameters_without_embeddings"],
        **facts,
    }


def example_maps(
    task: Task, args: LexicalArguments, folder: Path, device, corpus: LexicalCorpus
) -> list[list[SourceMap]]:
    """α beside β_uf, for sentences of moderate length."""
    lengths = np.array([len(ids) for ids in corpus.evaluation["input_ids"]])
    nearest = np.argsort(np.abs(lengths - EXAMPLE_LENGTH), kind="stable")[:EXAMPLES]
    standard, uniform = (load_finished(name, task, folder, device) for name in ("standard", "uniform"))
    panels = []
    for row in nearest.tolist():
        batches = corpus.batches([row])
        alpha, saliency = (source_rows(standard, batches, name) for name in ("attention", "saliency"))
        beta = source_rows(uniform, batches, "probe").sigmoid()
        words = corpus.tokenizer.convert_ids_to_tokens(batches[0]["input_ids"][0].tolist())
        labels = batches[0]["labels"][0]
        if args.task == "classification":
            values = torch.cat([alpha, beta, saliency.clamp(min=0)])
            panels.append([SourceMap(f"class {corpus.labels[labels]}", ("α", "β_uf", "Δ, if > 0"), words, values)])
        else:
            targets = corpus.tokenizer.convert_ids_to_tokens(labels.tolist())
            panels.append([SourceMap("α", targets, words, alpha), SourceMap("β_uf", targets, words, beta)])
    return panels


def write_results(
    summary: dict[str, Any], task: Task, args: LexicalArguments, training_args, corpus: LexicalCorpus, folder: Path
) -> None:
    """Table, pictures, and a card for each model."""
    write_csv(folder / "table.csv", summary["rows"])
    for name in ("standard", *summary["best_step"]):
        write_card(name, summary, args, folder / name)
    names = {
        "second_seed": "A(α, α′): second seed",
        "uniform": "A(α, β_uf)",
        "proxy": "A(β_uf, β_px)",
        "frozen_beta": "A(α, α_fr)",
    }
    curves = {
        names[name]: ([entry["step"] for entry in history], [entry["agreement"] for entry in history])
        for name, history in summary["history"].items()
        if name in names
    }
    levels = {f"A({SYMBOLS[pair]})": summary[f"agreement_{pair}"] for pair in ("alpha_beta", "saliency_beta_uf")}
    examples = {"classification": "texts", "translation": "sentence pairs"}[args.task]
    title = f"{summary['text']}\n{args.task}, {summary['train_examples']:,} {examples} to train on"
    plot_agreement(curves, folder / "agreement", title, summary["agreement_chance"], levels)
    maps = example_maps(task, args, folder, training_args.device, corpus)
    plot_source_maps(maps, folder / "attention", title)


def write_card(name: str, summary: dict[str, Any], args: LexicalArguments, folder: Path) -> None:
    history = summary["history"][name]
    step = summary["best_step"].get(name, history[-1]["step"])
    reached = next(entry for entry in history if entry["step"] == step)
    accuracy, loss = reached["accuracy"], reached["loss"]
    of_what = "" if args.task == "classification" else " of next tokens"
    write_model_card(
        folder,
        name=f"{name.replace('_', ' ')} model of Snell et al. 2021, {args.task}",
        description=f"{MODELS_IN_WORDS[name]} It learnt {args.task} of text, and is taken at step {step:,} of "
        f"{summary['max_steps']:,}.",
        config=AutoConfig.from_pretrained(folder),
        task={"classification": "text-classification", "translation": "translation"}[args.task],
        figures={"accuracy": accuracy, "loss": loss},
        metric=[
            Metric("accuracy", f"accuracy{of_what}", accuracy),
            Metric("loss", "negative log-likelihood (nats)", loss),
        ],
        dataset=summary["text"],
        provenance=summary,
        methods=["lexical"],
        license=args.license,
        hub_dataset=args.dataset_name,
    )


def print_report(summary: dict[str, Any], folder: Path) -> None:
    rows = [[SYMBOLS[line["pair"]], *(line[key] for key in SHOWN)] for line in summary["rows"]]
    rows.append(["chance", summary["agreement_chance"], None, 0.0, None])
    print("\n" + format_table(["u, v", "A(u, v)", "ξ", "τ", "ξ of τ"], rows))
    print("Accuracy: " + ", ".join(f"{name} {value:.3f}" for name, value in summary["accuracy"].items()) + ".")
    print(f"Everything is in {folder}: {SUMMARY}, table.csv, agreement.png, attention.png, models.")


def main(args: LexicalArguments, training_args: LexicalTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args, pushes=False)
    with run.preparing(partial(choose_sizes, args, training_args)):
        task = TASKS[args.task](args)
        check_trainer_arguments(training_args)
        for name in ("max_steps", "per_device_train_batch_size"):
            if getattr(training_args, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(training_args, name)}.")
        if max(args.checkpoints or [0]) > training_args.max_steps:
            raise ValueError(
                f"checkpoints name step {max(args.checkpoints)}, but max_steps is {training_args.max_steps}; leave it "
                "out."
            )
        # One process prepares, the others read what it left in the cache.
        with PartialState().main_process_first():
            corpus, facts = prepare_corpus(task, args, training_args)
        for name in MODELS:
            if args.frozen_beta or name != "frozen_beta":
                build_lexical_model(name, task, args, corpus)
    figures, rows = train_lexical_models(task, args, training_args, corpus)
    return run.finish(
        summarise(figures, rows, task, args, training_args, corpus, facts),
        lambda summary: write_results(summary, task, args, training_args, corpus, run.folder),
        lambda summary: print_report(summary, run.folder),
    )


if __name__ == "__main__":
    run_recipe(main)
