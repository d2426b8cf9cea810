"""Tiny random stock models of every architecture whose heads can be removed, and inputs for them."""

import torch
import transformers


HEADS = {"num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 24, "max_position_embeddings": 64, **HEADS}
GROUPED = {
    **TEXT,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "pad_token_id": 1,
}
SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
SEQ2SEQ = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": None,
    **SPECIAL,
}
T5 = {
    "vocab_size": 60,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
EXPERTS |= {"shared_expert_intermediate_size": 8, "experts_implementation": "eager"}
SINKS = {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 2, "experts_implementation": "eager"}
SINKS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
IMAGE = {"hidden_size": 32, "intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_labels": 3, **HEADS}
DEBERTA = {**TEXT, "relative_attention": True, "position_buckets": 6, "pos_att_type": ["p2c", "c2p"]}
DEBERTA |= {"norm_rel_ebd": "layer_norm"}

# Name -> model class, configuration class, settings.
STOCK_MODELS = {
    "albert": (
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**TEXT, "embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ),
    "bert": ("BertForMaskedLM", "BertConfig", TEXT),
    "bert-decoder": ("BertLMHeadModel", "BertConfig", {**TEXT, "is_decoder": True, "add_cross_attention": True}),
    "camembert": ("CamembertForMaskedLM", "CamembertConfig", {**TEXT, **SPECIAL}),
    "clip-text": ("CLIPTextModel", "CLIPTextConfig", {**TEXT, **SPECIAL}),
    "clip-vision": ("CLIPVisionModel", "CLIPVisionConfig", IMAGE),
    "data2vec-text": ("Data2VecTextForMaskedLM", "Data2VecTextConfig", {**TEXT, **SPECIAL}),
    "deberta": (
        "DebertaForMaskedLM",
        "DebertaConfig",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 2},
    ),
    "deberta-v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA),
    "deberta-v3": ("DebertaV2ForMaskedLM", "DebertaV2Config", {**DEBERTA, "share_att_key": True}),
    "deit": ("DeiTForImageClassification", "DeiTConfig", IMAGE),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": 60,
            "dim": 32,
            "hidden_dim": 24,
            "n_layers": 3,
            "n_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    "electra": ("ElectraForPreTraining", "ElectraConfig", {**TEXT, "embedding_size": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "sliding_window": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "sliding_window": 8}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**TEXT, **SPECIAL}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**GROUPED, **SINKS}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4, **SPECIAL}),
    "gpt2-cross": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4, "add_cross_attention": True, **SPECIAL},
    ),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**GROUPED, "attention_multiplier": 0.3}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "attention_bias": True}),
    "m2m-100": ("M2M100ForConditionalGeneration", "M2M100Config", SEQ2SEQ),
    "marian": ("MarianMTModel", "MarianConfig", SEQ2SEQ),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", SEQ2SEQ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 8}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 2, "experts_implementation": "eager"},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**TEXT, **SPECIAL, "local_attention": 8, "cls_token_id": 0, "sep_token_id": 2},
    ),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", {**TEXT, "relative_attention_num_buckets": 32}),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", T5),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**TEXT, **SPECIAL, "ffn_dim": 24, "word_embed_proj_dim": 32},
    ),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ),
    "phi": ("PhiForCausalLM", "PhiConfig", {**GROUPED, "qk_layernorm": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**GROUPED, **EXPERTS}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**GROUPED, **EXPERTS}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**TEXT, **SPECIAL}),
    "siglip-vision": ("SiglipVisionModel", "SiglipVisionConfig", IMAGE),
    "smollm3": (
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {**GROUPED, **SPECIAL, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**GROUPED, **SPECIAL, "sliding_window": 8}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGE),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **SEQ2SEQ,
            "num_mel_bins": 4,
            "max_source_positions": 6,
            "max_target_positions": 40,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "xlm-roberta": ("XLMRobertaForMaskedLM", "XLMRobertaConfig", {**TEXT, **SPECIAL}),
}


def build_stock(name: str, **changes):
    """A model in eval mode whose every parameter is random, biases and norms included."""
    model_class, config_class, settings = STOCK_MODELS[name]
    config = getattr(transformers, config_class)(**{**settings, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # Sinusoidal positions are not saved.
        for parameter in filter(lambda one: one.requires_grad, model.parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.25 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    return model.eval()


def stock_inputs(model, length: int = 11) -> dict[str, torch.Tensor]:
    """Two sentences, the second shorter, or two images or recordings; targets where a decoder needs them."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size, generator=generator)}
    ids = torch.randint(4, 60, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    ids[1, -3:] = config.pad_token_id or 0
    if model.main_input_name == "input_features":
        features = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return {"input_features": features, "decoder_input_ids": ids[:, :5]}
    inputs = {"input_ids": ids, "attention_mask": mask}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(4, 60, (2, 6), generator=generator)
    if getattr(config, "add_cross_attention", False):
        inputs["encoder_hidden_states"] = torch.randn(2, 7, config.hidden_size, generator=generator)
    return inputs


# Grouped queries under a sliding window, whose rows see a part of a sentence only.
SMALL_MISTRAL = {**GROUPED, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
SMALL_MISTRAL |= {"num_hidden_layers": 2, "sliding_window": 4}

IMAGE_TOKEN = 59


def build_image_reader(name: str):
    """An image encoder and a language model in one, and four image tokens with text around."""
    text = STOCK_MODELS["gemma3"][2]
    if name == "gemma3":
        vision = {**IMAGE, "patch_size": 2, "vision_use_head": False}
        settings = {"mm_tokens_per_image": 4, "image_token_index": IMAGE_TOKEN}
        config = transformers.Gemma3Config(text_config=text, vision_config=vision, **settings)
    else:
        parts = {"vision_config": transformers.CLIPVisionConfig(**IMAGE)}
        parts["text_config"] = transformers.LlamaConfig(**text)
        config = transformers.LlavaConfig(**parts, image_token_index=IMAGE_TOKEN)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    ids = torch.tensor([[2, *[IMAGE_TOKEN] * 4, 7, 8, 9]])
    pixels = torch.randn(1, 3, 8, 8, generator=generator)
    return model, {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}
