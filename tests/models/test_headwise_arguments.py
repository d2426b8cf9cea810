import pytest
import torch
from tiny_models import KINDS, batch_for, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import TransformersKwargs

from hf_attn_dynamics.models import headwise_arguments
from hf_attn_dynamics.models.headwise_arguments import (
    FOREIGN_ARGUMENTS,
    KERNEL_ARGUMENTS,
    MODEL_ARGUMENTS,
    OWN_ARGUMENTS,
    kernel_arguments,
    reads,
)


# What Transformers passes down from a forward pass, by who reads it. Where a later version has more, this test fails:
# find out whether models or kernels read the new one, and whether those of flash attention do.
READERS = {
    "num_items_in_batch": OWN_ARGUMENTS,
    "output_hidden_states": MODEL_ARGUMENTS,
    "output_attentions": MODEL_ARGUMENTS,
    "output_router_logits": FOREIGN_ARGUMENTS,
    "cu_seq_lens_q": KERNEL_ARGUMENTS,
    "cu_seq_lens_k": KERNEL_ARGUMENTS,
    "max_length_q": KERNEL_ARGUMENTS,
    "max_length_k": KERNEL_ARGUMENTS,
    "position_ids": KERNEL_ARGUMENTS,
    "is_causal": KERNEL_ARGUMENTS,
    "seq_idx": KERNEL_ARGUMENTS,
}


def test_every_keyword_that_transformers_passes_down_has_a_known_reader():
    assert set(TransformersKwargs.__annotations__) == set(READERS)
    assert all(name in readers for name, readers in READERS.items())
    assert set(KERNEL_ARGUMENTS) == {name for name, readers in READERS.items() if readers is KERNEL_ARGUMENTS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_keyword_that_a_later_version_adds_is_not_ignored(kind, monkeypatch):
    added = kernel_arguments([*TransformersKwargs.__annotations__, "block_order"])
    assert set(added) == {*KERNEL_ARGUMENTS, "block_order"}
    model, data = tiny_model(kind), batch_for(kind)
    with pytest.raises(TypeError, match="has no argument 'block_order'; it would be ignored"):
        model(**data, block_order=torch.arange(2))
    monkeypatch.setattr(headwise_arguments, "KERNEL_ARGUMENTS", added)
    with pytest.raises(
        TypeError, match="takes 'block_order' only for kernels that read it, .*; 'sdpa' would ignore it"
    ):
        model(**data, block_order=torch.arange(2))


@pytest.fixture
def flash_by_another_name():
    AttentionInterface.register("packed_of_the_hub", flash_attention_forward)
    AttentionMaskInterface.register("packed_of_the_hub", sdpa_mask)
    return "packed_of_the_hub"


@pytest.mark.parametrize("name", KERNEL_ARGUMENTS)
def test_kernels_read_what_they_are_known_to_read(name, flash_by_another_name):
    assert not any(reads(kernel, name) for kernel in ("eager", "sdpa", "flex_attention"))
    assert reads("kernel_of_another_library", name)
    for kernel in ("flash_attention_2", "flash_attention_3", flash_by_another_name):
        assert reads(kernel, name) == (name != "seq_idx")


@pytest.mark.parametrize("kind", KINDS)
def test_what_flash_attention_would_ignore_is_refused(kind, flash_by_another_name):
    model = tiny_model(kind, attn_implementation=flash_by_another_name)
    message = f"takes 'seq_idx' only for kernels that read it, .*; '{flash_by_another_name}' would ignore it"
    with pytest.raises(TypeError, match=message):
        model(**batch_for(kind), seq_idx=torch.zeros(1, 5, dtype=torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_keywords_of_other_models_are_refused(kind):
    with pytest.raises(TypeError, match="has no argument 'output_router_logits'; it would be ignored"):
        tiny_model(kind)(**batch_for(kind), output_router_logits=True)
