# Licensed under the Apache License, Version 2.0.
"""When do induction heads form? Small language models learn to copy random tokens, and heads are measured meanwhile.

    python recipes/benchmarks/induction.py --output_dir runs/induction
    python recipes/benchmarks/induction.py --architectures llama --max_steps 3000

A model reads sequences of random tokens that are repeated, and predicts the repeated ones. The number of tokens before
they are repeated differs, so that positions do not tell which token to copy. By guessing, the loss is the logarithm of
the vocabulary. `HeadDynamicsCallback` measures
`InductionScore` and `PreviousToken` on other sequences. Models with one layer cannot learn it from attention alone:
induction needs a head that reads the previous token below it (Olsson et al. 2022).

Keys of `summary.json`: `rows`, one for each architecture, number of layers and seed: `architecture`, `layers`, `seed`,
`step_of_loss`, the first logged step with a mean loss below half of that of guessing (null if there is none),
`step_of_induction`, the first step at which a head has an induction score of 0.5 or more (null), `loss`,
`induction` and `head` (layer and number) at the end, and `previous_token`, the best score below that head (null in
the first layer); `unigram_loss`, that of guessing; and the settings. Writes `ARCHITECTURE-LAYERS-seed-SEED.png` with
the history of each model.
"""

import math
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from benchmarking import BenchmarkArguments, write_summary
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from hf_attn_dynamics import HeadDynamicsCallback, InductionScore, PreviousToken
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.recipes.arguments.base import check_names, flag
from hf_attn_dynamics.recipes.run import run_recipe


ARCHITECTURES = ("gpt2", "llama")
REACHED = 0.5  # induction score of an induction head, and fraction of the first loss


@dataclass
class InductionArguments(BenchmarkArguments):
    """Sizes of the models, the data and the training."""

    architectures: list[str] = flag(list(ARCHITECTURES), f"Architectures: {', '.join(ARCHITECTURES)}.")
    layers: list[int] = flag([1, 2], "Numbers of layers.")
    hidden_size: int = flag(64, "Hidden size.")
    num_attention_heads: int = flag(4, "Heads per layer.")
    vocab_size: int = flag(64, "Number of different tokens.")
    length: int = flag(24, "Largest number of random tokens before they are repeated; half of it is the least.")
    batch_size: int = flag(32, "Sequences per step.")
    max_steps: int = flag(1500, "Training steps.")
    learning_rate: float = flag(3e-3, "Learning rate, with linear decay.")
    every: int = flag(25, "Steps between two measurements.")
    rounds: int = flag(1, "Number of seeds; each model is trained once per seed.")

    def __post_init__(self):
        super().__post_init__()
        check_names("architectures", self.architectures, ARCHITECTURES)
        check_names("layers", self.layers)
        self.check_at_least(1, "hidden_size", "num_attention_heads", "batch_size", "every")
        self.check_at_least(2, "length", "vocab_size")
        if min(self.layers) < 1:
            raise ValueError(f"layers must be at least 1, got {min(self.layers)}.")
        if self.max_steps % self.every or self.max_steps < 1:
            raise ValueError(f"max_steps={self.max_steps} must be a multiple of every={self.every}, to end measured.")


class Repeats(Dataset):
    """Random sequences that are repeated after `length / 2` to `length` tokens; labels are the repeated tokens."""

    def __init__(self, size: int, vocab_size: int, length: int, seed: int):
        self.size, self.vocab_size, self.length, self.seed = size, vocab_size, length, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed + index)
        period = int(torch.randint(self.length // 2, self.length + 1, (), generator=generator))
        tokens = torch.randint(self.vocab_size, (period,), generator=generator)
        ids = tokens[torch.arange(2 * self.length) % period]
        # The first token that is repeated cannot be known.
        labels = ids.clone()
        labels[: period + 1] = -100
        return {"input_ids": ids, "labels": labels}


def build_model(name: str, layers: int, args: InductionArguments) -> Any:
    """A model of random weights."""
    sizes = {"vocab_size": args.vocab_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if name == "gpt2":
        sizes |= {"n_embd": args.hidden_size, "n_layer": layers, "n_head": args.num_attention_heads}
        sizes |= {"n_positions": 2 * args.length, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes |= {"hidden_size": args.hidden_size, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": args.num_attention_heads, "intermediate_size": 4 * args.hidden_size}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))


def train(name: str, layers: int, seed: int, args: InductionArguments) -> dict[str, Any]:
    """Trains one model; returns its row."""
    set_seed(seed)
    model = build_model(name, layers, args)
    probe = Repeats(args.batch_size, args.vocab_size, args.length, seed=10**9)
    batch = {"input_ids": torch.stack([probe[number]["input_ids"] for number in range(len(probe))])}
    with tempfile.TemporaryDirectory() as folder:
        callback = HeadDynamicsCallback([InductionScore([]), PreviousToken()], [batch], args.every, folder)
        settings = TrainingArguments(
            folder,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            logging_steps=args.every,
            save_strategy="no",
            report_to="none",
            use_cpu=args.device == "cpu",
            seed=seed,
            disable_tqdm=True,
        )
        data = Repeats(args.max_steps * args.batch_size, args.vocab_size, args.length, seed * 10**7)
        trainer = Trainer(model, settings, train_dataset=data, callbacks=[callback])
        trainer.train()
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    measured = callback.history
    best = {step: scores.best() for step, scores in measured.of("induction/attention").items()}
    last = best[max(best)]
    below = measured.of("previous_token/attention")[max(best)]["decoder"][: last.layer]
    if args.summary_path is not None:
        path = args.summary_path.parent / f"{name}-{layers}-seed-{seed}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        thresholds = {"induction/attention": REACHED, "previous_token/attention": REACHED}
        title = f"{name}, {layers} layer{'s' * (layers > 1)}, repeated random tokens"
        measured.plot(path, title, thresholds=thresholds)
    return {
        "architecture": name,
        "layers": layers,
        "seed": seed,
        "step_of_loss": next((step for step, loss in losses if loss < REACHED * math.log(args.vocab_size)), None),
        "step_of_induction": next((step for step, head in best.items() if head.score >= REACHED), None),
        "loss": losses[-1][1],
        "induction": last.score,
        "head": f"{last.layer}.{last.head}",
        "previous_token": below.max().item() if below.numel() else None,
    }


def main(args: InductionArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    rows = [
        train(name, layers, args.seed + number, args)
        for name in args.architectures
        for layers in args.layers
        for number in range(args.rounds)
    ]
    print(format_table(list(rows[0]), [list(row.values()) for row in rows]))
    return write_summary(args, {"rows": rows, "unigram_loss": math.log(args.vocab_size)})


if __name__ == "__main__":
    run_recipe(main)
