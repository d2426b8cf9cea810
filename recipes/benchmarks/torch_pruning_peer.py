# Licensed under the Apache License, Version 2.0.
"""How good and how fast Torch-Pruning leaves a classifier, beside `prune_heads` with the same FLOPs and training.

    python recipes/benchmarks/torch_pruning_peer.py --run runs/sst2-2x --output_dir runs/peer-2x
    python recipes/benchmarks/torch_pruning_peer.py --run runs/sst2-2x --importance taylor taylor_global

`--run` is the output folder of a finished run of `recipes/prune_heads.py` on texts with classes, started from the same
working directory. Its dense model, texts, trainer settings, teacher and seed are used again. Torch-Pruning removes
attention heads and feed-forward units of the dense model, ranked over all layers (`global_pruning`, `isomorphic`), the
same fraction of both; a search finds the smallest fraction with at most the FLOPs of a model of the run, or those of
`--flops`. The importance is relative to the mean of the layer, as by default in Torch-Pruning (`taylor`, `magnitude`),
or not (`taylor_global`). What is left is trained for as many epochs as the models of the run after the dense one.

Dense models, models of the run and models of Torch-Pruning take turns in each round, in a process that has not trained
them; speed-ups are ratios of medians.
Torch-Pruning is no dependency: `pip install torch-pruning`.

Keys of `summary.json`: `rows`, one for each model, with the `system` (dense, package or torch_pruning), the `method`
and the `goal`, `{metric}` and `{metric}_untrained` (before training), `flops_ratio` at the first shape, `parameters`,
`heads` and `units` by layer, `speedup_SHAPE`, and `loading_error`, what `from_pretrained` of Transformers says about
the checkpoint, without the plugin for models of Torch-Pruning and the dense one, with it for models of the run (null:
it loads); facts of the run; and the settings.
"""

import contextlib
import copy
import importlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from benchmarking import BenchmarkArguments, in_new_process, parse_shapes, write_summary
from torch import nn
from transformers import PreTrainedModel, set_seed
from transformers.utils import logging

from hf_attn_dynamics import headwise_model
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.analysis.heads.measuring import (
    Inputs,
    alternating_times,
    count_flops,
    example_inputs,
)
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.unit_roles import locate_units
from hf_attn_dynamics.recipes.arguments.base import check_names, flag
from hf_attn_dynamics.recipes.arguments.parsing import parse_yaml_or_flags
from hf_attn_dynamics.recipes.arguments.prune_heads import PruneArguments
from hf_attn_dynamics.recipes.prune_heads import PruneTrainingArguments, Pruning, prepare, train_epochs
from hf_attn_dynamics.recipes.pruning_tasks import PRUNING_TASKS
from hf_attn_dynamics.recipes.run import CONFIG, read_summaries, run_recipe


TASK = "text-classification"
# Classes of Torch-Pruning and their settings, by the values of --importance. By default, they divide the importance of
# heads and units by the mean of their layer, which leaves all layers about equally large.
IMPORTANCE = {
    "taylor": ("GroupTaylorImportance", {}),
    "taylor_global": ("GroupTaylorImportance", {"normalizer": None}),
    "magnitude": ("GroupMagnitudeImportance", {}),
}
SEARCH_STEPS = 12


@dataclass
class PeerArguments(BenchmarkArguments):
    """The run to compare with, and what Torch-Pruning does."""

    run: str = flag("runs/prune_heads", "Output folder of a finished run of prune_heads on texts with classes.")
    flops: list[float] | None = flag(
        None, "FLOPs to keep, as fractions of those of the dense model; by default those of each model of the run."
    )
    importance: list[str] = flag(["taylor"], f"Importance in Torch-Pruning: {', '.join(IMPORTANCE)}.")
    shapes: list[str] = flag(
        ["8x128", "1x32"], "Batches to time, as SENTENCESxTOKENS; FLOPs are those of the first one."
    )
    rounds: int = flag(20, "Number of measured turns of each model.")
    cpu_threads: int | None = flag(None, "Number of CPU threads; all cores by default.", earlier="threads")
    seed: int | None = flag(None, "Random seed of the training; by default the seed of the run.")

    def __post_init__(self):
        super().__post_init__()
        check_names("importance", self.importance, IMPORTANCE)
        parse_shapes(self.shapes)
        if self.flops is not None:
            check_names("flops", self.flops)
        for fraction in self.flops or ():
            if not 0 < fraction < 1:
                raise ValueError(f"flops must be greater than 0 and less than 1, got {fraction}.")


