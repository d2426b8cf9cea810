# Licensed under the Apache License, Version 2.0.
"""Results of `prune_heads`: measurements, summary, table, pictures and cards."""

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from .. import GateHistory, HeadReport, HeadwiseTrainingArguments, head_report, headwise_model
from .._processes import from_main_process
from .._tables import format_table
from ..analysis.plots.base import plot_gate_history, plot_gates, plot_heads_per_layer, plot_pruning_curve
from ..analysis.plots.parts import plot_parts_per_layer, plot_speedup_curve
from ..hub.card import Metric, write_model_card
from ..models.head_settings import GateSettings
from .arguments.prune_heads import PruneArguments
from .new_process import in_new_process
from .pictures import draw
from .pruning_goals import Goal, HeadGoal, SpeedupGoal
from .pruning_tasks import PruningTask
from .run import SUMMARY, write_csv
from .summaries.base import rows_table
from .summaries.prune_heads import PrunedRow, PruneSummary


LATENCY_TABLE = "latency_table.json"
# Methods in sentences.
CHOSEN_BY = {
    "michel": "importance",
    "fisher": "Fisher information",
    "margin": "their effect on the margin",
    "random": "chance",
}


def measure_saved(
    model: Path, dense: Path, auto_class: str, requests: Sequence[tuple[int, int | None, str]], threads: int
) -> list[HeadReport]:
    """Reports of a saved model on the CPU.

    Args:
        model, dense (`Path`): Folders of the pruned model and of the dense one.
        auto_class (`str`): Auto class of both.
        requests (`list[tuple[int, int, str]]`): Batch size, length and phase of each report, see [`head_report`].
        threads (`int`): Number of CPU threads.
    """
    logging.disable_progress_bar()
    pruned, whole = (headwise_model(folder, auto_class) for folder in (model, dense))
    return [
        head_report(pruned, batch=batch, length=length, dense=whole, phase=phase, threads=threads)
        for batch, length, phase in requests
    ]


class Measurements:
    """Reports of pruned models beside the dense one, each measured by one process for all.

    On CPUs, this is a new process: passes of small models take up to a tenth longer in one that has trained, the
    pruned model more so than the dense one.

    Args:
        dense (`Path`): Folder of the dense model.
        auto_class (`str`): Auto class of the models.
    """

    def __init__(
        self,
        dense: Path,
        auto_class: str,
        args: PruneArguments,
        training_args: HeadwiseTrainingArguments,
    ):
        self._dense, self._class_name = dense, auto_class
        self._device, self._is_decoder = training_args.device, args.task == "causal-lm"
        self._shape = training_args.latency_batch, training_args.latency_length
        self._more_shapes = args.more_shapes()

    def reports(self, model: PreTrainedModel, *requests: tuple[int, int | None, str]) -> list[HeadReport]:
        """A report for each batch size, length and phase."""

        def make() -> list[HeadReport]:
            if self._device.type != "cpu":
                dense = headwise_model(self._dense, self._class_name)
                return [
                    head_report(model, batch=batch, length=length, device=self._device, dense=dense, phase=phase)
                    for batch, length, phase in requests
                ]
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                threads = torch.get_num_threads()
                saved = Path(folder)
                return in_new_process(measure_saved, saved, self._dense, self._class_name, requests, threads)

        return from_main_process(make)

    def first(self, model: PreTrainedModel) -> HeadReport:
        """Report on batches of the goal."""
        [report] = self.reports(model, (*self._shape, "forward"))
        return report

    def speedup(self, model: PreTrainedModel) -> float:
        """Speed-up on batches of the goal."""
        return 1 / self.first(model).latency_ratio

    def results(self, model: PreTrainedModel, goal: SpeedupGoal) -> dict[str, Any]:
        """Speed-ups of a model on all batches, and what is left of it."""
        requests = [(*shape, "forward") for shape in (self._shape, *self._more_shapes)]
        if self._is_decoder:
            batch, length = self._shape
            # One position is for the token that is decoded.
            requests.append((batch, length - 1, "decode"))
        reports = self.reports(model, *requests)
        first, *more = reports[: len(self._more_shapes) + 1]
        decoding = {}
        if self._is_decoder:
            report = reports[-1]
            decoding = {"decoding_speedup": 1 / report.latency_ratio, "cache_bytes": report.cache_bytes_pruned}
        return decoding | {
            "target": goal.speedup,
            "speedup": 1 / first.latency_ratio,
            "more_speedups": {report_name(report): 1 / report.latency_ratio for report in more},
            "predicted_speedup": goal.table.speedup_of(model),
            "speedup_of_ideal": first.latency_of_ideal,
            "units": first.units_kept,
            "blocks": first.blocks_kept,
            "bytes": first.bytes_pruned,
            "units_of_layers": first.units,
            "report": dataclasses.asdict(first),
        }


