# Licensed under the Apache License, Version 2.0.
"""Heads are guided, gated and pruned by the supervised fine-tuning of trl, whose loss is not the model's."""

import copy
import inspect
from contextlib import contextmanager
from dataclasses import dataclass

import datasets
import pytest
import torch
from tiny_models import SIZES, no_dropout, ragged_sentences
from tiny_training import collate
from tokenizers import Tokenizer, models
from torch.nn.utils import parameters_to_vector
from transformers import BertLMHeadModel, PreTrainedTokenizerFast

from hf_attn_dynamics import HeadwiseBertConfig
from hf_attn_dynamics.analysis import attention_maps, masked_heads
from hf_attn_dynamics.analysis.model_views import evaluation_view
from hf_attn_dynamics.models.modeling_headwise import HeadwiseMixin
from hf_attn_dynamics.training import (
    HeadwiseArguments,
    HeadwiseTrainerMixin,
    LayerRatesMixin,
    WeightAverageMixin,
    hidden_distillation_loss,
    hidden_layer_distances,
    match_hidden_layers,
)
from hf_attn_dynamics.training.gates import gate_noise


trl = pytest.importorskip("trl", reason="needs trl, which the extra `test` installs from Python 3.11 on")

# Which trl sets by default.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

ALPHA, LAMBDA, RATE = 0.5, 0.1, 0.1
DATA = datasets.Dataset.from_list([{"input_ids": ids} for ids in ragged_sentences(8)])


class HeadwiseBertLMHeadModel(HeadwiseMixin, BertLMHeadModel):
    config_class = HeadwiseBertConfig

    def __init__(self, config):
        super().__init__(config)
        # trl multiplies hidden states by the weights of the output layer, before which BERT has another one.
        self.cls.predictions.transform = torch.nn.Identity()


@dataclass(repr=False)
class HeadwiseSFTConfig(HeadwiseArguments, trl.SFTConfig):
    pass


class HeadwiseSFTTrainer(HeadwiseTrainerMixin, trl.SFTTrainer):
    pass


def build(**changes):
    torch.manual_seed(0)
    heads = {"guidance": {"heads": {"prev": [1], "first": [2]}}, "gates": {}}
    # As the tokenizer has it.
    config = HeadwiseBertConfig(**SIZES, **no_dropout("bert"), is_decoder=True, eos_token_id=2, **heads, **changes)
    return HeadwiseBertLMHeadModel(config)


def words():
    tokens = Tokenizer(models.WordLevel({f"word{number}": number for number in range(SIZES["vocab_size"])}, "word3"))
    special = {"pad_token": "word0", "eos_token": "word2", "unk_token": "word3"}
    return PreTrainedTokenizerFast(tokenizer_object=tokens, **special)


def trainer(folder, model, trainer_class=HeadwiseSFTTrainer, teacher=None, **settings):
    defaults = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "gate_learning_rate": RATE,
        "guidance_weight": ALPHA,
        "guidance_schedule": "constant",
        "gate_penalty": LAMBDA,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    return trainer_class(
        model,
        HeadwiseSFTConfig(str(folder), **{**defaults, **settings}),
        train_dataset=DATA,
        eval_dataset=DATA,
        processing_class=words(),
        **({} if teacher is None else {"teacher": teacher}),
    )


def trained_by_hand(model):
    """Losses of each step, of the model's own loss and plain gradient descent."""
    model.train()
    logged = []
    for step in range(2):
        parts = [DATA.to_list()[start : start + 2] for start in range(4 * step, 4 * step + 4, 2)]
        batches = [
            collate(
                [{**row, "labels": row["input_ids"], "attention_mask": [1] * len(row["input_ids"])} for row in part]
            )
            for part in parts
        ]
        counts = {
            # The first token of a sentence is not predicted.
            "labels": sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches),
            "sentences": 4,
            "forward_passes": 2,
        }
        noise = gate_noise(model.head_gates(), seed=42, step=step)
        losses = torch.zeros(4)
        for batch in batches:
            outputs = model(
                **batch, guidance_weight=ALPHA, gate_penalty_weight=LAMBDA, gate_noise=noise, num_items_in_batch=counts
            )
            outputs.loss.backward()
            found = (outputs.loss, outputs.task_loss, outputs.guidance_loss, outputs.gate_penalty)
            losses += torch.stack(found).detach()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
                parameter.grad = None
        logged.append(dict(zip(("loss", "task_loss", "guidance_loss", "gate_penalty"), losses.tolist())))
    return logged


def test_supervised_fine_tuning_has_the_losses_and_weights_of_a_loop_by_hand(tmp_path):
    model, twin = build(), build()
    made = trainer(tmp_path, model)
    made.train()
    logged = [entry for entry in made.state.log_history if "task_loss" in entry]
    for found, expected in zip(logged, trained_by_hand(twin), strict=True):
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5), name
        assert found["loss"] == pytest.approx(
            found["task_loss"] + ALPHA * found["guidance_loss"] + LAMBDA * found["gate_penalty"], rel=1e-5
        )
        # What trl logs is there as well.
        assert {"entropy", "mean_token_accuracy", "num_tokens", "expected_heads_decoder"} <= found.keys()
    torch.testing.assert_close(
        *(parameters_to_vector(each.parameters()) for each in (model, twin)), rtol=1e-5, atol=1e-6
    )


def test_the_forward_pass_keeps_its_arguments_and_another_trainer_its_losses(tmp_path):
    model = build()
    expected = inspect.signature(model.forward)
    first = trainer(tmp_path, model)
    assert inspect.signature(model.forward) == expected
    first.train()
    model.load_state_dict(build().state_dict())
    again, fresh = trainer(tmp_path, model), trainer(tmp_path, build())
    for made in (again, fresh):
        made.train()
    losses = [[entry["loss"] for entry in made.state.log_history if "loss" in entry] for made in (again, fresh)]
    assert losses[0] == losses[1]


