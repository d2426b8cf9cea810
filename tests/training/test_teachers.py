# Licensed under the Apache License, Version 2.0.
"""Training with a teacher: its attention and its logits."""

import json

import pytest
import torch
from tiny_models import sizes, tiny_config, vivid
from tiny_training import DESCENT, STILL, assert_same, build, collate, examples, trainer
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)

import hf_attn_dynamics as had
from hf_attn_dynamics.training import Teacher, attention_distillation_loss, logit_distillation_loss


LEARNED = {"layers": {0: 0, 1: 2}, "heads": {0: 1, 2: 5}}
TASKS = [("roberta", "MaskedLM"), ("roberta", "SequenceClassification"), ("marian", "Translation")]


def teacher_of(kind, task):
    """A wider and deeper teacher of the same kind, with other random weights."""
    if kind == "marian":
        return vivid(build(task, "marian", seed=1, guidance=None, d_model=24, encoder_attention_heads=6), seed=1)
    torch.manual_seed(1)
    config = RobertaConfig(**{**sizes("roberta"), "hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 3})
    cls = {"MaskedLM": RobertaForMaskedLM, "SequenceClassification": RobertaForSequenceClassification}[task]
    return vivid(cls(config), seed=1)


def guidance_of(kind):
    if kind != "marian":
        return {"teacher": LEARNED, "heads": {"prev": [1]}}
    cross = {"layers": {0: 0}, "relations": ["query_key"], "relation_heads": 2}
    return {"encoder": {"teacher": {"layers": {1: 0}, "heads": {0: 5}}}, "cross": {"teacher": cross}}


def student_of(task, kind="roberta", **changes):
    return build(task, kind, **STILL, **{"guidance": guidance_of(kind), **changes})


def step(folder, task, kind, batch, accumulation, own_loss=None, **settings):
    """Gradient and log of one step of plain gradient descent."""
    model = student_of(task, kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sizes_ = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    run = trainer(folder, model, examples(task), teacher=teacher_of(kind, task), **DESCENT, **sizes_, **settings)
    run.compute_loss_func = own_loss
    run.train()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, run.state.log_history[0]


def hand_written_loss(task, kind, weight, temperature=2.0, alpha=2.0):
    """The loss of one step by the definitions, and its gradient."""
    student, teacher = student_of(task, kind).train(), teacher_of(kind, task).eval()
    batch = collate(examples(task).to_list())
    labels = batch["labels"]
    attention = Teacher(teacher, student)(student.without_labels(batch)).attention
    outputs = student(**batch, teacher_attention=attention, output_guidance_loss=True)
    with torch.no_grad():
        taught = teacher(**teacher_inputs(student, batch)).logits
    own, other = ((logits / temperature).log_softmax(-1) for logits in (outputs.logits, taught))
    divergence = (other.exp() * (other - own)).sum(-1)
    is_counted = labels != -100
    distilled = temperature**2 * divergence[is_counted].mean()
    loss = (1 - weight) * outputs.loss + weight * distilled + alpha * outputs.guidance_loss
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in student.named_parameters()}
    return grads, {"loss": loss, "distillation_loss": distilled, "task_loss": outputs.loss}


def teacher_inputs(student, batch):
    inputs = student.without_labels(batch)
    inputs.pop("use_cache", None)
    return inputs


@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("kind", "task"), TASKS)
def test_a_step_is_the_hand_written_one(tmp_path, kind, task, weight):
    found, log = step(tmp_path, task, kind, 2, 4, distillation_weight=weight)
    expected, losses = hand_written_loss(task, kind, weight)
    assert_same(found, expected)
    for name, value in losses.items():
        if name != "distillation_loss" or weight:
            assert log[name] == pytest.approx(float(value), rel=2e-4), name
    assert ("distillation_loss" in log) == bool(weight)


@pytest.mark.parametrize(("kind", "task"), TASKS)
def test_accumulated_micro_batches_give_the_gradient_and_the_log_of_one_batch(tmp_path, kind, task):
    settings = {"distillation_weight": 0.7, "distillation_temperature": 3.0}
    whole, whole_log = step(tmp_path / "1x8", task, kind, 8, 1, **settings)
    parts, parts_log = step(tmp_path / "4x2", task, kind, 2, 4, **settings)
    assert_same(parts, whole)
    for name in ("loss", "guidance_loss", "distillation_loss", "task_loss"):
        assert parts_log[name] == pytest.approx(whole_log[name], rel=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.4])
