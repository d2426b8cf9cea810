# Licensed under the Apache License, Version 2.0.
"""Training on the hidden states of a teacher, layers matched as CoFi does."""

import copy
import types

import pytest
import torch
import transformers
from stock_models import STOCK_MODELS, build_stock, stock_inputs
from tiny_models import sizes, vivid
from tiny_training import DESCENT, STILL, assert_same, build, collate, examples, trainer
from transformers import HfArgumentParser, RobertaConfig, RobertaForMaskedLM

import hf_attn_dynamics as had
from hf_attn_dynamics.training import (
    Teacher,
    hidden_distillation_loss,
    hidden_layer_distances,
    match_hidden_layers,
)
from hf_attn_dynamics.training.hidden_distillation import (
    hidden_states_of,
    learned_layers,
    num_layers_of,
    removed_layers,
    stacks_of,
)


TASKS = [("roberta", "MaskedLM"), ("bert", "SequenceClassification"), ("marian", "Translation")]
ALONE = {"guidance_weight": None, "hidden_distillation_weight": 3.0}
WITH_LOGITS = {**ALONE, "distillation_weight": 0.4}


def same_size_teacher(task, kind, seed=1):
    return vivid(build(task, kind, seed=seed, guidance=None), seed=seed)


def student_of(task, kind, **changes):
    return vivid(build(task, kind, **STILL, **{"guidance": None, **changes}), seed=2)


def step(folder, task, kind, batch, accumulation, own_loss=None, student=None, steps=1, **settings):
    """Gradient (of one step), trainer and log of steps of plain gradient descent."""
    model = student or student_of(task, kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sizes_ = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "max_steps": steps}
    settings = {**DESCENT, **sizes_, **WITH_LOGITS, **settings}
    run = trainer(folder, model, examples(task, 8 * steps), teacher=same_size_teacher(task, kind), **settings)
    run.compute_loss_func = own_loss
    run.train()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, run


def states_and_masks(model, batch, **arguments):
    """Hidden states and token masks of each stack, from the outputs of the model."""
    outputs = model(**batch, output_hidden_states=True, **arguments)
    if not model.config.is_encoder_decoder:
        return outputs, {"encoder": (outputs.hidden_states, batch["attention_mask"].bool())}
    return outputs, {
        "encoder": (outputs.encoder_hidden_states, batch["attention_mask"].bool()),
        "decoder": (outputs.decoder_hidden_states, batch["labels"] != -100),
    }


def slow_loss(task, kind, weight=0.4, beta=3.0, temperature=2.0):
    """The loss of one step by the definitions, its gradient, and its parts; both models have two layers."""
    student, teacher = student_of(task, kind).train(), same_size_teacher(task, kind).eval()
    batch = collate(examples(task).to_list())
    outputs, own = states_and_masks(student, batch)
    with torch.no_grad():
        taught, other = states_and_masks(teacher, batch)
    hidden, pairs = 0.0, {}
    for stack, (states, mask) in own.items():

        def distance(i, j, states=states, mask=mask, stack=stack):
            difference = states[i + 1][mask] - other[stack][0][j + 1][mask]
            return difference.square().sum(-1).mean() / states[0].shape[-1]

        # The last layer of the teacher chooses, then the first one among those below.
        last = min(range(2), key=lambda i: float(distance(i, 1)))
        pairs[stack] = {last: 1} if last == 0 else {0: 0, 1: 1}
        hidden = hidden + sum(distance(i, j) for i, j in pairs[stack].items())
    rows = batch["labels"] != -100
    log_p, log_q = ((one.logits / temperature).log_softmax(-1)[rows] for one in (outputs, taught))
    distilled = temperature**2 * (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    loss = (1 - weight) * outputs.loss + weight * distilled + beta * hidden
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in student.named_parameters()}
    return grads, {"loss": loss, "hidden_distillation_loss": hidden, "distillation_loss": distilled}, pairs


# ---- The loss, and the choice of layers ----


