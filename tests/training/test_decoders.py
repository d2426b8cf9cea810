# Licensed under the Apache License, Version 2.0.
"""Training decoders: grouped queries, accumulated batches, gates to a number of heads, checkpoints."""

import copy

import datasets
import pytest
import torch
import transformers
from stock_models import STOCK_MODELS
from tiny_models import ragged_sentences

import hf_attn_dynamics as had
from hf_attn_dynamics.models.head_roles import locate_heads


CLASSES = {
    "llama": "HeadwiseLlamaForCausalLM",
    "gpt-oss": "HeadwiseGptOssForCausalLM",
    "mistral": "HeadwiseMistralForCausalLM",
    "gpt2": "HeadwiseGPT2LMHeadModel",
}


def build(name="llama", **heads):
    torch.manual_seed(0)
    cls = getattr(had, CLASSES[name])
    dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0) if name == "gpt2" else {}
    return cls(cls.config_class(**STOCK_MODELS[name][2], **dropout, **heads))


def collate(rows):
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [1] * (length - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def collate_shifted(rows):
    """A batch whose loss is that of `shift_labels`: the first label counts there, and other tokens do not."""
    batch = collate(rows)
    shifted = batch["labels"].flip(1).clone()
    shifted[:, 2] = -100
    return {**batch, "shift_labels": shifted}


def trainer_of(model, folder, collate=collate, **arguments):
    defaults = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    args = had.HeadwiseTrainingArguments(str(folder), **defaults | arguments)
    data = datasets.Dataset.from_list([{"input_ids": ids} for ids in ragged_sentences(8)])
    return had.HeadwiseTrainer(model, args, train_dataset=data, eval_dataset=data, data_collator=collate)


@pytest.mark.parametrize("name", CLASSES)
def test_micro_batches_train_as_the_whole_batch(name, tmp_path):
    settings = {"guidance": {"fraction": 0.5}, "gates": {}}
    weights = []
    for number, (batch, accumulated) in enumerate([(8, 1), (2, 4)]):
        model = build(name, **settings).double()
        trainer = trainer_of(
            model,
            tmp_path / str(number),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulated,
            guidance_weight=0.5,
            gate_penalty=0.01,
        )
        trainer.train()
        weights.append(model.state_dict())
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_batches_train_as_padded_ones(tmp_path, name, accumulated):
    weights = []
    for number, collator in enumerate((collate, transformers.DataCollatorWithFlattening())):
        model = build(name, guidance={"fraction": 0.5}).double()
        trainer = trainer_of(
            model,
            tmp_path / str(number),
            collate=collator,
            guidance_weight=0.5,
            optim="sgd",
            per_device_train_batch_size=8 // accumulated,
            gradient_accumulation_steps=accumulated,
        )
        trainer.train()
        weights.append(model.state_dict())
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_labels_that_are_shifted_train_as_in_the_stock_trainer(tmp_path, accumulated):
    settings = {"per_device_train_batch_size": 8 // accumulated, "gradient_accumulation_steps": accumulated}
    model = build().double()
    stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(**STOCK_MODELS["llama"][2])).double()
    stock.load_state_dict(model.state_dict())
    # Adam would make much of the rounding of a small gradient: the stock loss is computed in single precision.
    trainer = trainer_of(model, tmp_path, collate=collate_shifted, optim="sgd", **settings)
    data = trainer.train_dataset
    expected = transformers.Trainer(stock, trainer.args, train_dataset=data, data_collator=collate_shifted)
    for one in (trainer, expected):
        one.train()
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-5, atol=1e-7)


def test_a_number_of_heads_is_met_in_whole_groups_and_survives_a_checkpoint(tmp_path):
    model = build(gates={})
    total = sum(layer.num_heads for layer in locate_heads(model))
    assert (total, len(model.head_gates())) == (18, 3)
    trainer = trainer_of(model, tmp_path, target_heads=8, max_steps=30, gate_learning_rate=0.3)
    trainer.train()
    trainer.prune().save_pretrained(tmp_path / "pruned")
    kept = [layer.heads for layer in locate_heads(model)]
    assert sum(map(len, kept)) == 8
    assert all(heads[i] % 2 == 0 and heads[i + 1] == heads[i] + 1 for heads in kept for i in range(0, len(heads), 2))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pruned")
    assert [layer.heads for layer in locate_heads(back)] == kept
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, model.eval()(ids).logits, rtol=1e-5, atol=1e-6)
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_number_of_heads_that_groups_do_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="target_heads=7, .* one gate for 2 query heads"):
        trainer_of(build(gates={}), tmp_path, target_heads=7)
    trainer_of(build(gates={"unit": "head"}), tmp_path, target_heads=7)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_gradient_checkpointing_changes_no_gradient(name, reentrant):
    plain = build(name, guidance={"fraction": 0.5}, gates={}).double().train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.activation_checkpointing_enable({"use_reentrant": reentrant})
    batch = collate([{"input_ids": ids} for ids in ragged_sentences(4)])
    gates = sum(len(gate.log_alpha) for gate in plain.head_gates().values())
    noise = torch.rand(gates, generator=torch.Generator().manual_seed(0))
    for model in (plain, checkpointed):
        torch.manual_seed(0)
        if reentrant:
            model.enable_input_require_grads()
        model(**batch, guidance_weight=0.7, gate_penalty_weight=0.1, gate_noise=noise, use_cache=False).loss.backward()
    expected = dict(plain.named_parameters())
    for key, parameter in checkpointed.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_compiled_decoder_has_the_same_loss_and_gradient(name):
    model = build(name, guidance={"fraction": 0.5}, gates={}).train()
    batch = collate([{"input_ids": ids} for ids in ragged_sentences(4)])
    gates = sum(len(gate.log_alpha) for gate in model.head_gates().values())
    asked = {"guidance_weight": 0.7, "gate_penalty_weight": 0.1, "gate_noise": torch.full((gates,), 0.4)}
    gradients = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        run(**batch, **asked, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for expected, found in zip(*gradients):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
