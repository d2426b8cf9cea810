# Licensed under the Apache License, Version 2.0.
"""Train a Transformer to translate, remove attention heads of encoder and decoder, and train what is left anew.

    accelerate launch recipes/train_translation.py                                          # embedded number words
    accelerate launch recipes/train_translation.py recipes/configs/train_translation.yaml   # the same, explained
    accelerate launch recipes/train_translation.py --preset small --source_file train.de --target_file train.en \\
        --validation_source_file val.de --validation_target_file val.en --keep 54 36 18 --from_scratch true

After Voita et al. (2019), section 6. A model with all heads is trained (`dense`). For each number of heads in
`--keep`, or each λ in `--gate_penalty`, a copy gets gates at `--gate_sites`, is trained for `--gate_steps`, loses the
heads whose gates are closed, and is trained for `--finetune_steps` more (`pruned`). With `--from_scratch`, the same
heads are also trained from random weights, for as many steps in all. With gates in the encoder alone, the decoder is
not trained any more once there are gates. `--guidance` is for models that start from random weights; what it brings
alone is measured by `compare_translation.py`.

With `--model lstm`, an LSTM with attention is trained instead, which has no heads to remove: then this is
`train_lstm_translation.py`, with its flags.

Writes to `--output_dir`: `summary.json`, `table.csv` (as table 2 of the paper), `curve.png`, `heads.png`, `gates.png`,
`gate_history.png` and `.svg` of each, `config.yaml` (the values of the run), and models with tokenizer, code and card:
`dense/`, and `model-K/` with K heads or `model-penalty-λ/`. With `--push_to_hub true --hub_model_id USER/NAME`, the
first `model-…/` is pushed to the Hub once all of it is on disk.

Keys of `summary.json`, of the first K or λ that was named unless they say otherwise:
    bleu_dense, bleu_pruned, bleu_from_scratch    corpus BLEU, on the test text if there is one, else on the validation
    exact_match_dense, exact_match_pruned, exact_match_from_scratch    share of its sentences that are exactly right
    nll_dense, nll_pruned, nll_from_scratch       nats for a target token of the validation text, without smoothing
    heads_total, heads_kept                       heads of the gated sites, before and after
    heads_encoder, heads_decoder, heads_cross     heads after, at each kind of site
    parameters_dense, parameters_pruned           all that a model consists of, its fixed positions included
    steps_dense, steps_pruned, steps_from_scratch    optimizer steps of each in all
    seconds_per_step_dense                        wall time of a step; evaluation and fetching apart
    rows                                          all models: method (dense, pruned, from scratch), gate_penalty, heads
                                                  in all and of each kind, bleu, exact_match, nll, parameters
    bleu_text, bleu_signature, num_beams          what BLEU is of, how sacreBLEU counts it, width of the search
    examples                                      some of the sentences: source, target, and translations of both
    vocab_size, train_examples, eval_examples, bleu_examples, text
    num_processes, and seed, device, command and versions
Keys of models from scratch are null without --from_scratch.
"""

import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from accelerate import PartialState
from transformers import AutoConfig, PreTrainedModel, set_seed

from .. import (
    GateHistory,
    HeadwiseMarianConfig,
    HeadwiseMarianMTModel,
    HeadwiseSeq2SeqTrainer,
    headwise_model,
)
from .._tables import format_table
from ..analysis.plots.base import (
    plot_gate_history,
    plot_gates,
    plot_heads_per_layer,
    plot_pruning_curve,
)
from ..hub.card import Metric, write_model_card
from ..models.head_sites import SITE_KINDS
from ..training import StepTimer
from .arguments.base import check_names
from .arguments.train_translation import PRESETS, PruningArguments
from .run import SUMMARY, Run, run_recipe, write_csv
from .translation import (
    Corpus,
    TranslationTrainingArguments,
    build_config,
    evaluated,
    parse_sites,
    prepare_corpus,
    print_examples,
    side_by_side,
    train,
)


AUTO_CLASS = "AutoModelForSeq2SeqLM"
ROW_KEYS = ("method", "gate_penalty", "heads", *(f"heads_{kind}" for kind in SITE_KINDS), "bleu", "exact_match", "nll",
            "parameters")  # fmt: skip
UNDEFINED_TIMESCALE = 10_000  # of Transformers' inverse_sqrt without warm-up


