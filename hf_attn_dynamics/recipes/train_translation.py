# Licensed under the Apache License, Version 2.0.
"""Train a Transformer to translate, prune attention heads of encoder and decoder, and fine-tune the pruned model.

    accelerate launch recipes/train_translation.py                                          # embedded number words
    accelerate launch recipes/train_translation.py recipes/configs/train_translation.yaml   # the same, explained
    accelerate launch recipes/train_translation.py --preset small --source_file train.de --target_file train.en \\
        --validation_source_file val.de --validation_target_file val.en --keep 54 36 18 --from_scratch true

After Voita et al. (2019), section 6. First, a model with all heads is trained (`dense`). For each number of heads in
`--keep`, or each penalty coefficient λ in `--gate_penalty`, a copy gets gates at `--gate_sites`, is trained for
`--gate_steps`, loses the heads with closed gates, and is trained for `--finetune_steps` more (`pruned`). With
`--from_scratch`, the same heads are also trained from random weights for the same total number of steps. If only the
encoder has gates, the decoder is frozen from then on. `--guidance` is for models that start from random weights;
`compare_translation.py` measures its effect.

With `--early_stopping_patience`, the dense model, the pruned one and the one from scratch are each trained until the
validation loss stops falling, and get their best weights; `--max_steps` and `--finetune_steps` are then the most.
`--relevance_examples` computes the relevance of all heads of the dense model for its predictions by layer-wise
relevance propagation (section 4; positive summands only), as fractions of their layer.

Writes to `--output_dir`: `summary.json`, `table.csv` (as table 2 of the paper), `curve.png`, `heads.png`, `gates.png`,
`gate_history.png` and, with `--relevance_examples`, `relevance.png`, and `.svg` of each, `config.yaml` (the values of
the run), and models with tokenizer, code and card: `dense/`, and `model-K/` with K heads or `model-penalty-λ/`. With
`--push_to_hub true --hub_model_id USER/NAME`, the first `model-…/` is pushed to the Hub after everything is written.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from accelerate import PartialState
from torch.utils.data import DataLoader
from transformers import AutoConfig, DataCollatorForSeq2Seq, PreTrainedModel, TrainerCallback, set_seed

from .. import (
    GateHistory,
    HeadwiseMarianConfig,
    HeadwiseMarianMTModel,
    HeadwiseSeq2SeqTrainer,
    head_relevance,
    headwise_model,
)
from .._processes import from_main_process
from .._tables import format_table
from ..analysis.plots.base import (
    plot_gate_history,
    plot_gates,
    plot_head_maps,
    plot_heads_per_layer,
    plot_pruning_curve,
)
from ..models.head_settings import GateSettings
from ..models.head_sites import SITE_KINDS
from ..training import StepTimer
from ..training.sharding import whole_model
from .arguments.base import check_names, flag, refuse_flags
from .arguments.train_translation import PRESETS, PruningArguments
from .pictures import draw
from .run import SUMMARY, Run, run_recipe, write_csv
from .summaries.base import rows_table
from .summaries.train_translation import TranslationRow, TranslationSummary
from .summaries.translation import CorpusFacts
from .translation import (
    TranslationCorpus,
    TranslationTrainingArguments,
    evaluate_translator,
    parse_sites,
    prepare_translation_corpus,
    print_examples,
    side_by_side,
    train_translator,
    translation_config,
    write_translation_card,
)


SEQ2SEQ_CLASS = "AutoModelForSeq2SeqLM"
TRANSLATION_METRICS = ("bleu", "exact_match", "nll")
FIGURES = (*TRANSLATION_METRICS, "parameters", "steps")  # of each model
DEFAULT_TIMESCALE = 10_000  # of the schedule inverse_sqrt of Transformers without warm-up


@dataclass
class PruningTrainingArguments(TranslationTrainingArguments):
    """[`TranslationTrainingArguments`] with defaults for training with gates, beside those of the preset.

    `max_steps` is for the dense model. With `lr_scheduler_type` inverse_sqrt, the learning rate continues to fall
    across all phases; other schedules start again for each of `max_steps`, `gate_steps` and `finetune_steps`.
    """

    output_dir: str = flag("runs/train_translation", "Output folder; it must not hold another run.")
    gate_penalty: list[float] | None = flag(
        None, "Instead of keep: penalty coefficients λ of an open head, each for its own copy of the dense model."
    )
    label_smoothing_factor: float = flag(
        0.1, "Fraction of the target probability that training spreads over all tokens."
    )

    without_effect: ClassVar[dict[str, str]] = {
        **TranslationTrainingArguments.without_effect,
        "target_heads": "set keep",
    }

    def used_with(self) -> dict[str, tuple[str, ...]]:
        """Without arguments of a target number of heads, which `keep` is."""
        return {name: targets for name, targets in super().used_with().items() if "target_heads" not in targets}

    def __post_init__(self):
        penalties = self.gate_penalty
        if penalties is not None:
            check_names("gate_penalty", penalties)
        for penalty in penalties or []:
            if not 0 < penalty < float("inf"):
                raise ValueError(f"gate_penalty must be above 0 and finite, got {penalty}.")
        # The parent class checks the λ of one model.
        self.gate_penalty = 0.0
        super().__post_init__()
        self.gate_penalty = penalties
        if penalties is not None:
            refuse_flags(self, dict.fromkeys(("target_warmup", "target_learning_rate"), "gate_penalty has no target"))


def schedule_after(steps: int, training_args: PruningTrainingArguments) -> dict[str, Any]:
    """Training arguments that continue the learning rate schedule after `steps`."""
    if training_args.lr_scheduler_type != "inverse_sqrt":
        return {}
    # At step t, the rate is lr · √(T / (t + T − warm-up)): later starts without warm-up have the same form.
    warmup = training_args.get_warmup_steps(training_args.max_steps)
    timescale = (training_args.lr_scheduler_kwargs or {}).get("timescale") or warmup or DEFAULT_TIMESCALE
    later = max(steps - warmup, 0) + timescale
    return {
        "learning_rate": training_args.learning_rate * (timescale / later) ** 0.5,
        "lr_scheduler_kwargs": {"timescale": later},
        "warmup_steps": 0,
    }


class StopAtBest(TrainerCallback):
    """Stops training when evaluations have not lowered the validation loss for a while.

    It reads the log of the training, which checkpoints hold: a resumed training stops where it would have.

    Args:
        patience (`int`): Number of these evaluations.
    """

    def __init__(self, patience: int):
        self.patience = patience

    def on_evaluate(self, args, state, control, **kwargs):
        losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
        if losses and len(losses) - 1 - losses.index(min(losses)) >= self.patience:
            control.should_training_stop = True

    # A training that was stopped here is over, too, when it is resumed.
    on_train_begin = on_evaluate


def train_to_best(
    name: str,
    model: PreTrainedModel,
    steps: int,
    args: PruningArguments,
    training_args: PruningTrainingArguments,
    corpus: TranslationCorpus,
    callbacks: Sequence[TrainerCallback] = (),
    **settings: Any,
) -> tuple[HeadwiseSeq2SeqTrainer, int]:
    """Trains a model for some steps, with `--early_stopping_patience` until the validation loss stops falling.

    Returns:
        `tuple[HeadwiseSeq2SeqTrainer, int]`: the trainer, and the number of steps up to the weights of its model.
    """
    if args.early_stopping_patience is None:
        trainer = train_translator(name, model, steps, training_args, corpus, [*callbacks], **settings)
        return trainer, steps
    every = training_args.eval_steps or training_args.save_steps
    settings |= {
        "eval_strategy": "steps",
        "eval_steps": every,
        "save_strategy": "steps",
        "save_steps": every,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
    }
    stopping = StopAtBest(args.early_stopping_patience)
    trainer = train_translator(name, model, steps, training_args, corpus, [*callbacks, stopping], **settings)
    return trainer, trainer.state.best_global_step or trainer.state.global_step


def prune_translator(
    name: str,
    penalty: float | None,
    keep: int | None,
    dense_steps: int,
    args: PruningArguments,
    training_args: PruningTrainingArguments,
    corpus: TranslationCorpus,
) -> tuple[HeadwiseSeq2SeqTrainer, int]:
    """Trains a copy of the dense model with gates, prunes its closed heads, and fine-tunes it.

    Returns:
        `tuple[HeadwiseSeq2SeqTrainer, int]`: the trainer, and the number of steps up to the weights of its model, with
        those of the dense model.
    """
    folder = Path(training_args.output_dir)
    stage = folder / "checkpoints" / f"{name}-gates"
    encoder_only = set(args.gate_sites) == {"encoder"}
    freeze = encoder_only if training_args.freeze_decoder is None else training_args.freeze_decoder
    shared = {"freeze_decoder": freeze, "guidance_weight": 0.0}
    if not (stage / "gates.json").is_file():
        set_seed(training_args.seed)
        gates = {kind: {"variant": args.gate_variant} for kind in args.gate_sites}
        model = headwise_model(folder / "dense", SEQ2SEQ_CLASS, guidance=None).add_gates(gates)
        history = GateHistory(every=max(1, args.gate_steps // 100))
        target = {"target_heads": keep} if penalty is None else {"gate_penalty": penalty}
        schedule = schedule_after(dense_steps, training_args)
        trainer = train_translator(
            stage.name, model, args.gate_steps, training_args, corpus, [history], **target, **schedule, **shared
        )
        trainer.prune()
        trainer.save_model(str(stage / "pruned"))
        if trainer.is_world_process_zero():
            history.save(stage / "gates.json")
        PartialState().wait_for_everyone()
    set_seed(training_args.seed)
    model = headwise_model(stage / "pruned", SEQ2SEQ_CLASS)
    gated_steps = dense_steps + args.gate_steps
    schedule = schedule_after(gated_steps, training_args)
    trainer, steps = train_to_best(name, model, args.finetune_steps, args, training_args, corpus, **schedule, **shared)
    return trainer, gated_steps + steps


def evaluate_with_heads(
    model: PreTrainedModel,
    method: str,
    args: PruningArguments,
    training_args: PruningTrainingArguments,
    corpus: TranslationCorpus,
) -> dict[str, Any]:
    """Results of one model, with its heads and some translations."""
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
        **evaluate_translator(model, args, training_args, corpus),
    }


def relevance_of_heads(
    trainer: HeadwiseSeq2SeqTrainer, args: PruningArguments, corpus: TranslationCorpus
) -> dict[str, list[list[float]]] | None:
    """Relevance of the heads for the predictions of a translator, `{kind: [layer][head]}`; `None` if not wanted."""
    if not args.relevance_examples:
        return None
    model = whole_model(trainer.accelerator.unwrap_model(trainer.model))
    # They are sorted by length.
    pairs = corpus.validation.shuffle(seed=trainer.args.seed).take(
        min(args.relevance_examples, len(corpus.validation))
    )

    def make() -> dict[str, list[list[float]]]:
        collator = DataCollatorForSeq2Seq(corpus.tokenizer, model=model)
        batches = DataLoader(pairs, trainer.args.per_device_eval_batch_size, collate_fn=collator)
        return head_relevance(model, batches, rule="alpha_beta", progress=not trainer.args.disable_tqdm).to_dict()

    return from_main_process(make)


def prepare(
    args: PruningArguments, training_args: PruningTrainingArguments
) -> tuple[HeadwiseMarianConfig, TranslationCorpus, CorpusFacts, list[tuple[str, float | None, int | None]]]:
    """Configuration and corpus; and name, λ and number of heads of each pruned model."""
    if args.keep and training_args.gate_penalty:
        raise ValueError(
            f"keep={args.keep} and gate_penalty={training_args.gate_penalty} exclude each other; give one of them."
        )
    if args.guidance is None and training_args.guidance_weight not in (None, 0):
        raise ValueError(f"guidance_weight={training_args.guidance_weight} needs --guidance.")
    layers = {"encoder": args.encoder_layers, "decoder": args.decoder_layers, "cross": args.decoder_layers}
    total = args.num_attention_heads * sum(layers[kind] for kind in args.gate_sites)
    halved = [total // 2, total // 4] if total > 3 else [1]
    keep = [] if training_args.gate_penalty else args.keep or halved
    if max(keep, default=0) >= total:
        sites = ", ".join(args.gate_sites)
        raise ValueError(
            f"keep={max(keep)}, but the gated sites ({sites}) have {total} heads; keep fewer, or add gate_sites."
        )
    corpus, facts = prepare_translation_corpus(args, training_args)
    config = translation_config(args, corpus, guidance=parse_sites("guidance", args.guidance))
    wanted = [(str(number), None, number) for number in keep]
    wanted += [(f"penalty-{penalty:g}", penalty, None) for penalty in training_args.gate_penalty or []]
    return config, corpus, facts, wanted


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
        model = HeadwiseMarianMTModel(config)
        trainer, taken = train_to_best(
            "dense", model, steps["dense"], args, training_args, corpus, [timer], freeze_decoder=False
        )
        row = evaluate_with_heads(trainer.model, "dense", args, training_args, corpus)
        figures = {"steps": taken, "seconds_per_step": timer.figures()["seconds_per_step"]}
        return {**row, **figures, "relevance": relevance_of_heads(trainer, args, corpus)}, trainer, "dense"

    def make_pruned(name: str, penalty: float | None, keep: int | None):
        trainer, taken = prune_translator(f"model-{name}", penalty, keep, dense["steps"], args, training_args, corpus)
        row = evaluate_with_heads(trainer.model, "pruned", args, training_args, corpus)
        return {**row, "gate_penalty": penalty, "steps": taken}, trainer, f"model-{name}"

    def make_from_scratch(name: str, penalty: float | None):
        pruned = AutoConfig.from_pretrained(folder / f"model-{name}")
        pruned.guidance = copy.deepcopy(config.guidance)
        set_seed(training_args.seed)
        settings = {
            "freeze_decoder": False,
            "warmup_steps": training_args.get_warmup_steps(training_args.max_steps),
        }
        model = HeadwiseMarianMTModel(pruned)
        trainer, taken = train_to_best(
            f"scratch-{name}", model, steps["from_scratch"], args, training_args, corpus, **settings
        )
        row = evaluate_with_heads(trainer.model, "from scratch", args, training_args, corpus)
        return {**row, "gate_penalty": penalty, "steps": taken}, trainer, None

    def once(method: str, name: str, make: Callable) -> dict[str, Any]:
        # Runs of earlier versions, which may be resumed, take all steps and do not record them.
        return {"steps": steps[method], **run.once(name, make)}

    dense = once("dense", "dense", make_dense)
    pruned = {
        name: once("pruned", f"model-{name}", partial(make_pruned, name, penalty, keep))
        for name, penalty, keep in wanted
    }
    scratch = {
        name: once("from_scratch", f"scratch-{name}", partial(make_from_scratch, name, penalty))
        for name, penalty, _ in wanted
        if args.from_scratch
    }
    summary = summarise(dense, pruned, scratch, args, facts)
    return run.finish(
        summary,
        lambda: publish(dense, pruned, scratch, summary, args, folder, wanted),
        lambda: print_report(summary, [f"model-{name}" for name in pruned], folder),
        pushed=f"model-{wanted[0][0]}",
    )


def translation_row(row: dict[str, Any]) -> TranslationRow:
    values = {key: row[key] for key in ("method", "gate_penalty", "heads", *FIGURES)}
    mean_layers = {kind: mean_layer(counts) for kind, counts in row["layers"].items() if any(counts)}
    heads_at = {kind: row[f"heads_{kind}"] for kind in SITE_KINDS}
    return TranslationRow(**values, heads_at=heads_at, mean_layer_at=mean_layers)


def mean_layer(counts: list[int]) -> float:
    """Mean layer of the heads of a kind of site, from their number in each layer."""
    return sum(layer * count for layer, count in enumerate(counts)) / sum(counts)


def summarise(
    dense: dict,
    pruned: dict[str, dict],
    scratch: dict[str, dict],
    args: PruningArguments,
    facts: CorpusFacts,
) -> TranslationSummary:
    name, first = next(iter(pruned.items()))
    models = {"dense": dense, "pruned": first, **({"from_scratch": scratch[name]} if name in scratch else {})}
    return TranslationSummary(
        **{key: {model: row[key] for model, row in models.items()} for key in FIGURES},
        heads_total=dense["heads"],
        heads_kept=first["heads"],
        heads_at={kind: first[f"heads_{kind}"] for kind in SITE_KINDS},
        seconds_per_step_dense=dense["seconds_per_step"],
        rows=[translation_row(row) for row in (dense, *pruned.values(), *scratch.values())],
        num_beams=args.num_beams,
        relevance=dense.get("relevance"),
        relevance_largest=relevance_of_layers(dense, max),
        relevance_median=relevance_of_layers(dense, statistics.median),
        examples=side_by_side({"dense": dense, "pruned": first}),
        corpus=facts,
    )


def relevance_of_layers(dense: dict[str, Any], of_layer: Callable[[list[float]], float]) -> dict[str, float] | None:
    """A value of the relevance of the heads of each layer, mean over the layers of each kind of site."""
    if dense.get("relevance") is None:
        return None
    return {kind: statistics.fmean(map(of_layer, layers)) for kind, layers in dense["relevance"].items()}


def publish(
    dense: dict,
    pruned: dict[str, dict],
    scratch: dict[str, dict],
    summary: TranslationSummary,
    args: PruningArguments,
    folder: Path,
    wanted: list[tuple[str, float | None, int | None]],
) -> None:
    """Writes the table and the pictures, and a card for each model."""
    write_table(dense, pruned, scratch, folder / "table.csv")
    title, total = summary.corpus.text, summary.heads_total
    rows = [
        {"method": row["method"], "heads": row["heads"], "BLEU": row["bleu"]}
        for row in (*pruned.values(), *scratch.values())
    ]
    draw(plot_pruning_curve, folder / "curve.png", rows, title, "BLEU", dense["bleu"], total)
    layers = {f"{row['heads']} heads" if row["gate_penalty"] is None else f"λ = {row['gate_penalty']:g}": row["layers"]
              for row in pruned.values()}  # fmt: skip
    draw(plot_heads_per_layer, folder / "heads.png", layers, total=args.num_attention_heads, title=title)
    name, penalty, keep = wanted[0]
    history = GateHistory.load(folder / "checkpoints" / f"model-{name}-gates" / "gates.json")
    gated = {kind: sum(dense["layers"][kind]) for kind in args.gate_sites}
    of_all = {"total": gated, "target": keep, "settled_heads": history.settled_heads}
    draw(plot_gate_history, folder / "gate_history.png", history.steps, history.open_heads, title, **of_all)
    last = {kind: np.asarray(records[-1]) for kind, records in history.log_alpha.items()}
    aim = f"λ = {penalty:g}" if keep is None else f"target: {keep} of {total} heads"
    threshold = GateSettings.from_dict({"variant": args.gate_variant}).threshold
    draw(plot_gates, folder / "gates.png", last, f"{title}; {aim}", threshold=threshold)

    if dense.get("relevance") is not None:
        relevance = {kind: np.asarray(layers) for kind, layers in dense["relevance"].items()}
        draw(plot_head_maps, folder / "relevance.png", {"all heads": relevance}, "relevance in the layer", title=title)

    every = sum(map(sum, dense["layers"].values()))
    for model, row in {"dense": dense, **{f"model-{name}": row for name, row in pruned.items()}}.items():
        left = sum(map(sum, row["layers"].values()))
        how = f"all {every} attention heads" if row is dense else f"{left} of {every} attention heads"
        rest = "" if row is dense else (
            f" Gates ({', '.join(args.gate_sites)}) learnt which heads to keep; it was fine-tuned after the others "
            "were removed."
        )  # fmt: skip
        write_translation_card(
            folder / model,
            args,
            summary,
            {
                **{key: row[key] for key in TRANSLATION_METRICS},
                **({} if row is dense else {"bleu_dense": dense["bleu"]}),
            },
            name=f"translation Transformer, {how}",
            description=f"An encoder–decoder with {how}, trained to translate.{rest}",
            config=AutoConfig.from_pretrained(folder / model),
            methods=[] if row is dense else ["gates"],
        )


def write_table(dense: dict, pruned: dict[str, dict], scratch: dict[str, dict], path: Path) -> None:
    """Writes one line per choice of heads, with results from the trained model and from scratch side by side."""
    lines = [
        {
            "model": name,
            **{f"heads_{kind}": row[f"heads_{kind}"] for kind in SITE_KINDS},
            "gate_penalty": row["gate_penalty"],
            **{f"{key}_from_trained": row[key] for key in TRANSLATION_METRICS},
            **{f"{key}_from_scratch": scratch.get(name, {}).get(key) for key in TRANSLATION_METRICS},
            "parameters": row["parameters"],
        }
        for name, row in {"dense": dense, **pruned}.items()
    ]
    write_csv(path, lines)


def print_report(summary: TranslationSummary, models: list[str], folder: Path) -> None:
    print("\n" + format_table(*rows_table(summary.rows)))
    print_examples(summary.examples)
    folders = ", ".join(f"{name}/" for name in ("dense", *models))
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv, curve.png, {folders}.")


if __name__ == "__main__":
    run_recipe(main, PRESETS, TranslationSummary)
