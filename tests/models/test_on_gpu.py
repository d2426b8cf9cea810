"""What is computed on a GPU is what is computed on the CPU; skipped where there is none."""

import math

import pytest
import torch
from tiny_models import ALL_GATES, KINDS, UNEVEN, batch_for, no_dropout, tiny_model, vivid
from tiny_training import build, examples, trainer

from hf_attn_dynamics import prune_heads
from hf_attn_dynamics.models.guidance_loss import guide_heads
from hf_attn_dynamics.models.guidance_settings import GuidanceSettings
from hf_attn_dynamics.models.guidance_targets import GuidanceTargets, Tokens
from hf_attn_dynamics.training import Teacher


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
TASKS = {"roberta": "MaskedLM", "bert": "PreTraining", "electra": "ReplacedTokens", "marian": "Translation"}


def losses_and_gradients(model, batch):
    outputs = model(**batch, output_guidance_loss=True, output_gate_penalty=bool(model.head_gates()))
    weighted = sum(number * loss for number, loss in enumerate(outputs.guidance_losses.values(), 1))
    total = weighted + outputs[0].float().square().mean()
    if model.head_gates():
        total = total + outputs.gate_penalty
    total.backward()
    gradients = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return outputs[0].detach().double().cpu(), outputs.guidance_loss.item(), gradients


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_guidance_and_gradients_are_those_of_the_cpu(kind, pruned, attention):
    model = vivid(tiny_model(kind, gates=ALL_GATES[kind], **no_dropout(kind))).double()
    model.set_attn_implementation(attention)
    if pruned:
        prune_heads(model, UNEVEN[kind])
    batch = batch_for(kind)
    output, guidance, gradients = losses_and_gradients(model, batch)
    model.cuda()
    on_gpu = losses_and_gradients(model, {name: value.cuda() for name, value in batch.items()})
    assert torch.allclose(on_gpu[0], output, atol=1e-10)
    assert on_gpu[1] == pytest.approx(guidance, rel=1e-9)
    assert gradients.keys() == on_gpu[2].keys()
    for name, gradient in gradients.items():
        assert torch.allclose(on_gpu[2][name], gradient, atol=1e-9), name


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_keeps_the_guidance_loss(kind):
    model = vivid(tiny_model(kind, **no_dropout(kind))).cuda()
    batch = {name: value.cuda() for name, value in batch_for(kind).items()}
    exact = model(**batch, output_guidance_loss=True).guidance_loss
    with torch.autocast("cuda", torch.bfloat16):
        rounded = model(**batch, output_guidance_loss=True).guidance_loss
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_the_gradient_of_each_name(dtype):
    vectors = torch.randn(2, 64, 2, 200, 16, generator=torch.Generator().manual_seed(0)).to(dtype).cuda()
    tokens = Tokens(None, None, (64, 200), vectors.device)
    targets = GuidanceTargets(GuidanceSettings(), {0: {"next": [0], "first": [1]}}, tokens)
    grads = []
    for kind in (dtype, torch.float32):
        query, key = vectors.to(kind).unbind()
        query.requires_grad_()
        losses = guide_heads(query, key, 0.25, targets.layer(0, kind, query.device))[2]
        # The scale of the loss, and a weight that would underflow in half precision together with its unit.
        (losses * losses.new_tensor([1.0, 2.0**-6])).sum().mul(2.0**16).backward()
        grads.append(query.grad.double())
    for found, expected in zip(*(grad.unbind(1) for grad in grads)):
        assert (found - expected).norm() < 2e-2 * expected.norm()
        assert expected.norm() > 0


@pytest.mark.parametrize("on_cpu", [False, True])
def test_what_is_learned_from_a_teacher_is_that_of_the_cpu(on_cpu):
    """Also if the teacher stays on the CPU."""
    teacher = vivid(tiny_model("bert", guidance=None), seed=1).double()
    learned = {"layers": {0: 1, 1: 0}, "heads": "same", "relations": ["value"], "relation_heads": 2}
    student = vivid(tiny_model("bert", guidance={"teacher": learned}, **no_dropout("bert"))).double()
    batch, found = batch_for("bert"), []
    for device in ("cpu", "cuda"):
        student.to(device)
        teacher.to("cpu" if on_cpu else device)
        own = {name: value.to(device) for name, value in batch.items()}
        attention = Teacher(teacher, student)(own).attention
        loss = student(**own, teacher_attention=attention, output_guidance_loss=True).guidance_loss
        grads = torch.autograd.grad(loss, [*student.parameters()], allow_unused=True)
        found.append([loss.detach().cpu(), *(grad.cpu() for grad in grads if grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_the_trainer_takes_steps(tmp_path, kind, precision):
    guided = build(TASKS[kind], kind, gates=ALL_GATES[kind])
    data = examples(TASKS[kind])
    run = trainer(tmp_path, guided, data, max_steps=3, use_cpu=False, gate_penalty=0.01, **precision)
    assert run.args.device.type == "cuda"
    run.train()
    logged = [entry for entry in run.state.log_history if "task_loss" in entry]
    assert all(math.isfinite(entry[key]) for entry in logged for key in ("task_loss", "guidance_loss", "gate_penalty"))
    assert math.isfinite(run.evaluate(data)["eval_loss"])


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_checked_without_waiting_for_the_gpu(kind):
    model, batch = tiny_model(kind).cuda(), {name: value.cuda() for name, value in batch_for(kind).items()}
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model._check_inputs(**batch)
    finally:
        torch.cuda.set_sync_debug_mode(before)