def test_evaluation_is_that_of_trl(tmp_path):
    model = build()
    made, stock = trainer(tmp_path, model), trainer(tmp_path, build(), trl.SFTTrainer)
    expected = stock.evaluate()
    found = made.evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert found[name] == expected[name]


def test_the_weight_of_guidance_balances_the_first_losses_and_so_many_heads_are_left(tmp_path):
    model = build()
    made = trainer(
        tmp_path, model, guidance_weight="auto", gate_penalty=0.0, target_heads=3, max_steps=4, optim="adamw_torch"
    )
    made.train()
    first = next(entry for entry in made.state.log_history if "task_loss" in entry)
    assert made.initial_guidance_weight * first["guidance_loss"] == pytest.approx(first["task_loss"], rel=0.2)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    expected = model.eval()(ids).logits
    assert made.prune() is model
    assert sum(map(len, model.config.kept_heads().values())) == 3
    assert not model.head_gates()
    torch.testing.assert_close(model(ids).logits, expected)
    # What is left trains on, and can be saved.
    made.args.target_heads = None
    before = parameters_to_vector(model.parameters()).clone()
    made.train()
    assert not torch.equal(parameters_to_vector(model.parameters()), before)
    made.save_model(tmp_path / "pruned")
    again = HeadwiseBertLMHeadModel.from_pretrained(tmp_path / "pruned").eval()
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("settings", [{"ema_decay": 0.9}, {"layer_rate_decay": 0.5}, {"freeze_decoder": True}])
def test_arguments_that_no_class_of_the_trainer_reads_are_refused(tmp_path, settings):
    (name, value), *_ = settings.items()
    with pytest.raises(ValueError, match=f"{name}={value}, but HeadwiseSFTTrainer does not read it"):
        trainer(tmp_path, build(), **settings)


def test_mixins_that_read_them_go_before_trl_as_well(tmp_path):
    class Averaged(HeadwiseTrainerMixin, WeightAverageMixin, LayerRatesMixin, trl.SFTTrainer):
        pass

    plain, averaged = (
        trainer(tmp_path, build(), Averaged, ema_decay=decay, layer_rate_decay=0.5) for decay in (0.0, 0.9)
    )
    for made in (plain, averaged):
        made.train()
    losses = [[entry["loss"] for entry in made.state.log_history if "loss" in entry] for made in (plain, averaged)]
    assert losses[0] == losses[1]
    assert not torch.equal(*(parameters_to_vector(made.model.parameters()) for made in (plain, averaged)))
    assert {round(group["lr"] / RATE, 3) for group in plain.optimizer.param_groups} >= {0.25, 0.5, 1.0}


def test_supervised_fine_tuning_learns_the_hidden_states_of_a_teacher(tmp_path):
    torch.manual_seed(1)
    teacher = BertLMHeadModel(build().config).eval()
    student = build().eval()
    settings = {"guidance_weight": 0.0, "gate_penalty": 0.0, "hidden_distillation_weight": 2.0}
    batch = collate([{**row, "attention_mask": [1] * len(row["input_ids"])} for row in DATA.to_list()[:4]])
    with torch.no_grad():
        own, taught = (model(**batch, output_hidden_states=True).hidden_states for model in (student, teacher))
    distances = hidden_layer_distances(own, taught, batch["attention_mask"])
    expected = hidden_distillation_loss(own, taught, batch["attention_mask"], match_hidden_layers(distances))
    student.train()
    for gate in student.head_gates().values():
        gate.log_alpha.data.fill_(20.0)  # open whatever the noise
    with torch.no_grad():
        again = student(**batch, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(again, own[-1])
    made = trainer(tmp_path, student, teacher=teacher, **settings)
    made.train()
    log = made.state.log_history[0]
    assert log["hidden_distillation_loss"] == pytest.approx(float(expected), rel=1e-4)
    assert log["loss"] == pytest.approx(log["task_loss"] + 2 * log["hidden_distillation_loss"], rel=1e-5)


def test_a_copy_of_the_model_teaches_with_its_own_weights(tmp_path):
    student = build()
    off = {"guidance_weight": 0.0, "gate_penalty": 0.0}
    made = trainer(tmp_path, student, teacher="self", hidden_distillation_weight=2.0, **off)
    batch = collate([{**row, "labels": row["input_ids"]} for row in DATA.to_list()[:4]])
    teacher = made.teacher.eval()
    before = teacher(**batch).loss
    with torch.no_grad(), edited(student):
        assert teacher(**batch).loss == before
        assert evaluation_view(teacher).root(**batch).loss == before
        for settings in ({}, {"fused_lm_head": True}):
            own = student.eval()(**batch, **settings).loss
            assert own != before
            assert evaluation_view(student).root(**batch, **settings).loss == own


def test_analyses_read_a_model_that_trl_trains(tmp_path):
    model = BertLMHeadModel(build().config)
    ids = torch.tensor([DATA[0]["input_ids"]])
    logits, before = model.eval()(ids).logits, attention_maps(model, {"input_ids": ids})
    trl.SFTTrainer(model, trainer(tmp_path, build()).args, train_dataset=DATA, processing_class=words())
    assert "forward" in vars(model)
    for kind, maps in attention_maps(model, {"input_ids": ids}).items():
        assert torch.equal(maps, before[kind])
    with masked_heads(model, {0: [0, 1]}):
        assert not torch.equal(model(ids).logits, logits)
    assert torch.equal(model(ids).logits, logits)


@contextmanager
def edited(model):
    """A model with other weights within the block."""
    weights = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.mul_(0.5)
    yield
    model.load_state_dict(weights)