@dataclass
class Pruned:
    """A model, and what is known of it; `goal` and `method` are empty for the dense model."""

    system: str
    method: str
    goal: str
    model: PreTrainedModel
    value: float | None = None
    untrained: float | None = None
    loading_error: str | None = None
    more: dict[str, Any] = field(default_factory=dict)


def import_peer() -> ModuleType:
    """Torch-Pruning.

    Raises:
        ValueError: if it cannot be imported.
    """
    try:
        return importlib.import_module("torch_pruning")
    except ImportError as error:
        raise ValueError(f"Torch-Pruning is not installed here ({error}); pip install torch-pruning.") from error


def read_run(args: PeerArguments, folder: Path) -> tuple[Pruning, dict[str, Any], dict[str, Any]]:
    """The frame of a run of `prune_heads`, whose trainers write to `folder`; facts of its data, and its summary."""
    [summary] = read_summaries([args.run])
    if summary.get("task") != TASK:
        raise ValueError(
            f"run {args.run} is one of task {summary.get('task')}, but only {TASK} is compared; name another run."
        )
    settings = Path(args.run) / CONFIG
    run_args, training_args = parse_yaml_or_flags(PruneArguments, PruneTrainingArguments, argv=[str(settings)])
    run_args.model = str(Path(args.run) / "dense")
    training_args.output_dir = str(folder)
    if args.seed is not None:
        training_args.seed = args.seed
    task = PRUNING_TASKS[TASK](run_args)
    _, data, scored, facts = prepare(task, run_args, training_args)
    return Pruning(task, Path(args.run), run_args, training_args, data, scored), facts, summary


def gradients_of(pruning: Pruning) -> dict[str, torch.Tensor | None]:
    """Gradients of the dense model, summed over batches of training examples, by the names of the parameters."""
    model = pruning.dense().eval()
    for batch in pruning.examples():
        model(**batch).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class TorchPruning:
    """Prunes copies of a dense model with Torch-Pruning.

    Args:
        dense (`PreTrainedModel`): The dense model.
        gradients (`dict[str, torch.Tensor]`): Its gradients, see [`gradients_of`].
        inputs (`dict`): Inputs of which FLOPs are counted.
    """

    def __init__(self, dense: PreTrainedModel, gradients: Mapping[str, torch.Tensor | None], inputs: Inputs):
        self.peer = import_peer()
        self.dense, self.gradients, self.inputs = dense, gradients, inputs

    def prune(self, importance: str, ratio: float) -> PreTrainedModel:
        """A copy without a fraction of the heads and units."""
        model = copy.deepcopy(self.dense).eval()
        for name, parameter in model.named_parameters():
            parameter.grad = self.gradients[name]
        inputs_of_units = {module for layer in locate_units(model) for module in layer.inputs.values()}
        num_heads = {module: layer.num_heads for layer in locate_heads(model) for module in projections(layer)}
        # The residual stream keeps its size: only outputs of these projections are removed.
        kept = [
            module
            for module in model.modules()
            if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding))
            and module not in inputs_of_units
            and module not in num_heads
        ]
        name, settings = IMPORTANCE[importance]
        pruner = self.peer.pruner.BasePruner(
            model,
            self.inputs,
            importance=getattr(self.peer.importance, name)(**settings),
            global_pruning=True,
            # Heads and units are ranked apart.
            isomorphic=True,
            pruning_ratio=ratio,
            head_pruning_ratio=ratio,
            num_heads=num_heads,
            prune_num_heads=True,
            prune_head_dims=False,
            ignored_layers=kept,
            output_transform=lambda output: output.logits,
        )
        pruner.step()
        model.zero_grad()
        return model

    def prune_to(self, importance: str, fraction: float) -> PreTrainedModel:
        """A copy with as many heads and units as a fraction of the FLOPs allows.

        Raises:
            ValueError: if Torch-Pruning leaves more FLOPs than that.
        """
        dense = flops_of(self.dense, self.inputs)
        low, high, found = 0.0, 1.0, {}
        for _ in range(SEARCH_STEPS):
            ratio = (low + high) / 2
            model = self.prune(importance, ratio)
            left = flops_of(model, self.inputs) / dense
            low, high = (low, ratio) if left <= fraction else (ratio, high)
            found[left] = model
        reached = [left for left in found if left <= fraction]
        if not reached:
            raise ValueError(
                f"Torch-Pruning leaves at least {min(found):.1%} of the FLOPs, more than {fraction:.1%}; give larger "
                "--flops."
            )
        return found[max(reached)]