def test_the_loss_is_the_mean_squared_difference_of_tokens_summed_over_pairs():
    generator = torch.Generator().manual_seed(0)
    own, other = torch.randn(2, 4, 3, 5, 6, generator=generator).double()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0]])
    tokens = [(i, j) for i in range(3) for j in range(5) if mask[i, j]]
    expected = sum(
        sum(float((own[a + 1][at] - other[b + 1][at]).square().sum()) for at in tokens) / (len(tokens) * 6)
        for a, b in {0: 2, 2: 1}.items()
    )
    found = hidden_distillation_loss(own.unbind(), other.unbind(), mask, {0: 2, 2: 1})
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(expected, rel=1e-12)
    # Padding does not count, nor does its length.
    own[:, mask == 0], longer = 1e6, torch.nn.functional.pad(own, (0, 0, 0, 2), value=7.0)
    wide = torch.nn.functional.pad(other, (0, 0, 0, 2))
    again = hidden_distillation_loss(longer, wide, torch.nn.functional.pad(mask, (0, 2)), {0: 2, 2: 1})
    assert float(again) == pytest.approx(expected, rel=1e-12)
    # Parts of a batch sum up to the whole.
    parts = [
        hidden_distillation_loss(own[:, i : i + 1], other[:, i : i + 1], mask[i : i + 1], {0: 2, 2: 1}, len(tokens))
        for i in range(3)
    ]
    assert float(sum(parts)) == pytest.approx(expected, rel=1e-12)


def test_the_gradient_is_that_of_finite_differences_and_none_reaches_the_teacher():
    own, other = torch.randn(2, 3, 2, 4, 3, generator=torch.Generator().manual_seed(1)).double()
    own.requires_grad_()
    other.requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert torch.autograd.gradcheck(
        lambda states: hidden_distillation_loss(states.unbind(), other.detach(), mask, {0: 1, 1: 0}), (own,)
    )
    hidden_distillation_loss(own.unbind(), other.unbind(), mask, {0: 1, 1: 0}).backward()
    assert other.grad is None
    assert not own.grad[0].any()
    assert not own.grad[:, 0, 2:].any()
    assert all(not one.requires_grad for one in hidden_layer_distances(own.unbind(), other.unbind()).values())


def test_a_part_without_tokens_has_a_loss_of_zero():
    states = torch.ones(3, 1, 2, 4, requires_grad=True)
    loss = hidden_distillation_loss(states.unbind(), torch.zeros(3, 1, 2, 4).unbind(), torch.zeros(1, 2), {0: 0}, 5)
    loss.backward()
    assert float(loss) == 0
    assert not states.grad.any()


@pytest.mark.parametrize(
    ("layers", "learned"),
    [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (6, [1, 3, 5]), (7, [0, 2, 4, 6]), (12, [2, 5, 8, 11])],
)
def test_every_kth_layer_of_the_teacher_is_learned(layers, learned):
    assert learned_layers(layers) == learned


def slow_matching(distances, removed):
    """The loop of CoFi's code over sorted distances, in which removed layers are left out by their number."""
    layers, alignment = sorted(distances), {}
    last_aligned = len(distances[layers[0]])
    for layer in layers[::-1]:
        indices = torch.tensor(distances[layer]).sort(stable=True)[1].tolist()
        align = [index for index in indices if index < last_aligned and index not in removed]
        if align:
            alignment[align[0]] = layer
        last_aligned = align[0] if align else 0
    return alignment


@pytest.mark.parametrize("seed", range(20))
def test_layers_are_matched_as_by_the_code_of_cofi(seed):
    generator = torch.Generator().manual_seed(seed)
    distances = {layer: torch.rand(12, generator=generator).tolist() for layer in (2, 5, 8, 11)}
    removed = set(torch.randperm(12, generator=generator)[: seed % 12].tolist())
    pairs = match_hidden_layers(distances, removed)
    assert pairs == slow_matching(distances, removed)
    assert list(pairs) == sorted(pairs)
    assert list(pairs.values()) == sorted(pairs.values())
    assert not removed & pairs.keys()


