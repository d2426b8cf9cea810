"""Small language models of every architecture that has one."""

import math

import pytest
import torch

from hf_attn_dynamics import headwise_architectures
from hf_attn_dynamics.data import train_byte_level_bpe
from hf_attn_dynamics.models.architectures import ARCHITECTURES
from hf_attn_dynamics.models.headwise_classes import twin_class
from hf_attn_dynamics.recipes.objectives import CausalLanguageModelling, MaskedLanguageModelling
from hf_attn_dynamics.recipes.small_models import architecture_row, language_model, sized_config, small_config


LEARNT = [
    (objective, name)
    for objective in (CausalLanguageModelling, MaskedLanguageModelling)
    for name, row in ARCHITECTURES.items()
    if language_model(row, objective.auto_class, objective.endings)
]
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(["the cat sat here"], 270)


def test_decoders_and_encoders_are_found():
    names = {objective: [name for one, name in LEARNT if one is objective] for objective, _ in LEARNT}
    assert {"llama", "gpt2", "gpt_neox", "opt", "mistral", "gemma3_text", "qwen3_moe", "phi", "bert"} <= {
        *names[CausalLanguageModelling]
    }
    assert {"albert", "bert", "distilbert", "electra", "modernbert", "xlm-roberta"} <= {
        *names[MaskedLanguageModelling]
    }
    assert not {"bart", "mbart", "t5", "whisper", "vit"} & {name for _, name in LEARNT}


@pytest.mark.parametrize(("objective", "name"), LEARNT)
def test_every_size_reaches_the_configuration_and_the_model_learns_as_many_tokens(objective, name, tokenizer):
    row = architecture_row(name)
    more = {"is_decoder": True} if objective is CausalLanguageModelling and not row.is_decoder else {}
    is_guided = headwise_architectures()[name].can_be_guided
    heads = {"guidance": {"fraction": 0.5}} if is_guided else {"gates": {}}
    config = small_config(row, tokenizer, length=24, dropout=0.25, attention_dropout=0.5, **heads, **SIZES, **more)
    for key, value in {**SIZES, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}.items():
        assert getattr(config, key) == value, key
    settings = config.to_dict()
    own = {key: settings[key] for key in settings if "drop" in key and key.startswith(("attention", "attn"))}
    assert own
    assert set(own.values()) == {0.5}
    model = twin_class(language_model(row, objective.auto_class, objective.endings))(config).eval()
    widths = {size for parameter in model.parameters() for size in parameter.shape}
    assert max(widths - {len(tokenizer)}) <= 8 * 32
    ids = torch.randint(5, len(tokenizer), (2, 24), generator=torch.Generator().manual_seed(0))
    outputs = model(input_ids=ids, labels=ids, output_guidance_loss=is_guided)
    assert outputs.loss.item() == pytest.approx(math.log(len(tokenizer)), abs=0.3)
    assert not is_guided or outputs.guidance_loss > 0


@pytest.mark.parametrize("name", ["deit", "vit"])
def test_every_size_reaches_a_classifier_of_images(name):
    row = architecture_row(name)
    shape = {"image_size": 8, "patch_size": 4, "num_channels": 3}
    config = sized_config(row, shape, dropout=0.25, attention_dropout=0.5, **SIZES)
    for key, value in {**SIZES, **shape, "intermediate_size": 128}.items():
        assert getattr(config, key) == value, key
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.25, 0.5)
    model = twin_class(row.stock_models()["AutoModelForImageClassification"])(config)
    assert model(torch.randn(2, 3, 8, 8)).logits.shape == (2, 2)


def test_groups_share_keys_and_values(tokenizer):
    config = small_config(architecture_row("llama"), tokenizer, length=24, num_key_value_heads=2, **SIZES)
    model = twin_class("LlamaForCausalLM")(config)
    assert model.model.layers[0].self_attn.k_proj.out_features == 2 * 8
    assert config.intermediate_size == 128
