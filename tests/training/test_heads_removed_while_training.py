# Licensed under the Apache License, Version 2.0.
"""What is left of a model trains on when a callback removes heads, whatever is saved, resumed and loaded."""

import copy

import pytest
import torch
from stock_models import build_stock
from tiny_models import SIZES
from tiny_training import STILL, build, collate, examples, trainer
from torch.nn.utils import parameters_to_vector
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, GenerationConfig, Trainer, TrainerCallback

from hf_attn_dynamics import HeadwiseTrainer, prune_closed_gates, prune_heads
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.training import GateHistory, HeadwiseTrainingArguments, WeightAverageTrainer
from hf_attn_dynamics.training.prunable_trainer import take_heads_of


HEADS = {0: [1, 2], 1: [0, 1, 2, 3]}
NINE = {"max_steps": 9, "learning_rate": 1e-2, "per_device_train_batch_size": 4, "guidance_weight": None}


class Remove(TrainerCallback):
    """Removes heads when an event comes after so many steps."""

    def __init__(self, event="on_step_end", step=4, remove=lambda model: prune_heads(model, HEADS)):
        self.removed = None
        setattr(self, event, self._called)
        self.step, self.remove = step, remove

    def _called(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step and self.removed is None:
            before = dict(model.named_parameters())
            self.remove(model)
            self.removed = {n: p.detach().clone() for n, p in model.named_parameters() if before.get(n) is not p}


def model_for(kind="headwise", **changes):
    if kind == "stock":
        torch.manual_seed(0)
        return BertForMaskedLM(BertConfig(**SIZES, **STILL))
    return build(guidance=None, **STILL, **changes)


def run(folder, model, *callbacks, resume=None, data=None, **settings):
    data = data or examples("MaskedLM")
    made = trainer(folder, model, data, data, callbacks=list(callbacks), **{**NINE, **settings})
    made.train(resume_from_checkpoint=resume)
    return made


@pytest.mark.parametrize("kind", ["headwise", "stock"])
@pytest.mark.parametrize(
    "event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_log", "on_evaluate", "on_save"]
)
def test_layers_that_lost_heads_train_on(tmp_path, kind, event):
    remove = Remove(event)
    model = model_for(kind)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}
    run(tmp_path, model, remove, **settings)
    assert len(remove.removed) > 5
    trained = dict(model.named_parameters())
    for name, value in remove.removed.items():
        # Scores are the same for all keys whatever the bias of keys.
        assert name.endswith("key.bias") or not torch.equal(trained[name], value), name


def test_the_others_train_as_if_their_tensors_had_never_been_replaced(tmp_path):
    # A copy of all tensors of a layer is the smallest removal of heads: of none.
    def exchange(model):
        layer = model.roberta.encoder.layer[0].attention.self
        layer.query.weight = torch.nn.Parameter(layer.query.weight.detach().clone())

    plain, exchanged = (model_for() for _ in range(2))
    settings = {"optim": "sgd", "optim_args": "momentum=0.0", "lr_scheduler_type": "cosine"}
    rates = []
    for model, callbacks in ((plain, ()), (exchanged, (Remove(remove=exchange),))):
        made = run(tmp_path, model, *callbacks, max_grad_norm=0.5, **settings)
        rates.append([entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry])
    # Plain gradient descent has no state that the new tensor could lack.
    assert torch.equal(parameters_to_vector(plain.parameters()), parameters_to_vector(exchanged.parameters()))
    assert rates[0] == rates[1]


def test_new_tensors_have_new_state_and_all_others_keep_theirs(tmp_path):
    steps = {}

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
            if state.global_step == 9:
                steps.update({n: int(optimizer.state[p]["step"]) for n, p in model.named_parameters()})

    remove = Remove()
    made = run(tmp_path, model_for(), remove, Look())
    assert {name for name, number in steps.items() if number == 5} == set(remove.removed)
    assert set(steps.values()) == {5, 9}
    held = [p for group in made.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in made.model.parameters()}
    assert set(made.optimizer.state) == set(held)