def test_without_remaining_layers_nothing_is_matched():
    assert match_hidden_layers({0: [1.0, 2.0], 1: [0.5, 0.1]}, [0, 1]) == {}
    # The last layer of the teacher takes the lowest of the student, and leaves nothing to the others.
    assert match_hidden_layers({0: [1.0, 2.0], 1: [0.1, 0.5]}) == {0: 1}


@pytest.mark.parametrize("name", STOCK_MODELS)
def test_the_hidden_states_of_every_architecture_are_read(name):
    model = build_stock(name)
    batch = stock_inputs(model)
    stacks = stacks_of(model)
    layers = {kind: learned_layers(num_layers_of(model, kind)) for kind in stacks}
    taught = Teacher(model, model, {}, layers)(batch).hidden_states
    with torch.no_grad():
        outputs = model(**batch, output_hidden_states=True, return_dict=True)
    for kind, states in hidden_states_of(model, outputs, stacks).items():
        assert len(states) == num_layers_of(model, kind) + 1
        for layer, distances in hidden_layer_distances(states, taught[kind], layers=layers[kind]).items():
            assert distances.argmin() == layer
            assert distances[layer] < 1e-10


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_decoder_may_have_more_layers_than_its_encoder(name):
    counts = {"bart": "decoder_layers", "t5": "num_decoder_layers"}
    model = build_stock(name, **{counts[name]: 5})
    layers = {"encoder": [2], "decoder": [2, 4]}
    taught = Teacher(model, model, {}, layers)(stock_inputs(model)).hidden_states
    for kind, chosen in layers.items():
        assert [place for place, state in enumerate(taught[kind]) if state is not None] == [one + 1 for one in chosen]


# ---- Training ----


@pytest.mark.parametrize(("kind", "task"), TASKS)
def test_a_step_is_the_hand_written_one(tmp_path, kind, task):
    found, run = step(tmp_path, task, kind, 2, 4)
    expected, losses, pairs = slow_loss(task, kind)
    assert run.hidden_pairs == pairs
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * scale + 1e-6, msg=name)
    for name, value in losses.items():
        assert run.state.log_history[0][name] == pytest.approx(float(value), rel=2e-4), name