def projections(layer: Any) -> list[nn.Module]:
    """Query, key and value projections of a layer."""
    return [
        module for module in layer.module.modules() if isinstance(module, nn.Linear) and module is not layer.output
    ]


def flops_of(model: PreTrainedModel, inputs: Inputs) -> int:
    with torch.inference_mode():
        return count_flops(model, inputs)


def sizes(model: PreTrainedModel) -> dict[str, Any]:
    """Heads and units by layer, and number of parameters, from the weights: Torch-Pruning records nothing.

    Its own counts of heads are wrong where it would remove all heads of a layer, and then removes none.
    """
    heads = [layer.output.weight.shape[1] // layer.head_dim if has_inputs(layer.output) else 0
             for layer in locate_heads(model)]  # fmt: skip
    units = [layer.output.weight.shape[1] if has_inputs(layer.output) else 0 for layer in locate_units(model)]
    return {"parameters": sum(p.numel() for p in model.parameters()), "heads": heads, "units": units}


def has_inputs(output: nn.Module) -> bool:
    """Whether an output projection is one: those of empty blocks only have a bias."""
    return getattr(output, "weight", None) is not None


def loading_error(model: PreTrainedModel, load: Any) -> str | None:
    """What `load` says about a checkpoint of a model; `None` if it loads."""
    with tempfile.TemporaryDirectory() as folder, without_reports():
        model.save_pretrained(folder)
        try:
            load(folder)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


@contextlib.contextmanager
def without_reports() -> Iterator[None]:
    """Context without the reports of Transformers about weights that do not fit."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def stock_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class of Transformers that a headwise class extends."""
    return next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers."))


def speedups(models: list[Pruned], args: PeerArguments) -> None:
    """Measures all models, the first of which is the dense one, in a process that has not trained any."""
    # Mixed precision of the trainer is a wrapper around the forward pass.
    plain = [without_hooks(extract_model_from_parallel(one.model, keep_fp32_wrapper=False)) for one in models]
    measured = copy.copy(args)
    measured.cpu_threads = torch.get_num_threads()
    seconds = in_new_process(median_seconds, measured, plain)
    for shape, (dense, *others) in seconds.items():
        for one, own in zip(models, (dense, *others)):
            one.more[f"speedup_{shape}"] = dense / own


