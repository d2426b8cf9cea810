# Licensed under the Apache License, Version 2.0.
"""Transformers' model tests on the classes of the catalogue, one line an architecture: plain, and guided and gated.

Plain ones are the body and one head; guided and gated, all heads that the catalogue has. Tests in `OF_THE_BODY` run
on guided and gated bodies only: the kernel and the dtype are chosen before gates apply. BERT, RoBERTa, ELECTRA and
Marian have files of their own. CamemBERT, XLM-RoBERTa, Data2Vec, mBART, Pegasus, mT5, DeiT, Gemma, Qwen2, the
mixtures of Qwen, the first DeBERTa, the text model of CLIP, Granite, SmolLM3 and StarCoder2 are left out: their
attention, experts and heads are those of an architecture in the table.
"""

import unittest

import transformers
from stock_models import STOCK_MODELS

from hf_attn_dynamics import headwise_architectures

from .suite import DIFFERENCES, OF_THE_BODY, EncoderTester, GenerationTests, PeerTests, common, headwise_classes_of


# Name in `STOCK_MODELS` -> settings in which the models of this file differ from those there.
TABLE: dict[str, dict] = {
    "albert": {"num_hidden_groups": 1, "inner_group_num": 1},  # one layer, passed twice
    "bart": {},
    "clip-vision": {},
    "distilbert": {},
    "deberta-v2": {},
    "gemma2": {"sliding_window": 4},
    "gemma3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt-neox": {},
    "gpt-oss": {"sliding_window": 4},
    "gpt2": {},
    "llama": {},
    "m2m-100": {},
    "mistral": {"sliding_window": 4},
    "mixtral": {},
    "modernbert": {"local_attention": 4},
    "mpnet": {},
    "opt": {},
    "phi": {},
    "qwen3": {},
    "siglip-vision": {},
    "t5": {},
    "vit": {},
    "whisper": {},
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


class CatalogueTester(EncoderTester):
    """What the suite asks of a model of the catalogue: a small configuration, and a batch for it."""

    batch_size = 4
    name: str

    def __init__(self, config_class: type, options: dict):
        super().__init__(config_class, options)
        config = self.get_config()
        self.num_attention_heads = config.num_attention_heads
        self.hidden_size, self.vocab_size = config.hidden_size, getattr(config, "vocab_size", None)
        if hasattr(config, "image_size"):
            self.image_size, self.patch_size = config.image_size, config.patch_size
            self.num_masks, self.mask_length = 1, (config.image_size // config.patch_size) ** 2
            # A class token, and DeiT's token of distillation; SigLIP has none.
            extra = {"siglip_vision_model": 0, "deit": 2}.get(STOCK_TYPES[self.name], 1)
            self.seq_length = (config.image_size // config.patch_size) ** 2 + extra
        if hasattr(config, "max_source_positions"):
            self.encoder_seq_length = self.key_length = config.max_source_positions

    @property
    def settings(self) -> dict:
        settings = STOCK_MODELS[self.name][2]
        return {**settings, **{name: 2 for name in LAYERS if name in settings}, **TABLE[self.name]}

    @property
    def config_settings(self) -> dict:
        # A file has other names for these, or leaves them out.
        unsaved = ("experts_implementation", "num_labels")
        return {name: value for name, value in self.settings.items() if value is not None and name not in unsaved}

    def get_config(self):
        return self.config_class(**self.settings, **self.options)

    def prepare_config_and_inputs_for_common(self) -> tuple:
        config, shape = self.get_config(), (self.batch_size, self.seq_length)
        if hasattr(config, "image_size"):
            size = (self.batch_size, 3, config.image_size, config.image_size)
            return config, {"pixel_values": common.floats_tensor(size)}
        inputs = {}
        names = ("", "decoder_") if config.is_encoder_decoder else ("",)
        if hasattr(config, "num_mel_bins"):
            size = (self.batch_size, config.num_mel_bins, 2 * config.max_source_positions)
            inputs, names = {"input_features": common.floats_tensor(size)}, names[1:]
        for name in names:
            # None is special.
            inputs[f"{name}input_ids"] = common.ids_tensor(shape, self.vocab_size).clamp(4)
            if config.is_encoder_decoder:
                # Classifiers read their last state.
                inputs[f"{name}input_ids"][:, -1] = config.eos_token_id
            inputs[f"{name}attention_mask"] = common.random_attention_mask(shape)
        return config, inputs


STOCK_TYPES = {name: getattr(transformers, STOCK_MODELS[name][1]).model_type for name in TABLE}


class CatalogueTests(GenerationTests, PeerTests):
    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and "input_features" in inputs and model_class.__name__.endswith("ForConditionalGeneration"):
            inputs["labels"] = inputs["decoder_input_ids"]
        return inputs


def _cases(name: str):
    """Test cases of one architecture: plain, and with heads that are guided and gated."""
    models = headwise_classes_of(STOCK_TYPES[name])
    # The body, the head that a checkpoint of it has as a rule, and the others.
    first = [next(iter(models)), getattr(transformers, STOCK_MODELS[name][0])]
    models = {stock: models[stock] for stock in dict.fromkeys([*first, *models])}
    if name == "t5":
        # Its encoder alone, whose configuration is that of encoder and decoder.
        del models[transformers.T5ForTokenClassification]
    tester = type("Tester", (CatalogueTester,), {"name": name})
    config = tester(next(iter(models.values())).config_class, {}).get_config()
    kinds = dict.fromkeys(site.kind for site in config.attention_sites())
    is_guided = headwise_architectures()[STOCK_TYPES[name]].can_be_guided
    heads = {"guidance": {"fraction": 0.5}, "gates": {}} if is_guided else {"gates": {}}
    if len(kinds) > 1:
        heads = {option: dict.fromkeys(kinds, value) for option, value in heads.items()}
    title = name.title().replace("-", "")
    guided = "GuidedAndGated" if is_guided else "Gated"
    for prefix, options, count in (("", {}, 2), (guided, heads, len(models))):
        attributes = {
            "models": dict(list(models.items())[:count]),
            "options": options,
            "model_tester_class": tester,
            "is_encoder_decoder": config.is_encoder_decoder,
            "test_resize_embeddings": not hasattr(config, "image_size"),
            "__module__": __name__,
        }
        if not options:
            attributes |= {test: None for test in dir(CatalogueTests) if test.startswith(OF_THE_BODY)}
        case = f"Test{prefix}Headwise{title}"
        if "experts_implementation" in STOCK_MODELS[name][2]:
            DIFFERENCES[f"{case}.test_moe_models_record_router_logits"] = "looks for experts in the file of the class"
        yield case, type(case, (CatalogueTests, unittest.TestCase), attributes)


globals().update(case for name in TABLE for case in _cases(name))
