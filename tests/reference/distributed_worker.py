"""Trains tiny models for three steps each, in this process or, as a script, in several: distributed_worker.py OUT."""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from stock_models import SMALL_MISTRAL
from tiny_models import vivid
from tiny_training import build, examples, guidance_to_targets, trainer, with_targets
from transformers import PreTrainedModel, TrainerCallback

from hf_attn_dynamics import HeadwiseMistralConfig, HeadwiseMistralForCausalLM, prune_heads


CASES = (
    "roberta",
    "bert",
    "electra",
    "marian",
    "mistral",
    "pruned",
    "smoothed",
    "targets",
    "taught",
    "hidden",
    "costs",
)
KINDS = {
    "pruned": "roberta",
    "smoothed": "marian",
    "targets": "roberta",
    "taught": "roberta",
    "costs": "roberta",
    "hidden": "marian",
}  # of cases that are none themselves
TASKS = {
    "roberta": "MaskedLM",
    "bert": "PreTraining",
    "electra": "JointPreTraining",
    "marian": "Translation",
    "mistral": "CausalLM",
}
GATES = {
    "roberta": {},
    "mistral": {},
    "electra": {},
    "bert": {"initial_log_alpha": 0.5},
    "marian": {"encoder": {}, "cross": {}},
}


class RemoveHeads(TrainerCallback):
    """Removes heads after the first step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            prune_heads(model, {0: [1, 2], 1: [0]})


def model_of(task: str, kind: str, **settings) -> PreTrainedModel:
    if kind == "mistral":
        return HeadwiseMistralForCausalLM(HeadwiseMistralConfig(**SMALL_MISTRAL, gates={}, guidance={"fraction": 0.5}))
    settings = {"gates": GATES[kind], **settings}
    return build(task, kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings)


def trained(case: str, processes: int) -> dict:
    """Log, evaluation loss and sums of weights after the same batches, whatever the number of processes."""
    kind = KINDS.get(case, case)
    task = TASKS[kind]
    of_targets = case == "targets"
    data = with_targets(task, 24) if of_targets else examples(task, 24)
    guidance = {"targets": guidance_to_targets(), "taught": {"teacher": {"layers": {0: 1, 1: 0}}}}.get(case)
    changes = {"guidance": guidance} if guidance else {}
    if case == "costs":
        changes["gates"] = {"parts": ["heads", "units", "blocks"]}
    teacher = vivid(build(task, kind, seed=1, guidance=None)) if case in ("taught", "hidden") else None
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(
            folder,
            model_of(task, kind, **changes),
            data,
            # 7 sentences do not divide by two processes.
            evaluation=data.select(range(7)),
            max_steps=3,
            per_device_train_batch_size=4 // processes,
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=2,
            guidance_weight="auto",
            **({"target_flops": 0.6, "latency_length": 16} if case == "costs" else {"target_heads": 4}),
            learning_rate=1e-2,
            optim="sgd",
            label_smoothing_factor=0.1 if case == "smoothed" else 0.0,
            ddp_find_unused_parameters=False,
            callbacks=[RemoveHeads()] if case == "pruned" else None,
            teacher=teacher,
            distillation_weight=0.5 if case in ("taught", "hidden") else 0.0,
            hidden_distillation_weight=2.0 if case == "hidden" else 0.0,
        )
        run.train()
        metrics = run.evaluate()
    other = ("epoch", "step", "grad_norm", "learning_rate")
    log = [
        {key: value for key, value in entry.items() if key not in other}
        for entry in run.state.log_history
        if "task_loss" in entry
    ]
    weights = [p.detach().double().sum().item() for p in run.model.parameters()]
    accuracies = {name: value for name, value in metrics.items() if "guided_accuracy" in name}
    return {"log": log, "eval_loss": metrics["eval_loss"], "weights": weights, "accuracies": accuracies}


if __name__ == "__main__":
    gc.freeze()
    found = {case: trained(case, int(os.environ["WORLD_SIZE"])) for case in CASES}
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(found))
