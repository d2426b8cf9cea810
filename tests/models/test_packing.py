"""Guidance of packed batches: value and gradient are those of the padded batch with the same sentences."""

import inspect

import pytest
import torch
import transformers
from stock_models import STOCK_MODELS, build_stock
from tiny_models import PAD, padded_batch, ragged_sentences, tiny_model, vivid

import hf_attn_dynamics as had
from hf_attn_dynamics.models.architectures import ARCHITECTURES
from hf_attn_dynamics.models.packing import Packing, count_sentences, masks_by_position
from hf_attn_dynamics.training import Teacher


DECODERS = [
    name
    for name, (_, config_class, _) in STOCK_MODELS.items()
    if (row := ARCHITECTURES.get(getattr(transformers, config_class).model_type)) is not None
    and row.is_decoder
    and not build_stock(name).config.is_encoder_decoder
]
GUIDED = [name for name in DECODERS if name != "gpt2-cross" and masks_by_position(type(build_stock(name)))]
SENTENCES = ragged_sentences()
# Patterns of every shape: one key for each row, one row for all, and uniform rows.
GUIDANCE = {"heads": {"prev": [0], "first": [1]}, "edge_rows": "uniform"}


def packed(sentences, rows=1):
    """A batch of so many rows, which have the same number of tokens."""
    ids = torch.tensor([token for sentence in sentences for token in sentence])
    positions = torch.cat([torch.arange(len(sentence)) for sentence in sentences])
    return {"input_ids": ids.view(rows, -1), "position_ids": positions.view(rows, -1), "use_cache": False}


def headwise(name, **heads):
    cls = getattr(had, f"Headwise{type(build_stock(name)).__name__}")
    torch.manual_seed(0)
    return vivid(cls(cls.config_class(**{**STOCK_MODELS[name][2], **heads}))).double().eval()


def gradients(model):
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def loss_and_gradients(model, batch, **arguments):
    model.zero_grad()
    loss = model(**batch, **arguments, output_guidance_loss=True).guidance_loss
    loss.backward()
    return [loss.detach(), *gradients(model)]


def assert_same(found, expected, rtol=1e-7, atol=1e-12):
    """Compares losses and gradients; `atol` is a fraction of the largest value."""
    assert len(found) == len(expected)
    assert any(value.any() for value in expected[1:])
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol * max(other.abs().max().item(), 1.0))


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "gpt2-cross"])
def test_decoders_are_known_to_keep_packed_sentences_apart(name):
    model = build_stock(name).double().eval()
    batch = packed([[5, 6, 7, 8], [9, 10, 11]])
    with torch.no_grad():
        together = model(**batch).logits[0, 4:]
        alone = model(torch.tensor([[9, 10, 11]])).logits[0]
    # Some layers of some models compute in single precision.
    error = (together - alone).abs().max() / alone.abs().max()
    assert error < 1e-4 or error > 1e-2
    assert masks_by_position(type(model)) == (error < 1e-4)


@pytest.mark.parametrize("reduction", ["paper", "code", "row_mean"])
@pytest.mark.parametrize("name", GUIDED)
def test_a_packed_batch_has_the_mean_guidance_of_its_sentences(name, reduction):
    model = headwise(name, guidance={**GUIDANCE, "reduction": reduction})
    alone = [loss_and_gradients(model, {"input_ids": torch.tensor([sentence])}) for sentence in SENTENCES]
    expected = [sum(values) / len(SENTENCES) for values in zip(*alone)]
    # Positions and some norms are computed in single precision.
    assert_same(loss_and_gradients(model, packed(SENTENCES)), expected, rtol=1e-4, atol=1e-5)


def test_sentences_may_share_several_rows():
    model = headwise("llama", guidance=GUIDANCE)
    sentences = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15], [16]]
    assert_same(
        loss_and_gradients(model, packed(sentences, rows=2)),
        loss_and_gradients(model, padded_batch(sentences, pad=1)),
    )


