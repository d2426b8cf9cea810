"""Tiny tasks, models for them, and a trainer that takes one full step."""

import datasets
import pytest
import torch
from tiny_models import ragged_sentences, tiny_config

import hf_attn_dynamics as had
from hf_attn_dynamics import (
    HeadwiseSeq2SeqTrainer,
    HeadwiseSeq2SeqTrainingArguments,
    HeadwiseTrainer,
    HeadwiseTrainingArguments,
)


STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DESCENT = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}


def assert_same(found, expected):
    """Compares gradients by the names of their parameters."""
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=5e-7, msg=lambda m, n=name: f"{n}: {m}")


def collate(features):
    # The stock span loss runs over padding too, so that its value depends on the length.
    shortest = 20 if "start_positions" in features[0] else 0
    fill = {"input_ids": 1, "labels": -100, "decoder_input_ids": 1}
    batch = {}
    for name in features[0]:
        rows = [f[name] for f in features]
        if isinstance(rows[0], list):
            length = max(shortest, *map(len, rows))
            # Integers are keys, floating-point numbers weights.
            filler = -100 if name.startswith("guidance_") and isinstance(rows[0][0], int) else fill.get(name, 0)
            rows = [row + [filler] * (length - len(row)) for row in rows]
        batch[name] = torch.tensor(rows)
    return batch


def examples(task, count=8):
    """Sentences with labels of one task; the number of labels differs widely, and one sentence has none."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i, ids in enumerate(ragged_sentences(count)):
        row = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        keep = torch.rand(len(ids), generator=generator) < (0, 0.2, 0.9)[i % 3]
        tokens = [token if kept else -100 for token, kept in zip(ids, keep.tolist())]
        match task:
            case "MaskedLM" | "CausalLM" | "JointPreTraining":
                row["labels"] = tokens
            case "PreTraining":
                row |= {"labels": tokens, "next_sentence_label": i % 2}
            case "SequenceClassification":
                row["labels"] = i % 2
            case "TokenClassification":
                row["labels"] = [label % 2 if label >= 0 else label for label in tokens]
            case "ReplacedTokens":
                row["labels"] = [token % 2 for token in ids]
            case "Translation":
                row["labels"] = [token for token in ids if token % 3] + [2]
            case "QuestionAnswering":
                # Every third answer was cut off.
                row |= {"start_positions": 0, "end_positions": len(ids) - 1 if i % 3 else 512}
        rows.append(row)
    return datasets.Dataset.from_list(rows)


TO_TARGETS = {
    "heads": {"prev": [0], "syntax": [1], "why": [2, 3]},
    "targets": {"syntax": "keys", "why": "weights"},
    "loss": {"syntax": "cross_entropy"},
}
TO_ALIGNED = {"heads": {"prev": [0], "aligned": [1]}, "targets": {"aligned": "keys"}}


def guidance_to_targets(kind="roberta"):
    """Guidance to the targets of [`with_targets`], with a pattern beside them."""
    return {"encoder": TO_TARGETS, "cross": TO_ALIGNED} if kind == "marian" else TO_TARGETS


def with_targets(task, count=8):
    """Examples with targets for some rows; the first two sentences have none, and a column that nothing reads."""

    def targets(row, number):
        n = len(row["input_ids"])
        syntax = [-100 if number < 2 or i % 3 == number % 3 else (5 * i + number) % n for i in range(n)]
        added = {"guidance_syntax": syntax, "guidance_why": [float(number > 1 and i % 2) for i in range(n)]}
        if task == "Translation":
            added["guidance_aligned"] = [i % n for i in range(len(row["labels"]))]
        return {**added, "unread": number}

    return examples(task, count).map(targets, with_indices=True)


def build(task="MaskedLM", kind="roberta", seed=0, **changes):
    torch.manual_seed(seed)
    head = {"Translation": "MTModel", "ReplacedTokens": "ForPreTraining"}.get(task, f"For{task}")
    if kind == "marian":
        # Its dropout has one name only.
        changes = {"dropout": changes.pop("hidden_dropout_prob", 0.1), **changes}
        changes.pop("attention_probs_dropout_prob", None)
    return getattr(had, f"Headwise{kind.capitalize()}{head}")(tiny_config(kind, **changes))


def trainer(folder, model, data, evaluation=None, callbacks=None, teacher=None, latency_table=None, **settings):
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": 1,
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_steps": 1,
        "guidance_weight": 2.0,
    }
    is_seq2seq = model.config.is_encoder_decoder
    arguments = HeadwiseSeq2SeqTrainingArguments if is_seq2seq else HeadwiseTrainingArguments
    args = arguments(**{**defaults, **settings})
    return (HeadwiseSeq2SeqTrainer if is_seq2seq else HeadwiseTrainer)(
        model,
        args,
        data_collator=collate,
        train_dataset=data,
        eval_dataset=evaluation,
        callbacks=callbacks,
        teacher=teacher,
        latency_table=latency_table,
    )


def train_gates(folder, model, data, **settings):
    """A trainer that has trained a model with gates."""
    settings = {"guidance_weight": None, "learning_rate": 1e-3, "gate_learning_rate": 0.2, **settings}
    made = trainer(folder, model, data, **settings)
    made.train()
    return made


def assert_accumulation_is_exact(folder, build_gated, data, logged=(), **settings):
    """The first step on one batch is that on its micro-batches, with gates that a penalty moves."""
    steps, logs = [], []
    for batch, accumulation in ((8, 1), (2, 4)):
        model, sizes = (
            build_gated(),
            {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation},
        )
        made = train_gates(folder, model, data, gate_learning_rate=1.0, **DESCENT, **sizes, **settings)
        steps.append({name: p.detach().clone() for name, p in model.named_parameters()})
        logs.append(made.state.log_history[0])
    for name, whole in steps[0].items():
        torch.testing.assert_close(steps[1][name], whole, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for name in ("loss", "task_loss", "gate_penalty", "gate_penalty_weight", *logged):
        assert logs[1][name] == pytest.approx(logs[0][name], rel=1e-5)
    expected = logs[0]["task_loss"] + logs[0]["gate_penalty_weight"] * logs[0]["gate_penalty"]
    assert logs[0]["loss"] == pytest.approx(expected, rel=1e-5)
