"""Gradients of all parameters of a model, which checkpointing and compilation must not change."""

import torch


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, rtol=1e-4, atol=1e-7):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_checkpointing_keeps_gradients(model, batch, reentrant, weight=2.5):
    """For a model in training mode, with the guidance loss."""

    def loss():
        return model(**batch, guidance_weight=weight, use_cache=False).loss

    expected = gradients(model, loss())
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients(model, loss())
    assert_same({name: found[name] for name in expected}, expected, rtol=1e-7, atol=1e-11)


def assert_compilation_keeps_loss_and_gradients(model, batch, weight=1.0):
    """For a model in single precision, with the guidance loss."""
    outputs = model(**batch, guidance_weight=weight)
    expected = gradients(model, outputs.loss)
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch, guidance_weight=weight)
    torch.testing.assert_close(found.guidance_loss, outputs.guidance_loss)
    assert_same(gradients(model, found.loss), expected, rtol=1e-3, atol=1e-5)