def test_rows_of_one_sentence_each_are_not_packed():
    model = headwise("llama", guidance=GUIDANCE)
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    for positions in (torch.arange(3)[None], torch.arange(2, 5).expand(2, 3)):
        assert Packing.of_positions(positions, (2, 3)) is None
    found = model(ids, position_ids=torch.arange(3)[None], output_guidance_loss=True).guidance_loss
    assert found == model(ids, output_guidance_loss=True).guidance_loss


def test_sentences_are_counted_also_where_they_share_rows():
    model = build_stock("llama")
    assert count_sentences(model, packed(SENTENCES)) == len(SENTENCES)
    assert count_sentences(model, padded_batch(SENTENCES, pad=1)) == len(SENTENCES)
    assert count_sentences(build_stock("opt"), packed(SENTENCES)) == 1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_sentences_of_a_model_with_adapters_are_counted():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(headwise("llama", guidance=GUIDANCE), peft.LoraConfig(target_modules=["q_proj"]))
    assert count_sentences(model, packed(SENTENCES)) == len(SENTENCES)


class ByPosition(transformers.PreTrainedModel):
    """A class of a user, which makes its mask as stock decoders do."""

    def forward(self, input_ids, position_ids=None):
        return transformers.masking_utils.create_causal_mask(
            self.config, input_ids, None, None, position_ids=position_ids
        )


class OfLlama(transformers.LlamaForCausalLM):
    """A class of a user whose parent makes the mask."""


def test_classes_of_users_are_read_too():
    assert masks_by_position(ByPosition) is True
    assert masks_by_position(OfLlama) is True
    of_opt = type("OfOpt", (transformers.OPTForCausalLM,), {"__module__": "nowhere"})
    assert masks_by_position(of_opt) is False
    unreadable = type("Unreadable", (transformers.PreTrainedModel,), {"__module__": "nowhere"})
    assert masks_by_position(unreadable) is None


def test_positions_of_an_unreadable_class_that_begin_anew_are_refused():
    model = headwise("llama", guidance=None)
    values = {"__module__": "nowhere", "_supports_sdpa": True}
    unreadable = type("Unreadable", (transformers.PreTrainedModel,), values)(model.config)
    assert count_sentences(unreadable, {**packed(SENTENCES[:1])}) == 1
    with pytest.raises(
        ValueError, match="the code of Unreadable, which may keep such sentences apart, cannot be read"
    ):
        count_sentences(unreadable, packed(SENTENCES))


def test_flash_attention_has_rules_of_its_own(monkeypatch):
    model = build_stock("llama")
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    batch = packed(SENTENCES)
    ones = {"attention_mask": torch.ones_like(batch["input_ids"])}
    for given in (batch, {**batch, **ones}, {**batch, "use_cache": True}):
        assert count_sentences(model, given) == len(SENTENCES)
    # A gap is no beginning for the kernel, and padding is left to the mask.
    gap = {"input_ids": torch.ones(1, 5, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2, 5, 6]])}
    assert count_sentences(model, gap) == 1
    padding = ones["attention_mask"].clone()
    padding[0, -1] = 0
    assert count_sentences(model, {**batch, "attention_mask": padding}) == 1
    with pytest.raises(ValueError, match="of flash attention, but it reads them in batches of one row only: pass cu_"):
        count_sentences(model, packed([[5, 6], [7, 8], [9, 10, 11, 12]], rows=2))
    opt = build_stock("opt")
    monkeypatch.setattr(opt.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match="of flash attention, but not all models pass them on to it"):
        count_sentences(opt, batch)


def test_a_cache_that_would_join_the_sentences_is_refused():
    model = headwise("llama", guidance=GUIDANCE)
    batch = packed(SENTENCES)
    del batch["use_cache"]
    with pytest.raises(ValueError, match="position_ids begin anew within a row, .*: pass use_cache=False"):
        model(**batch, output_guidance_loss=True)
    # Transformers fills none while activations are checkpointed.
    expected = model(**packed(SENTENCES), output_guidance_loss=True).guidance_loss
    model.train().activation_checkpointing_enable()
    torch.testing.assert_close(model(**batch, output_guidance_loss=True).guidance_loss, expected)
    model.eval().activation_checkpointing_disable()
    model.config.use_cache = False
    assert model(**batch, output_guidance_loss=True).guidance_loss.isfinite()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_have_the_same_gradients(reentrant):
    model = headwise("llama", guidance=GUIDANCE).train()
    expected = loss_and_gradients(model, packed(SENTENCES))
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(loss_and_gradients(model, packed(SENTENCES)), expected)