@dataclass
class PruningTrainingArguments(TranslationTrainingArguments):
    """[`TranslationTrainingArguments`] with defaults for training with gates, beside those of the preset.

    `max_steps` are those of the model with all heads. `gate_penalty` is a list: each λ gives a model of its own. With
    `lr_scheduler_type` inverse_sqrt, the rate goes on falling when gates come in; any other runs anew for each of
    `max_steps`, `gate_steps` and `finetune_steps`.

    These defaults differ: `output_dir` runs/train_translation, `label_smoothing_factor` 0.1.
    """

    output_dir: str = field(
        default="runs/train_translation", metadata={"help": "Where to write; may not hold another run."}
    )
    gate_penalty: list[float] | None = field(
        default=None, metadata={"help": "Instead of keep: prices λ of an open head, each from the dense model."}
    )
    label_smoothing_factor: float = field(
        default=0.1, metadata={"help": "Share of the probability that is spread over all tokens, in training."}
    )

    without_effect: ClassVar[dict[str, str]] = {
        **TranslationTrainingArguments.without_effect,
        "target_heads": "set keep",
    }

    def __post_init__(self):
        penalties = self.gate_penalty
        if penalties is not None:
            check_names("gate_penalty", penalties)
        for penalty in penalties or []:
            if not 0 < penalty < float("inf"):
                raise ValueError(f"gate_penalty must be above 0 and finite, got {penalty}.")
        # What the parent class checks is the λ of one model.
        self.gate_penalty = 0.0
        super().__post_init__()
        self.gate_penalty = penalties


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def schedule_after(steps: int, training_args: PruningTrainingArguments) -> dict:
    """Training arguments with which the learning rate goes on as if `steps` had been taken."""
    if training_args.lr_scheduler_type != "inverse_sqrt":
        return {}
    # lr · √(T / (t + T − warm-up)) at step t; a schedule without warm-up that starts later is of the same form.
    warmup = training_args.get_warmup_steps(training_args.max_steps)
    timescale = (training_args.lr_scheduler_kwargs or {}).get("timescale") or warmup or UNDEFINED_TIMESCALE
    later = max(steps - warmup, 0) + timescale
    return {
        "learning_rate": training_args.learning_rate * (timescale / later) ** 0.5,
        "lr_scheduler_kwargs": {"timescale": later},
        "warmup_steps": 0,
    }