def test_a_task_loss_that_the_trainer_computes_is_mixed_in_the_same_way(tmp_path, weight):
    def summed(outputs, labels, num_items_in_batch):
        logits = outputs["logits"].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch

    found, log = step(tmp_path / "own", "MaskedLM", "roberta", 2, 4, own_loss=summed, distillation_weight=weight)
    expected, other_log = step(tmp_path / "model", "MaskedLM", "roberta", 2, 4, distillation_weight=weight)
    assert_same(found, expected)
    assert log["loss"] == pytest.approx(other_log["loss"], rel=1e-5)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "distillation_weight": 0.5, "save_strategy": "steps"}
    settings |= {"save_steps": 2, "guidance_schedule": {"prev": "constant", "teacher": "linear"}}

    def run(folder, resume=None):
        one = trainer(
            folder, student_of("MaskedLM"), examples("MaskedLM"), teacher=teacher_of("roberta", "MaskedLM"), **settings
        )
        one.train(resume_from_checkpoint=resume)
        return one

    whole = run(tmp_path / "whole")
    parts = run(tmp_path / "parts", str(tmp_path / "whole" / "checkpoint-2"))
    for one, other in zip(whole.model.parameters(), parts.model.parameters()):
        assert torch.equal(one, other)
    log = whole.state.log_history[2]
    assert log["guidance_weight_prev"] == 2.0
    assert log["guidance_weight_teacher"] == pytest.approx(2 / 3)
    assert {"guidance_loss_prev", "guidance_loss_teacher"} <= log.keys()


def test_the_teacher_stays_as_it_is(tmp_path):
    teacher = teacher_of("roberta", "MaskedLM").train()
    before = {name: p.detach().clone() for name, p in teacher.named_parameters()}
    run = trainer(tmp_path, student_of("MaskedLM"), examples("MaskedLM"), teacher=teacher, distillation_weight=0.5)
    run.train()
    run.save_model()
    assert teacher.training
    assert all(p.grad is None and torch.equal(before[name], p) for name, p in teacher.named_parameters())
    assert not any(name.startswith("teacher") for name in run.model.state_dict())
    # Evaluation needs no teacher.
    assert set(run.evaluate(examples("MaskedLM"))) >= {"eval_loss"}
    stored = json.loads((tmp_path / "config.json").read_text())["guidance"]["teacher"]
    assert stored["layers"] == {"0": 0, "1": 2}


def test_logits_alone_need_no_attention_that_can_be_read(tmp_path):
    """A student without guidance, and a teacher whose attention does not follow from queries and keys alone."""
    student = student_of("SequenceClassification", guidance=None)
    torch.manual_seed(1)
    teacher = had.HeadwiseMPNetForSequenceClassification(
        had.HeadwiseMPNetConfig(**{**sizes("roberta"), "num_hidden_layers": 1})
    )
    settings = {"guidance_weight": None, "distillation_weight": 1.0}
    run = trainer(tmp_path, student, examples("SequenceClassification"), teacher=teacher, **settings)
    run.train()
    batch = collate(examples("SequenceClassification").to_list())
    with torch.no_grad():
        taught = teacher.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits
        own = student_of("SequenceClassification", guidance=None)(**batch).logits
    assert run.state.log_history[0]["loss"] == pytest.approx(float(logit_distillation_loss(own, taught)), rel=1e-4)


def test_the_divergence_of_logits_is_zero_for_the_teacher_itself():
    logits = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0))
    assert float(logit_distillation_loss(logits, logits)) == 0.0
    other = logits.roll(1, -1)
    rows = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    p, q = ((one[rows].double() / 3).softmax(-1) for one in (other, logits))
    expected = 9 * (p * (p / q).log()).sum(-1).mean()
    assert float(logit_distillation_loss(logits, other, 3.0, rows)) == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(ValueError, match=r"the student has logits of shape \(4, 5, 7\), the teacher of \(4, 5, 6\)"):
        logit_distillation_loss(logits, logits[..., :6])
    with pytest.raises(ValueError, match="needs a teacher with logits, but its output has none"):
        logit_distillation_loss(logits, None)


# ---- Bad input: one message, before the first step ----