def test_a_compiled_model_has_the_same_guidance():
    model = headwise("llama", guidance=GUIDANCE)
    expected = loss_and_gradients(model, packed(SENTENCES))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    loss = compiled(**packed(SENTENCES), output_guidance_loss=True).guidance_loss
    loss.backward()
    assert_same([loss.detach(), *gradients(model)], expected)


FORMS = {"one": "keys", "all": "weights", "some": "sparse"}


def columns(sentences, length, generator):
    """Columns of targets, whose keys are counted within each sentence, padded to a length."""
    shape = len(sentences), length
    one, weights = torch.full(shape, -100), torch.zeros(shape)
    some, of_some = torch.full((*shape, 2), -100), torch.zeros(*shape, 2)
    for i, sentence in enumerate(sentences):
        size = len(sentence)
        one[i, :size] = torch.randint(size, (size,), generator=generator)
        one[i, :size:3] = -100
        weights[i, :size] = torch.rand(size, generator=generator) + 0.1
        some[i, :size] = torch.randint(size, (size, 2), generator=generator)
        of_some[i, :size] = torch.rand(size, 2, generator=generator) + 0.1
    return {
        "guidance_one": one,
        "guidance_all": weights,
        "guidance_some": some,
        "guidance_some_weights": of_some,
    }


@pytest.mark.parametrize("loss", ["squared", "cross_entropy", "mass", "avoid"])
def test_targets_of_the_batch_are_split_with_it(loss):
    guidance = {"heads": {"one": [0], "all": [1], "some": [2]}, "targets": FORMS, "loss": dict.fromkeys(FORMS, loss)}
    model = headwise("qwen2", guidance=guidance)
    batch = padded_batch(SENTENCES, pad=1)
    mask = batch["attention_mask"].bool()
    padded = columns(SENTENCES, mask.shape[1], torch.Generator().manual_seed(0))
    flat = {name: column[mask][None] for name, column in padded.items()}
    assert_same(loss_and_gradients(model, packed(SENTENCES), **flat), loss_and_gradients(model, batch, **padded))
    with torch.no_grad():
        found = model(**packed(SENTENCES), **flat, output_guided_hits=True).guided_hits
        expected = model(**batch, **padded, output_guided_hits=True).guided_hits
    assert {name: hits.tolist() for name, hits in found.items()} == {
        name: hits.tolist() for name, hits in expected.items()
    }
    short = {name: column[:, :-1] for name, column in flat.items()}
    total = sum(map(len, SENTENCES))
    with pytest.raises(ValueError, match=rf"guidance_\w+ must have shape \(1, {total}\).*, got \(1, {total - 1}"):
        model(**packed(SENTENCES), **short, output_guidance_loss=True)
    with pytest.raises(ValueError, match=rf"guidance_\w+ must have shape \(1, {total}\)"):
        model(**packed(SENTENCES), **padded, output_guidance_loss=True)


def boundaries_of(sentences):
    lengths = torch.tensor([len(sentence) for sentence in sentences])
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()


@pytest.fixture
def kernel_of_boundaries():
    """A kernel that keeps sentences apart by `cu_seq_lens_q`, as flash attention does."""

    def kernel(module, query, key, value, attention_mask, **kwargs):
        boundaries = kwargs.get("cu_seq_lens_q")
        if boundaries is not None:
            owner = torch.bucketize(torch.arange(query.shape[2]), boundaries[1:].long(), right=True)
            attention_mask = (owner[:, None] == owner)[None, None]
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )

    transformers.AttentionInterface.register("kernel_of_boundaries", kernel)
    transformers.AttentionMaskInterface.register("kernel_of_boundaries", transformers.masking_utils.sdpa_mask)
    return "kernel_of_boundaries"