def prune(
    name: str, penalty: float | None, keep: int | None, args: PruningArguments, training_args, corpus: Corpus
) -> HeadwiseSeq2SeqTrainer:
    """A copy of the dense model that has lost its closed heads, trained a little more."""
    folder = Path(training_args.output_dir)
    stage = folder / "checkpoints" / f"{name}-gates"
    encoder_only = set(args.gate_sites) == {"encoder"}
    freeze = encoder_only if training_args.freeze_decoder is None else training_args.freeze_decoder
    shared = {"freeze_decoder": freeze, "guidance_weight": 0.0}
    if not (stage / "gates.json").is_file():
        set_seed(training_args.seed)
        gates = {kind: {"variant": args.gate_variant} for kind in args.gate_sites}
        model = headwise_model(folder / "dense", AUTO_CLASS, guidance=None).add_gates(gates)
        history = GateHistory(every=max(1, args.gate_steps // 100))
        price = {"target_heads": keep} if penalty is None else {"gate_penalty": penalty}
        schedule = schedule_after(training_args.max_steps, training_args)
        trainer = train(
            stage.name, model, args.gate_steps, training_args, corpus, [history], **price, **schedule, **shared
        )  # fmt: skip
        trainer.prune()
        trainer.save_model(str(stage / "pruned"))
        if trainer.is_world_process_zero():
            history.save(stage / "gates.json")
        PartialState().wait_for_everyone()
    set_seed(training_args.seed)
    model = headwise_model(stage / "pruned", AUTO_CLASS)
    schedule = schedule_after(training_args.max_steps + args.gate_steps, training_args)
    return train(name, model, args.finetune_steps, training_args, corpus, **schedule, **shared)


def row_of(model: PreTrainedModel, method: str, args: PruningArguments, training_args, corpus: Corpus) -> dict:
    """Figures of one model: a row of the summary, and some translations."""
    layers: dict[str, list[int]] = {}
    for site, left in model.config.kept_heads().items():
        layers.setdefault(site.kind, []).append(len(left))
    heads = {kind: sum(of_layers) for kind, of_layers in layers.items()}
    return {
        "method": method,
        "gate_penalty": None,
        "heads": sum(heads[kind] for kind in args.gate_sites),
        **{f"heads_{kind}": heads[kind] for kind in SITE_KINDS},
        "layers": layers,
        **evaluated(model, args, training_args, corpus),
    }


# ---------------------------------------------------------------------------------------------------------------------


def prepare(
    args: PruningArguments, training_args: PruningTrainingArguments
) -> tuple[HeadwiseMarianConfig, Corpus, dict, list[tuple[str, float | None, int | None]]]:
    """Configuration, text, what the summary says of both, and name, λ and heads of each model to be pruned."""
    if args.keep and training_args.gate_penalty:
        raise ValueError(
            f"keep={args.keep} and gate_penalty={training_args.gate_penalty} both say how many heads are to go; give "
            "one of them."
        )
    if args.guidance is None and training_args.guidance_weight not in (None, 0):
        raise ValueError(f"guidance_weight={training_args.guidance_weight} weighs no guidance; give guidance.")
    layers = {"encoder": args.encoder_layers, "decoder": args.decoder_layers, "cross": args.decoder_layers}
    total = args.num_attention_heads * sum(layers[kind] for kind in args.gate_sites)
    halved = [total // 2, total // 4] if total > 3 else [1]
    keep = [] if training_args.gate_penalty else args.keep or halved
    if max(keep, default=0) >= total:
        sites = ", ".join(args.gate_sites)
        raise ValueError(f"keep={max(keep)}, but the heads at {sites} are {total}; keep fewer, or gate more sites.")
    corpus, facts = prepare_corpus(args, training_args)
    config = build_config(args, corpus, guidance=parse_sites("guidance", args.guidance))
    wanted = [(str(number), None, number) for number in keep]
    wanted += [(f"penalty-{penalty:g}", penalty, None) for penalty in training_args.gate_penalty or []]
    return config, corpus, {"heads_total": total, **facts}, wanted


def main(args: PruningArguments, training_args: PruningTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, training_args, PRESETS)
    with run.preparing():
        config, corpus, facts, wanted = prepare(args, training_args)
    folder = run.folder
    steps = {"dense": training_args.max_steps}
    steps["pruned"] = steps["from_scratch"] = training_args.max_steps + args.gate_steps + args.finetune_steps

    def make_dense():
        set_seed(training_args.seed)
        timer = StepTimer()
        trainer = train("dense", HeadwiseMarianMTModel(config), steps["dense"], training_args, corpus, [timer],
                        freeze_decoder=False)  # fmt: skip
        row = row_of(trainer.model, "dense", args, training_args, corpus)
        return {**row, "seconds_per_step": timer.figures()["seconds_per_step"]}, trainer, "dense"

    def make_pruned(name: str, penalty: float | None, keep: int | None):
        trainer = prune(f"model-{name}", penalty, keep, args, training_args, corpus)
        row = row_of(trainer.model, "pruned", args, training_args, corpus)
        return {**row, "gate_penalty": penalty}, trainer, f"model-{name}"

    def make_from_scratch(name: str, penalty: float | None):
        pruned = AutoConfig.from_pretrained(folder / f"model-{name}")
        pruned.guidance = copy.deepcopy(config.guidance)
        set_seed(training_args.seed)
        warmup = {"warmup_steps": training_args.get_warmup_steps(training_args.max_steps)}
        trainer = train(f"scratch-{name}", HeadwiseMarianMTModel(pruned), steps["from_scratch"], training_args, corpus,
                        freeze_decoder=False, **warmup)  # fmt: skip
        row = row_of(trainer.model, "from scratch", args, training_args, corpus)
        return {**row, "gate_penalty": penalty}, trainer, None

    dense = run.once("dense", make_dense)
    pruned = {
        name: run.once(f"model-{name}", partial(make_pruned, name, penalty, keep)) for name, penalty, keep in wanted
    }
    scratch = {
        name: run.once(f"scratch-{name}", partial(make_from_scratch, name, penalty))
        for name, penalty, _ in wanted
        if args.from_scratch
    }
    return run.finish(
        summarise(dense, pruned, scratch, steps, args, facts),
        lambda summary: publish(dense, pruned, scratch, summary, args, folder, wanted),
        lambda summary: print_report(summary, [f"model-{name}" for name in pruned], folder),
        pushed=f"model-{wanted[0][0]}",
    )


def summarise(
    dense: dict, pruned: dict[str, dict], scratch: dict[str, dict], steps: dict, args: PruningArguments, facts: dict
) -> dict:
    """All figures; those of one model are flat."""
    name, first = next(iter(pruned.items()))
    models = {"dense": dense, "pruned": first, "from_scratch": scratch.get(name, {})}
    return {
        **{f"{key}_{model}": row.get(key) for key in ("bleu", "exact_match", "nll") for model, row in models.items()},
        "heads_total": facts["heads_total"],
        "heads_kept": first["heads"],
        **{f"heads_{kind}": first[f"heads_{kind}"] for kind in SITE_KINDS},
        "parameters_dense": dense["parameters"],
        "parameters_pruned": first["parameters"],
        **{f"steps_{model}": steps[model] if row else None for model, row in models.items()},
        "seconds_per_step_dense": dense["seconds_per_step"],
        "rows": [{key: row[key] for key in ROW_KEYS} for row in (dense, *pruned.values(), *scratch.values())],
        "num_beams": args.num_beams,
        "examples": side_by_side({"dense": dense, "pruned": first}),
        **{key: value for key, value in facts.items() if key != "heads_total"},
    }


def publish(
    dense: dict, pruned: dict[str, dict], scratch: dict[str, dict], summary: dict, args, folder: Path, wanted: list
) -> None:
    """Table, pictures, and a card for each model."""
    write_table(dense, pruned, scratch, folder / "table.csv")
    title, total = summary["text"], summary["heads_total"]
    rows = [{**row, "BLEU": row["bleu"]} for row in (*pruned.values(), *scratch.values())]
    plot_pruning_curve(rows, folder / "curve.png", title=title, metric="BLEU", dense=dense["bleu"], total=total)
    layers = {f"{row['heads']} heads" if row["gate_penalty"] is None else f"λ = {row['gate_penalty']:g}": row["layers"]
              for row in pruned.values()}  # fmt: skip
    plot_heads_per_layer(layers, folder / "heads.png", total=args.num_attention_heads, title=title)
    name, _, keep = wanted[0]
    history = GateHistory.load(folder / "checkpoints" / f"model-{name}-gates" / "gates.json")
    gated = {kind: sum(dense["layers"][kind]) for kind in args.gate_sites}
    plot_gate_history(
        history.steps, history.open_heads, folder / "gate_history.png", title, gated, keep, history.settled_heads
    )
    last = {kind: np.asarray(records[-1]) for kind, records in history.log_alpha.items()}
    plot_gates(last, folder / "gates.png", title=f"{title}; {summary['heads_kept']} of {total} heads")

    every = sum(map(sum, dense["layers"].values()))
    for model, row in {"dense": dense, **{f"model-{name}": row for name, row in pruned.items()}}.items():
        left = sum(map(sum, row["layers"].values()))
        how = f"all {every} attention heads" if row is dense else f"{left} of {every} attention heads"
        rest = "" if row is dense else (
            f" Which to keep was learnt by gates ({', '.join(args.gate_sites)}); it was fine-tuned after the others "
            "were removed."
        )  # fmt: skip
        write_model_card(
            folder / model,
            name=f"translation Transformer, {how}",
            description=f"An encoder–decoder with {how}, trained to translate.{rest}",
            config=AutoConfig.from_pretrained(folder / model),
            task="translation",
            figures={
                **{key: row[key] for key in ("bleu", "exact_match", "nll")},
                **({} if row is dense else {"bleu_dense": dense["bleu"]}),
            },
            metric=[
                Metric("bleu", f"sacreBLEU ({summary['bleu_signature']})", row["bleu"], summary["bleu_text"]),
                Metric("loss", "negative log-likelihood (nats)", row["nll"]),
            ],
            dataset=summary["text"],
            provenance=summary,
            methods=[] if row is dense else ["gates"],
            language=args.languages,
            license=args.license,
            hub_dataset=args.dataset_name,
        )


def write_table(dense: dict, pruned: dict[str, dict], scratch: dict[str, dict], path: Path) -> None:
    """One line for each choice of heads, those from the trained model and from scratch side by side."""
    metrics = ("bleu", "exact_match", "nll")
    lines = [
        {
            "model": name,
            **{f"heads_{kind}": row[f"heads_{kind}"] for kind in SITE_KINDS},
            "gate_penalty": row["gate_penalty"],
            **{f"{metric}_from_trained": row[metric] for metric in metrics},
            **{f"{metric}_from_scratch": scratch.get(name, {}).get(metric) for metric in metrics},
            "parameters": row["parameters"],
        }
        for name, row in {"dense": dense, **pruned}.items()
    ]
    write_csv(path, lines)


def print_report(summary: dict, models: list[str], folder: Path) -> None:
    rows = summary["rows"]
    keys = [key for key in ROW_KEYS if any(row[key] is not None for row in rows)]
    print("\n" + format_table(keys, [[row[key] for key in keys] for row in rows]))
    print_examples(summary["examples"])
    made = ", ".join(f"{name}/" for name in ("dense", *models))
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv, curve.png, {made}.")


if __name__ == "__main__":
    run_recipe(main, PRESETS)