def test_heads_that_are_removed_within_a_step_are_refused(tmp_path):
    with pytest.raises(ValueError, match="between the micro-batches of one step"):
        run(
            tmp_path,
            model_for(),
            Remove("on_substep_end"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
        )


GATED = {"gates": {"initial_log_alpha": [-1.0, 1.0]}, "seed": 3}
CASES = {
    "headwise": ({}, {}, None),
    "averaged": ({}, {"ema_decay": 0.9}, None),
    "layer_rates": ({}, {"layer_rate_decay": 0.8}, None),
    "gated": (GATED, {"gate_penalty": 0.01}, None),
    "gates_gone": (GATED, {"gate_penalty": 0.01, "ema_decay": 0.9}, prune_closed_gates),
    "guided": ({"guidance": {"fraction": 0.5}}, {"guidance_weight": "auto"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_resumed_from_before_or_after_its_pruning_ends_bit_for_bit_alike(tmp_path, case):
    changes, settings, remove = CASES[case]
    settings = {"save_strategy": "steps", "save_steps": 2, **settings}
    remove = remove or (lambda model: prune_heads(model, HEADS))

    def make():
        return build(**{"guidance": None, **STILL, **changes})

    ends = []
    for resume in (None, 2, 4, 6):
        model = make()
        folder = None if resume is None else str(tmp_path / f"checkpoint-{resume}")
        target = tmp_path if resume is None else tmp_path / f"from-{resume}"
        # A run that goes on from after its pruning has lost the heads already.
        callbacks = [] if resume in (4, 6) else [Remove(remove=remove)]
        run(target, model, *callbacks, resume=folder, **settings)
        ends.append(model)
    for other in ends[1:]:
        assert other.config.pruned_heads == ends[0].config.pruned_heads
        assert torch.equal(*(parameters_to_vector(m.parameters()) for m in (ends[0], other)))


def test_a_run_goes_on_without_gates_that_were_removed(tmp_path, caplog):
    model, history = build(guidance=None, **STILL, **GATED), GateHistory(every=1)
    made = run(tmp_path, model, Remove(remove=prune_closed_gates), history, target_heads=4, target_warmup=0.1)
    assert model.head_gates() == {}
    assert history.steps == [0, 1, 2, 3, 4][: len(history.steps)]
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    assert ["gate_penalty" in entry for entry in logged] == [True] * 4 + [False] * 5
    assert "all gates are closed" not in caplog.text


def test_a_number_of_heads_that_cannot_be_kept_any_more_is_refused_at_once(tmp_path):
    model = build(guidance=None, gates={}, **STILL)
    made = trainer(tmp_path, model, examples("MaskedLM"), callbacks=[Remove()], **NINE, target_heads=3)
    with pytest.raises(
        ValueError, match="target_heads=3, but heads were removed during training, and only 2 gated heads"
    ):
        made.train()
    assert made.state.global_step == 4


class Worse(HeadwiseTrainer):
    """Its evaluations get worse and worse."""

    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        return {**metrics, "eval_worse": self.state.global_step}


@pytest.mark.parametrize("case", ["headwise", "gates_gone", "stock"])
def test_the_best_model_has_the_heads_that_it_had_then(tmp_path, case, caplog):
    changes, settings, remove = CASES.get(case, ({}, {}, None))
    model = model_for("stock") if case == "stock" else build(**{"guidance": None, **STILL, **changes})
    data = examples("MaskedLM")
    whole = {
        **NINE, **settings, "load_best_model_at_end": True,
        "metric_for_best_model": "worse", "greater_is_better": False,
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    made = trainer(tmp_path, model, data, data, **whole)
    callbacks = [Remove(remove=remove)] if remove else [Remove()]
    worse = Worse(model, made.args, data_collator=collate, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    weights = {}

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2 and "ema_decay" not in settings:
                weights.update(copy.deepcopy(model.state_dict()))

    worse.add_callback(Look())
    worse.train()
    assert worse.model is model
    assert not model.config.pruned_heads
    assert "has other heads" in caplog.text
    for name, value in weights.items():
        assert torch.equal(model.state_dict()[name], value), name
    batch = collate(data.to_list())
    reloaded = type(model).from_pretrained(tmp_path / "checkpoint-2").eval()
    with torch.no_grad():
        assert torch.equal(model.eval()(**batch).logits, reloaded(**batch).logits)


def test_averaged_stock_models_train_on_too(tmp_path):
    remove, model, data = Remove(), model_for("stock"), examples("MaskedLM")
    args = HeadwiseTrainingArguments(
        str(tmp_path), max_steps=9, learning_rate=1e-2, ema_decay=0.5, save_strategy="no", report_to="none",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    made = WeightAverageTrainer(model, args, data_collator=collate, train_dataset=data, callbacks=[remove])
    made.train()
    trained = dict(model.named_parameters())
    assert [n for n, value in remove.removed.items() if torch.equal(trained[n], value) and "key.bias" not in n] == []


def test_the_stock_trainer_leaves_pruned_layers_as_they_are(tmp_path):
    # What the guide warns of; once this fails, so does the warning.
    remove, model, data = Remove(), model_for("stock"), examples("MaskedLM")
    args = trainer(tmp_path, model, data, **NINE).args
    Trainer(model, args, data_collator=collate, train_dataset=data, callbacks=[remove]).train()
    trained = dict(model.named_parameters())
    assert all(torch.equal(trained[name], value) for name, value in remove.removed.items())


@pytest.mark.parametrize("case", ["headwise", "gates_gone"])
def test_a_model_has_the_heads_of_whatever_checkpoint_a_run_goes_on_from(tmp_path, case):
    changes, settings, remove = CASES[case]
    # Without a penalty, which a model that has lost its gates could not pay.
    settings = {"save_strategy": "steps", "save_steps": 2, **settings, "gate_penalty": 0.0}
    remove = remove or (lambda model: prune_heads(model, HEADS))
    model = build(**{"guidance": None, **STILL, **changes})
    run(tmp_path, model, Remove(remove=remove), **settings)
    expected = parameters_to_vector(model.parameters()).detach().clone()
    # From after the pruning, with a model that has been pruned; and from a checkpoint of that run.
    for number, resume in enumerate((tmp_path / "checkpoint-6", tmp_path / "again-0" / "checkpoint-8")):
        pruned = type(model).from_pretrained(tmp_path / "checkpoint-6")
        run(tmp_path / f"again-{number}", pruned, resume=str(resume), **settings)
        assert torch.equal(parameters_to_vector(pruned.parameters()), expected)
    # From before it, with the model as it has been left.
    settings["activation_checkpointing"] = True
    run(tmp_path / "back", model, Remove(remove=remove), resume=str(tmp_path / "checkpoint-2"), **settings)
    assert model.is_activation_checkpointing
    assert torch.equal(parameters_to_vector(model.parameters()), expected)


def test_a_frozen_decoder_that_loses_heads_stays_frozen_until_the_end(tmp_path):
    heads = {"encoder": {0: [1]}, "decoder": {0: [0], 1: [0, 1]}, "cross": {0: [1]}}
    remove = Remove(remove=lambda model: prune_heads(model, heads))
    model = build("Translation", "marian", guidance=None, gates={"encoder": {}}, hidden_dropout_prob=0.0)
    learnt = {name for name, p in model.named_parameters() if p.requires_grad}
    run(tmp_path, model, remove, data=examples("Translation"), gate_penalty=0.01)
    now = dict(model.named_parameters())
    changed = {name for name, value in remove.removed.items() if not torch.equal(now[name], value)}
    assert {name.split(".")[1] for name in changed} == {"encoder"}
    assert {name.split(".")[1] for name in remove.removed} == {"encoder", "decoder"}
    assert {name for name, p in now.items() if p.requires_grad} == learnt & set(now)


@pytest.mark.parametrize("holder", ["FSDP", "DeepSpeed", "optim=lomo"])
def test_heads_are_not_removed_under_what_holds_tensors_of_its_own(tmp_path, holder):
    def remove(model):
        # As if it were: not all of them are installed everywhere, or run on one process.
        made.is_fsdp_enabled, made.is_deepspeed_enabled = holder == "FSDP", holder == "DeepSpeed"
        if holder.startswith("optim"):
            made.args.optim = "lomo"
        # Of weights that FSDP spreads, prune_heads itself would not cut any.
        prune_closed_gates(model)

    model = model_for(gates={})
    made = trainer(tmp_path, model, examples("MaskedLM"), callbacks=[Remove(remove=remove)], **NINE)
    with pytest.raises(ValueError, match=f"was replaced or removed, but {holder} has a copy of the old tensor"):
        made.train()
    assert made.state.global_step == 4


def test_a_trainer_prunes_what_it_has_gated(tmp_path):
    model = model_for(**GATED)
    made = run(tmp_path, model, target_heads=3, target_warmup=0.1)
    ids = torch.randint(5, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    expected, loss = model.eval()(ids).logits, made.evaluate()["eval_loss"]
    assert made.prune() is model
    assert sum(map(len, model.config.kept_heads().values())) == 3
    assert not model.head_gates()
    torch.testing.assert_close(model.eval()(ids).logits, expected)
    assert made.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    made.save_model(tmp_path / "pruned")
    back = AutoModelForMaskedLM.from_pretrained(tmp_path / "pruned")
    torch.testing.assert_close(back(ids).logits, expected)
    # And goes on, once its arguments ask for no gates any more.
    with pytest.raises(ValueError, match="target_heads=3"):
        made.train()
    made.args.target_heads = None
    before = parameters_to_vector(model.parameters()).clone()
    made.train()
    assert not torch.equal(parameters_to_vector(model.parameters()), before)


def test_a_trainer_has_nothing_to_prune_without_gates(tmp_path):
    made = trainer(tmp_path, model_for(), examples("MaskedLM"), guidance_weight=0)
    with pytest.raises(ValueError, match="prune_closed_gates needs a model with gates"):
        made.prune()


def test_gates_of_a_model_that_was_not_trained_here_are_pruned_as_they_are(tmp_path):
    model = model_for(**GATED)
    closed = sum(int((gate.settled() == 0).sum()) for gate in model.head_gates().values())
    pruned = trainer(tmp_path, model, examples("MaskedLM"), guidance_weight=0).prune()
    assert sum(map(len, pruned.config.pruned_heads.values())) == closed > 0


def test_a_mixture_of_experts_takes_the_heads_of_a_checkpoint(tmp_path):
    model = build_stock("mixtral")
    fewer = prune_heads(copy.deepcopy(model), {0: [0, 1]})
    fewer.save_pretrained(tmp_path)
    assert take_heads_of(model, tmp_path)
    assert [layer.heads for layer in locate_heads(model)] == [layer.heads for layer in locate_heads(fewer)]


def with_optimizer(folder, model, *callbacks, **settings):
    """A trainer with an optimizer of the user, of all parameters of the model in two groups."""
    of_gates = [p for name, p in model.named_parameters() if "log_alpha" in name]
    others = [p for name, p in model.named_parameters() if "log_alpha" not in name]
    optimizer = torch.optim.AdamW([{"params": others, "lr": 1e-2}, {"params": of_gates, "lr": 0.1}])
    data = examples("MaskedLM")
    args = trainer(folder, model, data, **{**NINE, **settings}).args
    made = HeadwiseTrainer(
        model, args, data_collator=collate, train_dataset=data, callbacks=[*callbacks], optimizers=(optimizer, None)
    )
    return made, optimizer


def held_by(optimizer):
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def test_an_optimizer_of_the_user_follows_a_model_that_is_pruned_between_two_trainings(tmp_path):
    model = model_for(**GATED)
    made, optimizer = with_optimizer(tmp_path, model, gate_penalty=0.01)
    made.train()
    assert made.prune() is model
    parameters = {id(p) for p in model.parameters()}
    assert held_by(optimizer) == parameters
    assert {id(p) for p in optimizer.state} <= parameters
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made.args.gate_penalty = 0.0
    made.train()
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name]) and "key.bias" not in name]
    assert still == []


def test_an_optimizer_of_the_user_follows_the_heads_of_a_checkpoint(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "gate_penalty": 0.01}
    ends = []
    for resume in (None, 2, 6):
        model = model_for(**GATED)
        remove = [Remove(remove=prune_closed_gates)] if resume != 6 else []
        folder = tmp_path if resume is None else tmp_path / f"from-{resume}"
        if resume == 6:
            settings["gate_penalty"] = 0.0  # the model of the user has gates, that of the checkpoint has none
        made, optimizer = with_optimizer(folder, model, *remove, **settings)
        made.train(resume_from_checkpoint=None if resume is None else str(tmp_path / f"checkpoint-{resume}"))
        assert held_by(optimizer) == {id(p) for p in model.parameters()}
        ends.append(parameters_to_vector(model.parameters()))
    assert all(torch.equal(ends[0], other) for other in ends[1:])


def test_the_memory_of_an_optimizer_is_freed_with_the_tensors(tmp_path):
    model = model_for(**GATED)
    made = run(tmp_path, model, gate_penalty=0.01)
    assert made.optimizer.state
    gone = set(map(id, model.parameters()))
    made.prune()
    gone -= set(map(id, model.parameters()))
    assert gone
    assert gone.isdisjoint(map(id, made.optimizer.state))
    made.args.gate_penalty = 0.0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made.train()
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name]) and "key.bias" not in name]
    assert still == []


@pytest.mark.parametrize("event", ["on_step_end", "on_log"])
@pytest.mark.parametrize("target", [{"target_heads": 4}, {"target_flops": 0.8, "latency_length": 16}])
def test_a_callback_may_prune_with_the_trainer_and_training_continues(tmp_path, event, target):
    remove = Remove(event, remove=lambda model: made.prune())
    model = build(guidance=None, **STILL, **GATED)
    made = trainer(tmp_path, model, examples("MaskedLM"), callbacks=[remove], **NINE, **target)
    made.train()
    assert model.head_gates() == {}
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    assert len(logged) == 9
    assert "gate_penalty" not in logged[-1]
    now = dict(model.named_parameters())
    assert [n for n, value in remove.removed.items() if torch.equal(now[n], value) and "key.bias" not in n] == []


def test_a_rebuilt_model_has_noisy_embeddings_as_before(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "neftune_noise_alpha": 20.0}
    whole = model_for()
    run(tmp_path, whole, **settings)
    fewer = prune_heads(model_for(), HEADS)
    run(tmp_path / "again", fewer, resume=str(tmp_path / "checkpoint-4"), **settings)
    assert torch.equal(*(parameters_to_vector(model.parameters()) for model in (whole, fewer)))
    assert not hasattr(fewer.get_input_embeddings(), "neftune_noise_alpha")


def test_a_rebuilt_model_aligns_by_the_heads_of_the_checkpoint(tmp_path):
    model = build_stock("whisper")
    model.generation_config = GenerationConfig(alignment_heads=[[0, 1], [1, 3], [2, 2]])
    model.save_pretrained(tmp_path)
    prune_heads(model, {"cross": {0: [0], 1: [0, 1, 2, 3]}})
    assert model.generation_config.alignment_heads == [[0, 0], [2, 2]]
    prune_heads(model, {"cross": {2: [0]}})
    assert model.generation_config.alignment_heads == [[0, 0], [2, 1]]
    assert take_heads_of(model, tmp_path)
    assert model.generation_config.alignment_heads == [[0, 1], [1, 3], [2, 2]]


@pytest.mark.parametrize("what", ["tp", "cp", "sp"])
def test_heads_in_other_processes_are_refused(tmp_path, what):
    class Parallel(HeadwiseTrainer):
        pass

    setattr(Parallel, f"get_{what}_size", lambda self: 2)
    args = trainer(tmp_path, model_for(), examples("MaskedLM"), **NINE).args
    with pytest.raises(ValueError, match="headwise models do not support parallelism over .* 2 processes"):
        Parallel(model_for(), args, data_collator=collate, train_dataset=examples("MaskedLM"))


def test_the_best_model_is_found_in_a_folder_that_was_moved(tmp_path, caplog):
    class Stop(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 4

    settings = {
        **NINE, "load_best_model_at_end": True, "metric_for_best_model": "worse", "greater_is_better": False,
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    data, ends = examples("MaskedLM"), []
    for folder, callbacks, resume in (("old", [Stop()], None), ("new", [], True)):
        model = model_for()
        args = trainer(tmp_path / folder, model, data, data, **settings).args
        own = {"train_dataset": data, "eval_dataset": data, "data_collator": collate}
        worse = Worse(model, args, callbacks=callbacks, **own)
        worse.train(resume_from_checkpoint=resume)
        ends.append(parameters_to_vector(model.parameters()))
        if folder == "old":
            (tmp_path / "old").rename(tmp_path / "new")
    assert worse.state.global_step == 9
    assert worse.state.best_model_checkpoint == str(tmp_path / "new" / "checkpoint-2")
    assert "Could not locate the best model" not in caplog.text
    # The weights of step 2 in both cases.
    assert torch.equal(*ends)
