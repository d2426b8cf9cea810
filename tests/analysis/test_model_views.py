"""What contexts do to a model: nothing that a copy, a pickle, another thread or a compiled model would meet."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import BertConfig, BertModel, GenerationMixin, GPT2Config, GPT2LMHeadModel

from hf_attn_dynamics import (
    HeadConfidence,
    attention_maps,
    head_importance,
    head_outputs,
    head_relevance,
    local_contribution,
    masked_heads,
    mean_head_outputs,
    observe,
    prune_heads,
)
from tests.reference.stock_models import build_stock
from tests.reference.tiny_models import batch_for, tiny_model, vivid


ALL_HEADS = {0: range(4)}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=32)).eval()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[5, 7, 8, 9, 6], [9, 6, 4, 2, 1]])
    return {"input_ids": ids, "labels": ids}


def kept_to_the_side(model, inside, repeats: int = 20):
    """Outputs of the plain model in one thread, while another one runs `inside` again and again."""
    inputs, outputs, done = {"input_ids": batch()["input_ids"]}, [], threading.Event()

    def plain():
        with torch.no_grad():
            while not done.is_set() or not outputs:
                outputs.append(model(**inputs).logits)

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(plain)
        try:
            for _ in range(repeats):
                inside(model)
        finally:
            done.set()
        other.result()
    return outputs


def observed(model):
    with torch.no_grad(), observe(model, HeadConfidence(excluded_ids=[])) as seen:
        model(**batch())
    return seen.confidence["decoder"]


def masked(model):
    with torch.no_grad(), masked_heads(model, ALL_HEADS):
        return model(**batch()).logits


# What the package does to a model while it looks at it, as a function of the model.
ANALYSES = {
    "observe": observed,
    "masked_heads": masked,
    "head_outputs": lambda model: head_outputs(model, batch())["decoder"],
    "mean_head_outputs": lambda model: mean_head_outputs(model, batch())["decoder"],
    "attention_maps": lambda model: attention_maps(model, batch())["decoder"],
    "head_importance": lambda model: head_importance(model, batch())["decoder"],
    "head_relevance": lambda model: head_relevance(model, batch())["decoder"],
    "local_contribution": lambda model: local_contribution(model, batch()),
}


@pytest.mark.parametrize("name", ANALYSES)
def test_another_thread_is_as_if_there_were_no_analysis(name):
    # In training mode, which analyses leave: without dropout it shows in modules only.
    model = gpt2()
    expected = model(input_ids=batch()["input_ids"]).logits
    found: list[torch.Tensor] = []
    alone = ANALYSES[name](model)
    for output in kept_to_the_side(model, lambda model: found.append(ANALYSES[name](model))):
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
    for result in found:
        torch.testing.assert_close(result, alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ANALYSES)
def test_two_threads_with_an_analysis_each_find_what_one_finds(name):
    model = gpt2()
    alone = ANALYSES[name](model)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(ANALYSES[name], [model] * 16):
            torch.testing.assert_close(found, alone, rtol=0, atol=0, equal_nan=True)


def test_dropout_of_another_thread_goes_on_while_a_model_is_observed():
    model = gpt2().train()
    entered, left = threading.Event(), threading.Event()

    def train():
        entered.wait(60)
        torch.manual_seed(3)
        logits = model(**batch()).logits
        left.set()
        return logits

    torch.manual_seed(3)
    expected = model(**batch()).logits
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        with observe(model, HeadConfidence(excluded_ids=[])):
            entered.set()
            left.wait(60)
        torch.testing.assert_close(training.result(), expected, rtol=0, atol=0)


CONTEXTS = {
    "masked_heads": lambda model: masked_heads(model, ALL_HEADS),
    "observe": lambda model: observe(model, HeadConfidence(excluded_ids=[])),
}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_copy_made_within_a_context_is_an_ordinary_model(context, duplicate):
    model = gpt2().train()
    plain = duplicate(model)
    with CONTEXTS[context](model):
        twin = duplicate(model)
        twin.eval()
        within = twin(**batch()).logits
    torch.testing.assert_close(within, plain.eval()(**batch()).logits, rtol=0, atol=0)
    torch.testing.assert_close(twin(**batch()).logits, within, rtol=0, atol=0)
    assert twin.config._attn_implementation == plain.config._attn_implementation
    for one, other in zip(twin.modules(), plain.modules()):
        assert vars(one).keys() == vars(other).keys()
        assert len(one._forward_pre_hooks) == len(one._forward_hooks) == 0


def test_a_copy_of_a_headwise_model_is_an_ordinary_one():
    model = tiny_model("roberta", gates={})
    inputs = batch_for("roberta")
    expected = model(**inputs).logits
    with masked_heads(model, {0: [0]}), observe(model, HeadConfidence(excluded_ids=[])):
        twin = copy.deepcopy(model)
        assert not torch.equal(model(**inputs).logits, expected)
    torch.testing.assert_close(twin(**inputs).logits, expected, rtol=0, atol=0)


def test_entries_of_models_are_redirected_only_while_a_context_is_open():
    stock = nn.Module.__call__, GenerationMixin.generate
    model = gpt2()
    with masked_heads(model, ALL_HEADS):
        with observe(model, HeadConfidence(excluded_ids=[])):
            pass
        assert nn.Module.__call__ is not stock[0]
    assert (nn.Module.__call__, GenerationMixin.generate) == stock
    with pytest.raises(RuntimeError, match="within"), masked_heads(model, ALL_HEADS):
        raise RuntimeError("within")
    assert (nn.Module.__call__, GenerationMixin.generate) == stock


def test_a_context_that_another_thread_leaves_is_left():
    model = gpt2()
    expected = model(**batch()).logits
    context = masked_heads(model, ALL_HEADS)
    context.__enter__()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(context.__exit__, None, None, None).result()
    torch.testing.assert_close(model(**batch()).logits, expected, rtol=0, atol=0)


def test_parts_that_are_called_by_themselves_are_within_the_context():
    model = gpt2()
    hidden = model.transformer(input_ids=batch()["input_ids"]).last_hidden_state
    with masked_heads(model, ALL_HEADS):
        within = model.transformer(input_ids=batch()["input_ids"]).last_hidden_state
    alone = copy.deepcopy(model).transformer
    with masked_heads(alone, ALL_HEADS):
        expected = alone(input_ids=batch()["input_ids"]).last_hidden_state
    torch.testing.assert_close(within, expected, rtol=0, atol=0)
    assert not torch.equal(within, hidden)


def test_a_context_on_a_part_holds_within_the_whole():
    model = gpt2()
    with masked_heads(model, ALL_HEADS):
        expected = model(**batch()).logits
    with masked_heads(model.transformer, ALL_HEADS):
        torch.testing.assert_close(model(**batch()).logits, expected, rtol=0, atol=0)


def test_hooks_of_users_go_on_with_the_modules_that_they_know():
    model, calls = gpt2(), []
    names = {module: name for name, module in model.named_modules()}

    class Counter:
        def __call__(self, module, inputs, output):
            calls.append(names[module])

    model.transformer.h[1].register_forward_hook(Counter())
    model.transformer.h[0].register_forward_pre_hook(lambda module, args: calls.append(names[module]))
    with masked_heads(model, ALL_HEADS):
        model.transformer.h[1].attn.register_forward_hook(
            lambda module, args, kwargs, output: calls.append(names[module]), with_kwargs=True
        )
        model(**batch())
    assert calls == ["transformer.h.0", "transformer.h.1.attn", "transformer.h.1"]


def test_what_changes_within_a_context_holds_from_then_on():
    model = gpt2()
    with masked_heads(model, ALL_HEADS):
        before = model(**batch()).logits
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        prune_heads(model, {1: [0]})
        model.double()
        within = model(**batch()).logits
    changed = prune_heads(gpt2(), {1: [0]})
    changed.load_state_dict(model.state_dict())
    with masked_heads(changed.double(), ALL_HEADS):
        torch.testing.assert_close(within, changed(**batch()).logits, rtol=0, atol=0)
    assert before.dtype == torch.float32
    assert within.dtype == torch.float64


def test_gradients_reach_the_weights_of_the_model():
    model = gpt2()
    with masked_heads(model, ALL_HEADS):
        model(**batch()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    # Nothing reaches values of masked heads.
    assert model.transformer.h[0].attn.c_attn.weight.grad[:, 32:].abs().max() == 0
    assert model.transformer.h[1].attn.c_attn.weight.grad[:, 32:].abs().max() > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_backward_recomputes_are_masked_there_too(reentrant):
    def gradients(checkpointing):
        model = gpt2().train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        with masked_heads(model, ALL_HEADS):
            loss = model(**batch(), use_cache=False).loss
        # After the context, and in another thread, as PyTorch does on a GPU.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
        return [parameter.grad for parameter in model.parameters()]

    for found, expected in zip(gradients(True), gradients(False)):
        torch.testing.assert_close(found, expected)


def test_forward_functions_that_accelerate_replaced_are_within_the_context():
    model = gpt2()
    with masked_heads(model, ALL_HEADS), torch.no_grad():
        expected = model(**batch()).logits
    confidence = observed(model)
    for module in list(model.modules()):
        if next(module.parameters(recurse=False), None) is not None or module is model:
            add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    add_hook_to_module(model.transformer.h[0].attn, AlignDevicesHook(execution_device="cpu"))
    with masked_heads(model, ALL_HEADS), torch.no_grad():
        torch.testing.assert_close(model(**batch()).logits, expected, rtol=0, atol=0)
    torch.testing.assert_close(observed(model), confidence, rtol=0, atol=0)


def test_lists_and_methods_of_modules_are_within_the_context():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.steps = [inner.transformer]  # no submodules of this one
            self.by_name = {"read": inner.transformer.forward}
            self.read = partial(inner.transformer.forward, use_cache=False)

        def forward(self, ids):
            found = [self.steps[0](ids), self.by_name["read"](ids), self.read(ids)]
            return [output.last_hidden_state for output in found]

    outer = Outer(gpt2())
    ids = batch()["input_ids"]
    with masked_heads(outer.inner.transformer, ALL_HEADS):
        expected = outer.inner.transformer(ids).last_hidden_state
        for found in outer(ids):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_compiled_models_are_within_the_context():
    model = gpt2()
    confidence, expected = observed(model), masked(model)
    plain = model(**batch()).logits
    calls: list[torch.fx.GraphModule] = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    wrapper = torch.compile(model, backend=backend)
    model.compile(backend=backend)
    for compiled in (wrapper, model):
        with torch.no_grad():
            torch.testing.assert_close(compiled(**batch()).logits, plain)
            assert calls
            with masked_heads(model, ALL_HEADS):
                torch.testing.assert_close(compiled(**batch()).logits, expected, rtol=0, atol=0)
            with observe(model, HeadConfidence(excluded_ids=[])) as seen:
                compiled(**batch())
            torch.testing.assert_close(seen.confidence["decoder"], confidence, rtol=0, atol=0)
            torch.testing.assert_close(compiled(**batch()).logits, plain)


def test_another_thread_compiles_while_a_context_is_open():
    model, ids = gpt2(), batch()["input_ids"]
    expected = model(ids).logits

    def compiled():
        with torch.no_grad():
            return torch.compile(model, backend="eager", fullgraph=True)(ids).logits

    observed = observe(model, HeadConfidence(excluded_ids=[]))
    with ThreadPoolExecutor(1) as pool, masked_heads(model, ALL_HEADS), observed:
        within = pool.submit(compiled).result()
    torch.testing.assert_close(within, expected)


def test_a_kernel_that_another_one_stands_in_for_stays_that_of_other_threads():
    model = build_stock("llama")
    model.set_attn_implementation("flex_attention")
    with observe(model, HeadConfidence(excluded_ids=[])):
        assert model.config._attn_implementation == "flex_attention"
        assert copy.deepcopy(model).config._attn_implementation == "flex_attention"


def test_generation_of_another_thread_is_that_of_the_model():
    model = gpt2()
    for parameter in model.parameters():
        parameter.data.normal_()  # so that what is generated depends on heads
    ids = batch()["input_ids"]
    generate = partial(model.generate, ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected, (entered, left) = generate(), (threading.Event(), threading.Event())

    def other():
        entered.wait(60)
        try:
            return generate()
        finally:
            left.set()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(other)
        with masked_heads(model, ALL_HEADS):
            within = generate()
            entered.set()
            left.wait(60)
        torch.testing.assert_close(found.result(), expected, rtol=0, atol=0)
    assert not torch.equal(within, expected)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_layers_that_were_added_as_copies_are_observed(kernel):
    # Copies of layers have a configuration of their own, which knows nothing of the model's.
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24
    )
    model = vivid(BertModel(config))
    model.set_attn_implementation(kernel)
    model.encoder.layer.extend([copy.deepcopy(layer) for layer in model.encoder.layer])
    model.config.num_hidden_layers = 4
    assert model.encoder.layer[2].attention.self.config is not model.config
    batch = {"input_ids": torch.randint(5, 50, (2, 7), generator=torch.Generator().manual_seed(0))}
    found = attention_maps(model, batch)["encoder"]
    model.set_attn_implementation("eager")
    for layer in model.encoder.layer[2:]:
        layer.attention.self.config._attn_implementation = "eager"
    expected = model.eval()(**batch, output_attentions=True).attentions
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-6)