def without_hooks(model: PreTrainedModel) -> PreTrainedModel:
    """A copy without forward hooks, such as those of Transformers for hidden states, which cannot be pickled."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, hooks in vars(module).items():
            if name.startswith("_forward_") and isinstance(hooks, dict):
                hooks.clear()
    return model


def median_seconds(args: PeerArguments, models: list[PreTrainedModel]) -> dict[str, list[float]]:
    """Median times of models, which take turns, by shape of the batch."""
    seconds = {}
    with torch.inference_mode():
        for shape, (batch, length) in zip(args.shapes, parse_shapes(args.shapes)):
            inputs = example_inputs(models[0], batch, length)
            makers = [lambda inputs=inputs: inputs] * len(models)
            times = alternating_times(models, makers, args.rounds, models[0].device)
            seconds[shape] = [statistics.median(own) for own in times]
    return seconds


def value_of(pruning: Pruning, model: PreTrainedModel) -> float:
    """The metric of a model on the validation texts."""
    trainer = train_epochs(model, "evaluation", 0, pruning.training_args, pruning.data)
    return pruning.task.value(trainer.evaluate())


def prune_by_peer(pruning: Pruning, peer: TorchPruning, importance: str, goal: str, fraction: float) -> Pruned:
    """A model of Torch-Pruning, trained as those of the run."""
    model = peer.prune_to(importance, fraction)
    error = loading_error(model, stock_class(model).from_pretrained)
    untrained = value_of(pruning, model)
    set_seed(pruning.training_args.seed)
    epochs = pruning.args.gate_epochs + pruning.args.finetune_epochs
    trainer = pruning.train(model, f"{importance} {goal}", epochs)
    value = pruning.task.value(trainer.evaluate())
    return Pruned("torch_pruning", importance, goal, trainer.model, value, untrained, error)


def compare(args: PeerArguments, pruning: Pruning, method: str) -> list[Pruned]:
    """The dense model, models of the run, and those of Torch-Pruning."""
    dense, auto_class = pruning.dense().eval(), pruning.task.auto_class
    batch, length = parse_shapes(args.shapes)[0]
    inputs = example_inputs(dense, batch, length)
    whole = flops_of(dense, inputs)
    error = loading_error(dense, stock_class(dense).from_pretrained)
    models = [Pruned("dense", "", "", dense, value_of(pruning, dense), loading_error=error)]
    for folder in sorted(Path(args.run).glob("model-*/")):
        model = headwise_model(folder, auto_class)
        error = loading_error(model, partial(headwise_model, auto_class=auto_class))
        goal = folder.name.removeprefix("model-")
        models.append(Pruned("package", method, goal, model, value_of(pruning, model), loading_error=error))
    goals = (
        {one.goal: flops_of(one.model, inputs) / whole for one in models[1:]}
        if args.flops is None
        else {f"{fraction:.1%}": fraction for fraction in args.flops}
    )
    peer = TorchPruning(dense, gradients_of(pruning), inputs)
    models += [
        prune_by_peer(pruning, peer, importance, goal, fraction)
        for importance in args.importance
        for goal, fraction in goals.items()
    ]
    for one in models:
        one.model.eval()
        one.more = {"flops_ratio": flops_of(one.model, inputs) / whole, **sizes(one.model)}
    speedups(models, args)
    return models


def main(args: PeerArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    with tempfile.TemporaryDirectory() as folder:
        with refuse_bad_input():
            import_peer()
            pruning, facts, summary = read_run(args, Path(folder))
        args.seed = pruning.training_args.seed
        with refuse_bad_input():
            models = compare(args, pruning, summary["importance"])
    metric, settings = pruning.task.metric, pruning.training_args
    rows = [
        {
            "system": one.system,
            "method": one.method,
            "goal": one.goal,
            metric: one.value,
            f"{metric}_untrained": one.untrained,
            **one.more,
            "loading_error": one.loading_error,
        }
        for one in models
    ]
    shown = [key for key in rows[0] if key not in ("heads", "units", "loading_error")]
    cells = [[*(row[key] for key in shown), sum(row["heads"]), sum(row["units"])] for row in rows]
    print(format_table([*(key.replace("_", " ") for key in shown), "heads", "units"], cells))
    for row in rows:
        if row["loading_error"]:
            print(f"{row['system']} {row['method']} {row['goal']} does not load: {row['loading_error']}")
    return write_summary(
        args,
        {
            "rows": rows,
            "metric": metric,
            **{key: facts[key] for key in ("train_examples", "eval_examples", "text")},
            "epochs": pruning.args.gate_epochs + pruning.args.finetune_epochs,
            **{key: getattr(settings, key) for key in ("distillation_weight", "hidden_distillation_weight")},
            "torch_pruning_version": version("torch-pruning"),
        },
    )


if __name__ == "__main__":
    run_recipe(main)
