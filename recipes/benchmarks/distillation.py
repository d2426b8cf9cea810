# Licensed under the Apache License, Version 2.0.
"""What a teacher costs: time and peak memory of one optimizer step that learns its attention or its hidden states.

    python recipes/benchmarks/distillation.py
    python recipes/benchmarks/distillation.py --lengths 512 --rounds 21 --output_dir runs/distillation_benchmark
    python recipes/benchmarks/distillation.py --systems plain hidden --lengths 128 --cpu_threads 1

Five systems take the same batches with the same weights. In each the student takes a step, and the teacher, which has
twice as many layers, runs forward:
    plain    the task loss of the student; what the teacher computes is not used
    taught   the task loss, and KL(teacher‖student) of the twelve heads of the last layer, by this package
    all      the same of all heads of all layers of the student
    dense    the same as taught, from the attention maps of `eager` attention
    hidden   the task loss, and the hidden states of every k-th layer of the teacher, matched as in CoFi

Times are wall-clock seconds of forward, backward and AdamW, the systems taking turns in one process; ratios are
medians over rounds of the ratio within a round. Peak memory is the largest resident size of a process of its own for
each system, less the size before the models were built (on a GPU: the largest size of allocated memory); it holds
weights, gradients, optimizer and activations (Linux only). There is no dropout: attention dropout would keep `sdpa`
from its fast kernels. The vocabulary is small, so that the cost of the layers is not hidden behind the output layer.

Keys of `summary.json`, for each length n and each of `--systems`: `seconds_plain_n`, …, `time_taught_to_plain_n`, …,
`memory_mb_plain_n`, …, `memory_taught_to_plain_n`, …; and the settings.
"""

from dataclasses import dataclass

import torch
from benchmarking import (
    StepArguments,
    median_ratio,
    medians,
    peaks_of_steps,
    seconds_of_steps,
    write_summary,
)
from transformers import RobertaConfig, RobertaForMaskedLM

from hf_attn_dynamics import HeadwiseRobertaConfig, HeadwiseRobertaForMaskedLM
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.arguments.base import check_names, flag
from hf_attn_dynamics.recipes.run import run_recipe
from hf_attn_dynamics.training import (
    Teacher,
    hidden_distillation_loss,
    hidden_layer_distances,
    match_hidden_layers,
)
from hf_attn_dynamics.training.hidden_distillation import learned_layers


SYSTEMS = ("plain", "taught", "all", "dense", "hidden")


@dataclass
class DistillationArguments(StepArguments):
    """Sizes of the models and the batches."""

    systems: list[str] = flag([*SYSTEMS], f"Systems: plain, and some of {', '.join(SYSTEMS[1:])}.")
    num_hidden_layers: int = flag(3, "Number of layers of the student; the teacher has twice as many.")
    hidden_size: int = flag(768, "Hidden size of both; feed-forward layers are four times as wide.")

    def __post_init__(self):
        super().__post_init__()
        check_names("systems", self.systems, SYSTEMS)
        if "plain" not in self.systems:
            raise ValueError(f"systems must contain plain, to which all others are compared, got {self.systems}.")


class System:
    """A student with its optimizer and its teacher, and the way it takes a step."""

    def __init__(self, name: str, args: DistillationArguments, length: int):
        torch.manual_seed(args.seed)
        layers = args.num_hidden_layers
        sizes = {**args.roberta_sizes, "attn_implementation": "eager" if name == "dense" else "sdpa"}
        learned = {layer: 2 * layer + 1 for layer in range(layers)}
        if name != "all":
            learned = {layers - 1: 2 * layers - 1}
        guidance = {"teacher": {"layers": learned}}
        config = HeadwiseRobertaConfig(**sizes, num_hidden_layers=layers, guidance=guidance)
        self.model = HeadwiseRobertaForMaskedLM(config).to(args.torch_device).train()
        self.teacher = RobertaForMaskedLM(RobertaConfig(**sizes, num_hidden_layers=2 * layers))
        self.teacher = self.teacher.to(args.torch_device).eval().requires_grad_(False)
        settings, hidden = ({}, {"encoder": learned_layers(2 * layers)}) if name == "hidden" else (None, None)
        self.name, self.reader = name, Teacher(self.teacher, self.model, settings, hidden)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)  # the Trainer's default

    def step(self, ids: torch.Tensor) -> None:
        """Takes one optimizer step."""
        if self.name in ("taught", "all"):
            attention = self.reader({"input_ids": ids}).attention
            loss = self.model(ids, labels=ids, teacher_attention=attention, guidance_weight=1.0).loss
        elif self.name == "hidden":
            taught = self.reader({"input_ids": ids}).hidden_states["encoder"]
            outputs = self.model(ids, labels=ids, output_hidden_states=True)
            layers = self.reader.hidden_layers["encoder"]
            pairs = match_hidden_layers(hidden_layer_distances(outputs.hidden_states, taught, layers=layers))
            loss = outputs.loss + hidden_distillation_loss(outputs.hidden_states, taught, None, pairs)
        else:
            is_dense = self.name == "dense"
            with torch.no_grad():
                taught = self.teacher(ids, output_attentions=is_dense).attentions
            outputs = self.model(ids, labels=ids, output_attentions=is_dense)
            loss = outputs.loss
            if is_dense:
                own, other = outputs.attentions[-1], taught[-1]
                loss = loss + (torch.xlogy(other, other) - torch.xlogy(other, own)).sum(-1).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main(args: DistillationArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    results: dict = {}
    rows = []
    others = [name for name in args.systems if name != "plain"]
    for length in args.lengths:
        seconds = seconds_of_steps(System, args.systems, args, length)
        memory = peaks_of_steps(System, args.systems, args, length)
        figures = {
            **{f"seconds_{name}": median for name, median in medians(seconds).items()},
            **{f"time_{name}_to_plain": median_ratio(seconds, name, "plain") for name in others},
            **{f"memory_mb_{name}": memory[name] for name in args.systems},
            **{f"memory_{name}_to_plain": memory[name] / memory["plain"] for name in others},
        }
        results |= {f"{key}_{length}": value for key, value in figures.items()}
        rows.append([f"{length}", *figures.values()])
    ratios = [f"{name} / plain" for name in others]
    header = ["length", *(f"{name} (s)" for name in args.systems), *ratios]
    header += [*(f"{name} (MB)" for name in args.systems), *ratios]
    print(format_table(header, rows))
    return write_summary(args, results)


if __name__ == "__main__":
    run_recipe(main)