@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_kernels_of_packed_encoders_have_the_guidance_of_the_padded_batch(kind, kernel_of_boundaries):
    model = tiny_model(kind, attn_implementation=kernel_of_boundaries).double().eval()
    boundaries, batch = boundaries_of(SENTENCES), packed(SENTENCES)
    del batch["use_cache"]
    ends = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries.clone(), "max_length_q": 9, "max_length_k": 9}
    assert_same(
        loss_and_gradients(model, {**batch, **ends}),
        loss_and_gradients(model, padded_batch(SENTENCES, pad=PAD[kind])),
    )
    with pytest.raises(ValueError, match=r"cu_seq_lens_k \[1, .*\] differ from cu_seq_lens_q"):
        model(**batch, **{**ends, "cu_seq_lens_k": boundaries + 1}, output_guidance_loss=True)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must rise from 0 to \d+, the number of tokens"):
        model(**batch, cu_seq_lens_q=boundaries[:-1], output_guidance_loss=True)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="cu_seq_lens_q are given with an attention_mask that has padding"):
        model(**batch, **ends, attention_mask=mask, output_guidance_loss=True)


def test_boundaries_may_enclose_nothing():
    packing = Packing.of_boundaries(torch.tensor([0, 2, 2, 5], dtype=torch.int32), (1, 5))
    assert packing.split(torch.tensor([[1, 2, 3, 4, 5]]), fill=0).tolist() == [[1, 2, 0], [3, 4, 5]]
    for wrong in ([0, 2, 4], [1, 5], [0, 3, 2, 5]):
        with pytest.raises(ValueError, match="must rise from 0 to 5"):
            Packing.of_boundaries(torch.tensor(wrong), (1, 5))


def test_heads_are_split_and_joined_without_loss():
    packing = Packing.of_positions(torch.tensor([[0, 1, 0, 1, 2], [3, 4, 5, 0, 1]]), (2, 5))
    vectors = torch.randn(2, 3, 5, 4)
    split = packing.split_heads(vectors)
    assert split.shape == (4, 3, 3, 4)
    assert torch.equal(split[1, :, 2], vectors[0, :, 4])
    assert torch.equal(split[3, :, 1], vectors[1, :, 4])
    assert torch.equal(packing.join_heads(split), vectors)


def test_a_teacher_reads_padded_sentences(kernel_of_boundaries):
    teacher = tiny_model("bert", guidance=None)
    guidance = {"teacher": {"layers": {0: 1}}}
    model = tiny_model("bert", guidance=guidance, attn_implementation=kernel_of_boundaries)
    batch = packed(SENTENCES[:3])
    del batch["use_cache"]
    lesson = Teacher(teacher, model)({"input_ids": batch["input_ids"]}).attention
    with pytest.raises(
        ValueError, match="guidance loss from a teacher does not support packed sentences: pass padded"
    ):
        model(
            **batch,
            cu_seq_lens_q=boundaries_of(SENTENCES[:3]),
            teacher_attention=lesson,
            output_guidance_loss=True,
        )


ENCODERS = [
    name
    for name in sorted(STOCK_MODELS.keys() - {*DECODERS})
    if not (model := build_stock(name)).config.is_encoder_decoder and model.main_input_name == "input_ids"
]


@pytest.mark.parametrize("name", ENCODERS)
def test_positions_of_encoders_are_only_positions(name):
    """Their masks do not depend on them, so that sentences in a row attend to each other."""
    model = vivid(build_stock(name)).double().eval()
    assert masks_by_position(type(model)) is False
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11]]), "position_ids": torch.arange(7)[None] % 4}
        changed = {**batch, "input_ids": torch.tensor([[5, 6, 7, 13, 9, 10, 11]])}
        with torch.no_grad():
            found, other = (model(**one)[0][0, 4:] for one in (batch, changed))
        assert (found - other).abs().max() > 1e-6