def refused(folder, match, student=None, teacher=None, **settings):
    with pytest.raises(ValueError, match=match):
        trainer(folder, student or student_of("MaskedLM"), examples("MaskedLM"), teacher=teacher, **settings)


def roberta_teacher(**changes):
    changes = {**sizes("roberta"), "num_hidden_layers": 3, "num_attention_heads": 8, **changes}
    return RobertaForMaskedLM(RobertaConfig(**changes))


def test_a_teacher_is_given_where_it_is_needed(tmp_path):
    plain = build("MaskedLM", **STILL)
    refused(tmp_path, r"guidance\['teacher'\] needs a teacher: pass HeadwiseTrainer\(…, teacher=model\)")
    refused(tmp_path, "distillation_weight=0.5 needs a teacher", plain, distillation_weight=0.5)
    refused(tmp_path, "teacher is given, but nothing is learned from it", plain, roberta_teacher())
    refused(tmp_path, "nothing is learned", teacher=roberta_teacher(), guidance_weight=0.0)
    refused(tmp_path, "teacher must be a PreTrainedModel, got str", teacher="my-teacher", use_cpu=True)


def test_a_teacher_that_does_not_fit_is_named(tmp_path):
    refused(
        tmp_path,
        "the teacher reads a vocabulary of 61 tokens, the student one of 60",
        teacher=roberta_teacher(vocab_size=61),
    )
    refused(
        tmp_path,
        "RobertaForMaskedLM has no encoder layer 2; its layers are 0 to 1",
        teacher=roberta_teacher(num_hidden_layers=2),
    )
    message = (
        "head 2 of the student's encoder layer 0 learns from head 5 of the teacher's encoder layer 0, but this "
        "layer of RobertaForMaskedLM has the heads 0, 1, 2, 3"
    )
    refused(tmp_path, message, teacher=roberta_teacher(num_attention_heads=4))
    relations = {"teacher": {"layers": {0: 0}, "relations": ["key"], "relation_heads": 3}}
    refused(
        tmp_path,
        "relation_heads=3 does not divide 16, the size of the key vectors of the student's encoder layer 0",
        student_of("MaskedLM", guidance=relations),
        roberta_teacher(),
    )
    decoder = had.HeadwiseGPT2LMHeadModel(had.HeadwiseGPT2Config(vocab_size=60, n_embd=16, n_layer=3, n_head=8))
    refused(tmp_path, "HeadwiseGPT2LMHeadModel has no encoder attention; its sites are decoder", teacher=decoder)
    biased = had.HeadwiseMPNetForMaskedLM(
        had.HeadwiseMPNetConfig(**{**sizes("roberta"), "num_hidden_layers": 3, "num_attention_heads": 8})
    )
    refused(tmp_path, "computes attention by itself", teacher=biased)


def test_sentences_that_the_teacher_cannot_read_are_named(tmp_path):
    run = trainer(
        tmp_path, student_of("MaskedLM"), examples("MaskedLM"), teacher=roberta_teacher(max_position_embeddings=12)
    )
    with pytest.raises(
        ValueError, match=r"has \d+ tokens, but the teacher RobertaForMaskedLM reads at most 10: truncate"
    ):
        run.train()


def test_tokenizers_are_compared(tmp_path):
    for name, words in (("own", ["a", "b", "c"]), ("teacher", ["a", "c", "b"])):
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
        (tmp_path / f"{name}.txt").write_text("\n".join(vocabulary))
        BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)}).save_pretrained(tmp_path / name)
    teacher = roberta_teacher()
    teacher.save_pretrained(tmp_path / "teacher")
    teacher = RobertaForMaskedLM.from_pretrained(tmp_path / "teacher")
    args = had.HeadwiseTrainingArguments(output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True)
    own = AutoTokenizer.from_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match="token 'b' is number 6 in the student's tokenizer, and 7 in the teacher's"):
        had.HeadwiseTrainer(student_of("MaskedLM"), args, processing_class=own, teacher=teacher)
    other = AutoTokenizer.from_pretrained(tmp_path / "teacher")
    had.HeadwiseTrainer(student_of("MaskedLM"), args, processing_class=other, teacher=teacher)