def report_name(report: Any) -> str:
    """Batch size and length of a report, such as `1x32`."""
    return f"{report.batch}x{report.length}" if report.length is not None else str(report.batch)


@dataclass(frozen=True)
class PruningResults:
    """What a run has found, its summary, table, pictures and cards.

    Attributes:
        dense (`dict`): Results of the dense model.
        rows (`list[dict]`): Results of the pruned models, those of a method in the order of the goals.
        report ([`HeadReport`]): Measurements of the model that reached the first goal in the first way.
    """

    task: PruningTask
    args: PruneArguments
    folder: Path
    goals: list[Goal]
    dense: dict[str, Any]
    rows: list[dict[str, Any]]
    report: HeadReport

    @property
    def is_of_speed(self) -> bool:
        """Whether the goals are speed-ups."""
        return isinstance(self.goals[0], SpeedupGoal)

    @property
    def chosen(self) -> list[dict[str, Any]]:
        """Results of the models that are saved, one for each goal."""
        return [row for row in self.rows if row["method"] == self.args.importance[0]]

    def summary(self, facts: dict[str, Any]) -> PruneSummary:
        """The summary of the run, without its provenance."""
        first, metric, report = self.rows[0], self.task.metric, self.report.to_dict()
        scratch = [row[metric] for row in self.rows if row["method"] == "from scratch"]
        of_speed = {}
        if self.is_of_speed:
            of_speed = {
                "units_total": self.report.units_total,
                "units_kept": self.report.units_kept,
                "target_speedup": [goal.speedup for goal in self.goals],
                "largest_speedups": self.goals[0].table.largest_speedup(),
            }
        return PruneSummary(
            metric=metric,
            heads_total=self.dense["heads"],
            heads_kept=first["heads"],
            metric_dense=self.dense[metric],
            metric_pruned=first[metric],
            metric_from_scratch=scratch[0] if scratch else None,
            parameters={kind: report[f"parameters_{kind}"] for kind in ("dense", "pruned")},
            bytes={kind: report[f"bytes_{kind}"] for kind in ("dense", "pruned")},
            **{key: report[key] for key in ("flops_ratio", "latency_ratio", "latency_of_ideal")},
            latency={key: report[key] for key in ("device", "threads", "batch", "length")},
            rows=[self._row(row) for row in self.rows],
            **of_speed,
            **facts,
        )

    def publish(self, summary: PruneSummary) -> None:
        """Writes the table, the pictures and the card of each model."""
        header, lines = self._table(summary)
        write_csv(self.folder / "curve.csv", [dict(zip(header, line)) for line in lines])
        title = f"{self.task.model_name}; {summary.text}"
        if self.is_of_speed:
            self._draw_speedups(title)
        else:
            self._draw_heads(title)
        if "gates" in self.args.importance:
            self._draw_gates(title)
        for row, goal in [(self.dense, None), *zip(self.chosen, self.goals)]:
            self._write_card(row, goal, summary)

    def print(self, summary: PruneSummary) -> None:
        """Prints the table and where everything is."""
        print("\n" + format_table(*self._table(summary)))
        latency = summary.latency
        length = f" × {latency['length']}" * (latency["length"] is not None)
        units = f" and {summary.units_kept} of {summary.units_total} units" * (summary.units_total is not None)
        print(
            f"\n{summary.heads_kept} of {summary.heads_total} heads{units}: {summary.latency_ratio:.0%} of the time "
            f"(batch {latency['batch']}{length}, {latency['threads']} threads, {latency['device']}), "
            f"{summary.parameters['pruned'] / summary.parameters['dense']:.0%} of the parameters."
        )
        models = ", ".join(["dense/", *(f"model-{goal.name}/" for goal in self.goals)])
        print(f"Everything is in {self.folder}: {SUMMARY}, curve.csv, curve.png, {models}.")

    def _row(self, results: dict[str, Any]) -> PrunedRow:
        names = (
            "method", "heads", "loss", "parameters", "target", "speedup", "more_speedups", "predicted_speedup",
            "speedup_of_ideal", "units", "blocks", "untrained", "bytes", "decoding_speedup", "cache_bytes",
        )  # fmt: skip
        values = {key: results[key] for key in names if key in results}
        return PrunedRow(metric=self.task.metric, value=results[self.task.metric], **values)

    def _table(self, summary: PruneSummary) -> tuple[list[str], list[list]]:
        """The dense model and the pruned ones; the dense model has a value in each column."""
        of_speed = {}
        if self.is_of_speed:
            of_speed = {
                "target": 1.0,
                "speedup": 1.0,
                "more_speedups": dict.fromkeys(self.rows[0]["more_speedups"], 1.0),
                "predicted_speedup": 1.0,
                "units": self.report.units_total,
                "blocks": self.report.blocks_total,
                "bytes": self.report.bytes_dense,
            }
        return rows_table([self._row(self.dense | of_speed), *summary.rows])

    def _draw_heads(self, title: str) -> None:
        metric = self.task.metric
        shown = [{key: row[key] for key in ("method", "heads", metric)} for row in self.rows]
        total = self.dense["heads"]
        draw(plot_pruning_curve, self.folder / "curve.png", shown, title, metric, self.dense[metric], total)
        kept = {f"keep {row['heads']}": row["layers"] for row in self.chosen}
        built = max(AutoConfig.from_pretrained(self.folder / "dense").attention_sites().values())
        draw(plot_heads_per_layer, self.folder / "heads.png", kept, total=built, title=title)

    def _draw_speedups(self, title: str) -> None:
        metric, table = self.task.metric, self.goals[0].table
        shown = [{key: row[key] for key in ("method", "speedup", metric)} for row in self.rows]
        untrained = [
            {"method": f"{row['method']}, untrained", "speedup": row["speedup"], metric: row["untrained"]}
            for row in self.rows
            if row.get("untrained") is not None and row["method"] != "random"
        ]
        shape = f"batch {table.batch}" + (f" × {table.length} tokens" if table.length else "")
        shown, dense = shown + untrained, self.dense[metric]
        draw(plot_speedup_curve, self.folder / "curve.png", shown, f"{title}; {shape}", metric, dense)
        left = {
            f"{goal.name.removesuffix('x')} ×": {"heads": row["layers"], "units": row["units_of_layers"]}
            for row, goal in zip(self.chosen, self.goals)
        }
        built = self.report.layers_dense, self.report.units_dense
        draw(plot_parts_per_layer, self.folder / "parts.png", left, *built, title)

    def _draw_gates(self, title: str) -> None:
        goal = self.goals[0]
        history = GateHistory.load(self.folder / "checkpoints" / f"gates-{goal.name}" / "gates.json")
        target = goal.keep if isinstance(goal, HeadGoal) else None
        of_all = {"title": title, "target": target, **history.open_counts()}
        draw(plot_gate_history, self.folder / "gate_history.png", history.steps, **of_all)
        last = {kind: np.asarray(records[-1]) for kind, records in history.log_alpha.items()}
        if not last:  # only units have gates
            return
        what = f"{target} of {self.dense['heads']} heads" if target else f"{goal.name.removesuffix('x')} × as fast"
        threshold = GateSettings.from_dict({"variant": self.args.gate_variant}).threshold
        draw(plot_gates, self.folder / "gates.png", last, f"{title}; target: {what}", threshold=threshold)

    def _cited(self, method: str) -> list[str]:
        """Papers of a method, as `methods` of [`write_model_card`]."""
        gates = ["gates", "speedup_gates"] if self.is_of_speed else ["gates"]
        return {"gates": gates, "michel": ["importance"], "fisher": ["fisher"], "margin": ["fisher"]}.get(method, [])

    def _write_card(self, row: dict[str, Any], goal: Goal | None, summary: PruneSummary) -> None:
        """Writes the card of the dense model, or of the one that reached a goal in the first way."""
        metric, total = self.task.metric, summary.heads_total
        of_model = self.folder / ("dense" if goal is None else f"model-{goal.name}")
        config = AutoConfig.from_pretrained(of_model)
        heads = f"all {total}" if row["heads"] == total else f"{row['heads']} of {total}"
        units = f" and {row['units']} of {summary.units_total} feed-forward units" if "units" in row else ""
        chosen_by = f", chosen by {CHOSEN_BY.get(row['method'], row['method'])}" * (goal is not None)
        # The other ways train what is left instead of gates.
        epochs = self.args.finetune_epochs + self.args.gate_epochs * (row["method"] != "gates")
        is_tuned = goal is not None and epochs > 0
        more = f"{chosen_by}{'; it was fine-tuned after the others were removed' * bool(is_tuned)}"
        if "speedup" in row:
            length = f" × {summary.latency['length']} tokens" * (summary.latency["length"] is not None)
            more += (
                f". A forward pass is {row['speedup']:.2f} × as fast as that of the dense model (batch "
                f"{summary.latency['batch']}{length}, {summary.latency['device']})"
            )
        write_model_card(
            of_model,
            name=f"{self.task.model_name}, {heads} heads{units}",
            description=self.task.description(config, f"{heads} attention heads{units}{more}"),
            config=config,
            task=self.task.hub_task,
            figures={metric: row[metric], f"{metric}_dense": None if goal is None else self.dense[metric]},
            metric=[Metric(metric, metric, row[metric]), Metric("loss", "loss (nats)", row["loss"])],
            dataset=summary.text,
            provenance=summary.provenance,
            methods=self._cited(row["method"]),
            language=self.task.language,
            license=self.args.license,
            base_model=self.args.model,
            hub_dataset=self.args.dataset_name,
        )