@pytest.mark.parametrize(("kind", "task"), TASKS)
def test_accumulated_micro_batches_give_the_steps_of_one_batch(tmp_path, kind, task):
    settings = {"learning_rate": 1e-2, "steps": 3}
    whole, of_whole = step(tmp_path / "1x8", task, kind, 8, 1, **settings)
    parts, of_parts = step(tmp_path / "4x2", task, kind, 2, 4, **settings)
    assert_same(parts, whole)
    assert of_parts.hidden_pairs == of_whole.hidden_pairs
    for one, other in zip(of_parts.state.log_history[:3], of_whole.state.log_history[:3]):
        for name in ("loss", "hidden_distillation_loss", "distillation_loss", "task_loss"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name


def test_the_layers_of_a_step_are_the_nearest_ones_of_the_step_before(tmp_path, monkeypatch):
    seen = []
    original = had.HeadwiseTrainer.training_step

    def training_step(self, model, inputs, num_items_in_batch=None):
        seen.append((self.state.global_step, self.hidden_pairs, dict(self._hidden.distances)))
        return original(self, model, inputs, num_items_in_batch)

    monkeypatch.setattr(had.HeadwiseTrainer, "training_step", training_step)
    _, run = step(tmp_path, "MaskedLM", "roberta", 4, 2, steps=3, learning_rate=1e-2)
    assert [number for number, *_ in seen] == [0, 0, 1, 1, 2, 2]
    for number in range(3):
        (_, pairs, distances), (_, again, others) = seen[2 * number : 2 * number + 2]
        assert pairs == again
        assert distances == others
        assert pairs == {"encoder": match_hidden_layers(distances["encoder"])}
    first = run.state.log_history[0]["hidden_distillation_loss"]
    chosen = sum(seen[0][2]["encoder"][other][own] for own, other in seen[0][1]["encoder"].items())
    # Without dropout, a rehearsal is the first step.
    assert first == pytest.approx(chosen, rel=1e-5)


def test_a_task_loss_that_the_trainer_computes_is_treated_in_the_same_way(tmp_path):
    def summed(outputs, labels, num_items_in_batch):
        logits = outputs["logits"].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch

    found, run = step(tmp_path / "own", "MaskedLM", "roberta", 2, 4, own_loss=summed)
    expected, other = step(tmp_path / "model", "MaskedLM", "roberta", 2, 4)
    assert_same(found, expected)
    assert run.state.log_history[0]["loss"] == pytest.approx(other.state.log_history[0]["loss"], rel=1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(tmp_path, use_reentrant):
    expected, _ = step(tmp_path / "whole", "MaskedLM", "roberta", 4, 2)
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    found, run = step(tmp_path / "parts", "MaskedLM", "roberta", 4, 2, **settings)
    assert run.model.is_activation_checkpointing
    assert_same(found, expected)


def test_guidance_and_gates_are_added_as_before(tmp_path):
    """The gradient is the sum of those of the parts, since the loss is."""
    guided = {"guidance": {"heads": {"prev": [1]}}, "gates": {"initial_log_alpha": 0.5}}

    def gradient(name, weight, beta, teacher=True):
        settings = {"guidance_weight": 2.0, "distillation_weight": weight, "hidden_distillation_weight": beta}
        model = student_of("MaskedLM", "roberta", **guided)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        own = same_size_teacher("MaskedLM", "roberta") if teacher else None
        settings |= {"gate_penalty": 0.1, "gate_learning_rate": 1.0, "per_device_train_batch_size": 2}
        run = trainer(
            tmp_path / name,
            model,
            examples("MaskedLM"),
            teacher=own,
            gradient_accumulation_steps=4,
            **DESCENT,
            **settings,
        )
        run.train()
        assert {"guidance_loss", "gate_penalty", "task_loss"} <= run.state.log_history[0].keys()
        return {name: before[name] - p.detach() for name, p in model.named_parameters()}

    neither, hidden = gradient("neither", 0.0, 0.0, teacher=False), gradient("hidden", 0.0, 2.0)
    logits, both = gradient("logits", 0.3, 0.0), gradient("both", 0.3, 2.0)
    for name, value in neither.items():
        torch.testing.assert_close(both[name] - logits[name], hidden[name] - value, rtol=1e-3, atol=1e-5, msg=name)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {"learning_rate": 1e-2, "hidden_distillation_weight": 2.0, "guidance_weight": None}

    def run(folder, resume=None):
        one = trainer(
            folder,
            build("MaskedLM", "roberta", guidance=None),
            examples("MaskedLM"),
            teacher=same_size_teacher("MaskedLM", "roberta"),
            **settings,
        )
        one.train(resume_from_checkpoint=resume)
        return one

    whole = run(tmp_path / "whole")
    parts = run(tmp_path / "parts", str(tmp_path / "whole" / "checkpoint-2"))
    for one, other in zip(whole.model.parameters(), parts.model.parameters()):
        assert torch.equal(one, other)
    assert parts._hidden.distances == whole._hidden.distances


def other_tasks():
    torch.manual_seed(0)
    ids = torch.randint(4, 60, (8, 9))
    llama = {"num_key_value_heads": 2, **sizes("roberta")}
    t5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    t5 |= {"vocab_size": 60, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    vit = {"image_size": 8, "patch_size": 4, **{k: v for k, v in sizes("roberta").items() if "vocab" not in k}}
    vit.pop("max_position_embeddings")
    text = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids.tolist()]
    for number, row in enumerate(text):
        keep = 9 - number % 4
        row |= {name: value[:keep] for name, value in row.items()}
    images = torch.randn(8, 3, 8, 8).tolist()
    return {
        "llama": ("LlamaForCausalLM", "LlamaConfig", llama, [{**row, "labels": row["input_ids"]} for row in text]),
        "t5": (
            "T5ForConditionalGeneration",
            "T5Config",
            t5,
            [{**row, "labels": row["input_ids"][:5]} for row in text],
        ),
        "vit": (
            "ViTForImageClassification",
            "ViTConfig",
            vit,
            [{"pixel_values": image, "labels": number % 2} for number, image in enumerate(images)],
        ),
    }


@pytest.mark.parametrize("name", ["llama", "t5", "vit"])
def test_other_architectures_learn_in_the_same_way(name, tmp_path):
    model_class, config_class, settings, rows = other_tasks()[name]
    makes = getattr(had, f"Headwise{config_class}"), getattr(had, f"Headwise{model_class}")
    stock = getattr(transformers, config_class), getattr(transformers, model_class)

    def run(batch, accumulation):
        torch.manual_seed(0)
        student = makes[1](makes[0](**settings, guidance=None)).train()
        torch.manual_seed(1)
        teacher = stock[1](stock[0](**settings))
        one = trainer(
            tmp_path / str(batch),
            student,
            rows,
            teacher=teacher,
            **{**DESCENT, **ALONE, "learning_rate": 0.1, "max_steps": 3},
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
        )
        one.train()
        return one

    whole, parts = run(8, 1), run(2, 4)
    for one, other in zip(parts.model.parameters(), whole.model.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    losses = [entry["hidden_distillation_loss"] for entry in whole.state.log_history[:3]]
    assert losses == sorted(losses, reverse=True)
    kinds = {"llama": ["decoder"], "t5": ["encoder", "decoder"], "vit": ["encoder"]}[name]
    assert list(whole.hidden_pairs) == kinds
    if name == "t5":
        assert set(whole._hidden.distances["decoder"]) == {0, 1, 2}


def test_a_loss_outside_of_training_matches_the_layers_of_its_batch(tmp_path):
    student, teacher = student_of("MaskedLM", "roberta"), same_size_teacher("MaskedLM", "roberta")
    run = trainer(tmp_path, student, examples("MaskedLM"), teacher=teacher, **WITH_LOGITS)
    loss = run.compute_loss(student.train(), collate(examples("MaskedLM").to_list()))
    assert float(loss) == pytest.approx(float(slow_loss("MaskedLM", "roberta")[1]["loss"]), rel=1e-4)


def test_evaluation_needs_no_hidden_states(tmp_path):
    run = trainer(
        tmp_path,
        student_of("MaskedLM", "roberta"),
        examples("MaskedLM"),
        teacher=same_size_teacher("MaskedLM", "roberta"),
        **ALONE,
    )
    run.train()
    assert "hidden_distillation_loss" in run.state.log_history[0]
    assert "distillation_loss" not in run.state.log_history[0]
    output = run.predict(examples("MaskedLM"))
    assert isinstance(output.predictions, type(output.label_ids))


def test_a_task_without_classes_learns_hidden_states(tmp_path):
    student = build("QuestionAnswering", **STILL, guidance=None)
    run = trainer(tmp_path, student, examples("QuestionAnswering"), teacher="self", **ALONE)
    run.train()
    assert run.state.log_history[0]["hidden_distillation_loss"] == pytest.approx(0, abs=1e-9)


# ---- The model itself as its teacher ----


def test_the_teacher_may_be_a_copy_of_the_model_without_gates(tmp_path):
    student = student_of("MaskedLM", "roberta", gates={"initial_log_alpha": 0.5})
    student.head_gates()["encoder", 0].log_alpha.data[:3] = -2.0
    before = {name: p.detach().clone() for name, p in student.named_parameters() if "gate" not in name}
    run = trainer(tmp_path, student, examples("MaskedLM"), teacher="self", **WITH_LOGITS, max_steps=2)
    run.train()
    teacher = run.teacher
    assert teacher.config.gates is None
    assert student.config.gates is not None
    assert not teacher.head_gates()
    for name, p in teacher.named_parameters():
        assert torch.equal(p, before[name])
        assert not p.requires_grad
    assert run.state.log_history[0]["hidden_distillation_loss"] > 1e-4


# ---- Removed layers ----


class Closed:
    """A stand-in for a gate with this many elements, of which none is open."""

    def __init__(self, is_open=0.0):
        self.is_open = is_open

    def settled(self):
        return torch.full((4,), self.is_open)


def test_a_layer_is_removed_if_both_of_its_blocks_are():
    model = build("MaskedLM", "roberta", guidance=None, num_hidden_layers=4)
    assert removed_layers(model) == {}
    had.models.prune_layers(model, [1])
    had.models.prune_layers(model, [2], blocks="feed_forward")
    had.models.prune_layers(model, [3], blocks="attention")
    assert removed_layers(model) == {"encoder": {1}}
    pair = build("Translation", "marian", guidance=None)
    had.models.prune_layers(pair, {"decoder": [0]})
    assert removed_layers(pair) == {"decoder": {0}}


def test_a_layer_is_removed_if_the_gates_of_both_blocks_are_closed():
    model = build("MaskedLM", "roberta", guidance=None, num_hidden_layers=4, gates={})
    layers = model.roberta.encoder.layer
    for number in (1, 2):
        model.head_gates()["encoder", number].log_alpha.data.fill_(-3.0)
    for number, is_open in ((1, 0.0), (2, 1.0), (3, 0.0)):
        layers[number].unit_gate = Closed(is_open)
    assert removed_layers(model) == {"encoder": {1}}


@pytest.mark.parametrize(("removed", "last"), [([1], 3), ([3], 2), ([0, 2, 3], 1)])
def test_removed_layers_are_not_matched(tmp_path, removed, last):
    student = build("MaskedLM", "roberta", guidance=None, num_hidden_layers=4, **STILL)
    had.models.prune_layers(student, removed)
    teacher = vivid(build("MaskedLM", "roberta", guidance=None, num_hidden_layers=4, seed=1), seed=1)
    run = trainer(tmp_path, student, examples("MaskedLM"), teacher=teacher, **ALONE)
    run.train()
    pairs = run.hidden_pairs["encoder"]
    assert pairs
    assert not set(removed) & pairs.keys()
    assert max(pairs) <= last


def test_the_last_state_is_that_of_the_last_layer_that_is_left(tmp_path):
    """With a final norm, it is the only state that can equal the last one of the teacher."""
    config = had.HeadwiseLlamaConfig(**{**sizes("roberta"), "num_hidden_layers": 3}, num_key_value_heads=2)
    teacher = had.models.prune_layers(had.HeadwiseLlamaForCausalLM(config), [2])
    student = copy.deepcopy(teacher)
    data = examples("CausalLM")
    settings = {**ALONE, "hidden_distillation_layers": [2]}
    run = trainer(tmp_path, student, data, teacher=teacher, **settings)
    run.train()
    assert run.hidden_pairs == {"decoder": {1: 2}}
    assert run.state.log_history[0]["hidden_distillation_loss"] == pytest.approx(0, abs=1e-10)


# ---- Arguments, and bad input ----


def test_layers_may_be_given_as_a_list_a_string_or_by_stack(tmp_path):
    def layers(given):
        args = had.HeadwiseTrainingArguments(
            str(tmp_path), hidden_distillation_weight=1.0, hidden_distillation_layers=given
        )
        return args.hidden_distillation_layers

    assert layers([5, 2]) == layers("2,5") == layers("[5, 2]") == layers("2, 5") == [2, 5]
    assert layers({"decoder": [1, 0]}) == layers('{"decoder": [1, 0]}') == {"decoder": [0, 1]}
    parsed = HfArgumentParser(had.HeadwiseTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--hidden_distillation_weight", "1", "--hidden_distillation_layers", "2,5"]
    )
    assert parsed[0].hidden_distillation_layers == [2, 5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_distillation_weight": -1}, "hidden_distillation_weight must be finite and at least 0, got -1"),
        ({"hidden_distillation_weight": "inf"}, "hidden_distillation_weight must be finite and at least 0, got inf"),
        ({"hidden_distillation_weight": "much"}, "hidden_distillation_weight must be a number, got 'much'"),
        ({"hidden_distillation_layers": [1]}, "needs a hidden_distillation_weight above 0"),
        ({"hidden_distillation_layers": []}, "hidden_distillation_layers must be a list of layers from 0, got "),
        ({"hidden_distillation_layers": [-1]}, r"must be a list of layers from 0, got \[-1\]"),
        ({"hidden_distillation_layers": "last"}, r"hidden_distillation_layers=\[last\] is not valid JSON"),
        ({"hidden_distillation_layers": [1, 1]}, r"must be unique, got \[1, 1\]"),
        ({"hidden_distillation_layers": {"cross": [1]}}, "must name encoder or decoder, got {'cross'"),
        ({"hidden_distillation_layers": {"encoder": 1}}, "of the encoder must be a list of layers from 0, got 1"),
    ],
)
def test_invalid_arguments_are_named(settings, message, tmp_path):
    weight = {} if "above" in message else {"hidden_distillation_weight": 1.0}
    with pytest.raises(ValueError, match=message):
        had.HeadwiseTrainingArguments(output_dir=str(tmp_path), **{**weight, **settings})


def refused(folder, match, student=None, teacher=None, **settings):
    student = student or student_of("MaskedLM", "roberta")
    with pytest.raises(ValueError, match=match):
        trainer(folder, student, examples("MaskedLM"), teacher=teacher, **{**ALONE, **settings})


def test_a_teacher_that_does_not_fit_is_named(tmp_path):
    refused(tmp_path, "hidden_distillation_weight=3.0 needs a teacher")
    message = (
        "needs the same hidden size, but the student, HeadwiseRobertaForMaskedLM, has 16, and the teacher, "
        "RobertaForMaskedLM, has 24"
    )
    wide = RobertaForMaskedLM(RobertaConfig(**{**sizes("roberta"), "hidden_size": 24}))
    refused(tmp_path, message, teacher=wide)
    deep = RobertaForMaskedLM(RobertaConfig(**{**sizes("roberta"), "num_hidden_layers": 3}))
    message = "name layer 3, but the layers of the encoder of RobertaForMaskedLM are 0 to 2"
    refused(tmp_path, message, teacher=deep, hidden_distillation_layers=[1, 3])
    message = "name the decoder, but the stacks of the models are encoder"
    refused(tmp_path, message, teacher=deep, hidden_distillation_layers={"decoder": [1]})
    pair = same_size_teacher("Translation", "marian")
    refused(tmp_path, "only one of HeadwiseRobertaForMaskedLM and HeadwiseMarianMTModel is an", teacher=pair)
    message = r"must name stacks of HeadwiseMarianMTModel: pass {'encoder': \[1\], 'decoder': \[1\]}"
    student = student_of("Translation", "marian")
    refused(tmp_path, message, student, pair, hidden_distillation_layers=[1])


def test_functions_name_what_is_wrong():
    own, other = torch.zeros(3, 1, 2, 4).unbind(), torch.zeros(3, 1, 2, 5).unbind()
    with pytest.raises(ValueError, match="2 tokens × 4 features, the teacher of 2 × 5"):
        hidden_distillation_loss(own, other, None, {0: 0})
    with pytest.raises(ValueError, match="the teacher has no hidden states of layer 2; its layers are 0 to 1"):
        hidden_distillation_loss(own, own, None, {0: 2})
    with pytest.raises(ValueError, match="the student has no hidden states of layer -1"):
        hidden_distillation_loss(own, own, None, {-1: 1})
    with pytest.raises(ValueError, match=r"mask must have the shape \(1, 2\) of the hidden states, got \(2,\)"):
        hidden_layer_distances(own, own, torch.ones(2))
    model = types.SimpleNamespace(config=types.SimpleNamespace(is_encoder_decoder=False))
    with pytest.raises(ValueError, match="returns no hidden states of its encoder"):
        hidden_states_of(model, {}, ["encoder"])
