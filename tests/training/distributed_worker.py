"""Trains a tiny model for three steps on one process of several: worker.py OUTPUT TASK KIND PROCESSES."""

import json
import sys
import tempfile
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent / "reference"))

from tiny_training import build, examples, trainer  # noqa: E402


GATES = {"roberta": {}, "electra": {}, "bert": {"initial_log_alpha": 0.5}, "marian": {"encoder": {}, "cross": {}}}


def main(output: str, task: str, kind: str, processes: int) -> None:
    data = examples(task, 24)
    run = trainer(
        tempfile.mkdtemp(),
        build(task, kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, gates=GATES[kind]),
        data,
        # 7 sentences do not divide by two processes.
        evaluation=data.select(range(7)),
        max_steps=3,
        per_device_train_batch_size=4 // processes,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        guidance_weight="auto",
        target_heads=4,
        learning_rate=1e-2,
        optim="sgd",
        ddp_find_unused_parameters=False,
    )
    run.train()
    metrics = run.evaluate()
    if run.is_world_process_zero():
        other = ("epoch", "step", "grad_norm", "learning_rate")
        log = [
            {key: value for key, value in entry.items() if key not in other}
            for entry in run.state.log_history
            if "task_loss" in entry
        ]
        weights = [p.detach().double().sum().item() for p in run.model.parameters()]
        Path(output).write_text(json.dumps({"log": log, "eval_loss": metrics["eval_loss"], "weights": weights}))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