def test_a_model_with_new_tokens_learns_from_itself(tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)})
    student_of("MaskedLM", guidance={"teacher": {"layers": {0: 0}}}).save_pretrained(tmp_path / "own")
    tokenizer.save_pretrained(tmp_path / "own")
    student = had.HeadwiseRobertaForMaskedLM.from_pretrained(tmp_path / "own")
    tokenizer.add_tokens(["[NEW]"])
    args = had.HeadwiseTrainingArguments(output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True)
    made = had.HeadwiseTrainer(student, args, processing_class=tokenizer, teacher="self")
    assert student.name_or_path == str(tmp_path / "own")
    assert made.teacher is not student


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distillation_weight": 1.5}, "distillation_weight must be between 0 and 1, got 1.5"),
        ({"distillation_temperature": 0}, "distillation_temperature must be above 0 and finite, got 0"),
        ({"distillation_temperature": 3}, "distillation_temperature=3.0 needs a distillation_weight above 0"),
        ({"distillation_weight": "much"}, "distillation_weight must be a number, got 'much'"),
    ],
)
def test_invalid_arguments_are_named(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        had.HeadwiseTrainingArguments(output_dir=str(tmp_path), **settings)


def test_losses_without_classes_are_refused(tmp_path):
    student = build("QuestionAnswering", **STILL, guidance=None)
    refused(
        tmp_path,
        "distillation_weight needs a task loss over classes or tokens, which HeadwiseRobertaForQuestion",
        student,
        roberta_teacher(),
        distillation_weight=0.5,
        guidance_weight=None,
    )
    joint = build("JointPreTraining", "electra", guidance={"teacher": {"layers": {0: 0}}})
    teacher = BertModel(BertConfig(**sizes("bert")))
    refused(tmp_path, "HeadwiseElectraForJointPreTraining replaces tokens in its forward pass", joint, teacher)


def test_a_teacher_is_read_again_if_it_or_the_student_has_changed(tmp_path):
    teacher, student = teacher_of("roberta", "MaskedLM"), student_of("MaskedLM")
    run = trainer(tmp_path, student, examples("MaskedLM"), teacher=teacher)
    first = run._teacher
    run.train()
    assert run._teacher is first
    had.prune_heads(student, {0: [0]})
    run.train()
    assert run._teacher is not first
    had.prune_heads(teacher, {2: [5]})
    with pytest.raises(ValueError, match="head 2 .* learns from head 5 .* has the heads 0, 1, 2, 3, 4"):
        run.train()


# ---- Own loops ----


def test_the_function_is_the_loss_of_the_models_forward_pass():
    student, teacher = student_of("MaskedLM", guidance={"teacher": LEARNED}).train(), teacher_of("roberta", "MaskedLM")
    batch = collate(examples("MaskedLM").to_list())
    attention = Teacher(teacher, student)(batch).attention
    expected = student(**batch, teacher_attention=attention, output_guidance_loss=True)
    stock = RobertaForMaskedLM(RobertaConfig(**sizes("roberta"), **STILL)).train()
    stock.load_state_dict(student.state_dict())
    for own in (student, stock):
        loss, outputs = attention_distillation_loss(own, teacher, batch, **LEARNED, return_outputs=True)
        torch.testing.assert_close(loss, expected.guidance_loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(outputs.logits, expected.logits)
        found = torch.autograd.grad(loss, [*own.parameters()], allow_unused=True)
        others = torch.autograd.grad(
            expected.guidance_loss, [*student.parameters()], allow_unused=True, retain_graph=True
        )
        for one, other in zip(found, others):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_a_teacher_of_an_encoder_decoder_reads_the_decoders_input():
    student, teacher = student_of("Translation", "marian").eval(), teacher_of("marian", "Translation")
    batch = collate(examples("Translation").to_list())
    layers = {"encoder": {1: 0}}
    found = attention_distillation_loss(student, teacher, batch, layers, heads={0: 5})
    attention = Teacher(teacher, student)(student.without_labels(batch)).attention
    losses = student(**batch, teacher_attention=attention, output_guidance_loss=True).guidance_losses
    relations = {"relations": ["query_key"], "relation_heads": 2}
    other = attention_distillation_loss(student, teacher, batch, {"cross": {0: 0}}, **relations)
    torch.testing.assert_close(found + other, losses["teacher"], rtol=1e-6, atol=0)


def test_tiny_configurations_without_a_teacher_are_stored_as_before():
    assert "teacher" not in tiny_config("roberta").guidance
