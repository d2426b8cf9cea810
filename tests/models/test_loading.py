"""Checkpoints through the Auto classes: with the package, and with nothing but the code saved beside the weights."""

import json

import pytest
import torch
import transformers
from tiny_models import KINDS, assert_same_in_a_fresh_process, first_output, stock_config, tiny_config

import hf_attn_dynamics as had
from hf_attn_dynamics.data import train_byte_level_bpe, train_marian_tokenizer
from hf_attn_dynamics.models import patterns
from hf_attn_dynamics.models.architectures import ARCHITECTURES


HEADS = [(kind, auto) for kind in KINDS for auto in ARCHITECTURES[kind].stock_models()]


def headwise_class_of(kind, auto):
    return getattr(had, f"Headwise{ARCHITECTURES[kind].stock_models()[auto]}")


def build(kind, auto, **changes):
    torch.manual_seed(0)
    return headwise_class_of(kind, auto)(tiny_config(kind, **changes)).eval()


LEARNED = ("CausalLM", "MaskedLM", "QuestionAnswering", "SequenceClassification", "TokenClassification")
ENCODER = {"AutoModel": "Model", **{f"AutoModelFor{head}": f"For{head}" for head in LEARNED}}


def test_auto_classes_open_the_headwise_classes_of_what_they_open_in_transformers():
    expected = {
        "bert": ENCODER
        | {
            "AutoModelForPreTraining": "ForPreTraining",
            "AutoModelForCausalLM": "LMHeadModel",
            "AutoModelForNextSentencePrediction": "ForNextSentencePrediction",
        },
        "electra": ENCODER | {"AutoModelForPreTraining": "ForPreTraining"},
        "marian": {"AutoModel": "Model", "AutoModelForSeq2SeqLM": "MTModel"},
        "roberta": ENCODER | {"AutoModelForPreTraining": "ForMaskedLM"},
    }
    for kind, heads in expected.items():
        named = {auto: f"{kind.capitalize()}{head}" for auto, head in heads.items()}
        assert ARCHITECTURES[kind].stock_models() == named
    for kind, auto in HEADS:
        opened = transformers.AutoConfig.for_model(f"headwise-{kind}")
        assert getattr(transformers, auto)._model_mapping[type(opened)] is headwise_class_of(kind, auto)


@pytest.mark.parametrize(("kind", "auto"), HEADS)
def test_auto_classes_bring_back_every_head_with_the_same_output(kind, auto, tmp_path):
    model = build(kind, auto)
    model.save_pretrained(tmp_path)
    back = getattr(transformers, auto).from_pretrained(tmp_path)
    assert type(back) is type(model)
    assert torch.equal(first_output(back, kind), first_output(model, kind))


def test_the_body_of_a_checkpoint_loads_through_auto_model(tmp_path):
    model = build("roberta", "AutoModelForMaskedLM")
    model.save_pretrained(tmp_path)
    body = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(body) is had.HeadwiseRobertaModel
    assert torch.equal(first_output(body, "roberta"), first_output(model.roberta, "roberta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_and_shards_come_back(dtype, tmp_path):
    model = build("roberta", "AutoModelForMaskedLM").to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="4kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    back = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert back.dtype == dtype
    assert torch.equal(first_output(back, "roberta"), first_output(model, "roberta"))


def test_the_saved_code_suffices_where_the_package_is_not_installed(tmp_path):
    checkpoints = []
    for kind, saved, loaded in (
        ("roberta", "AutoModelForMaskedLM", "AutoModelForMaskedLM"),
        ("bert", "AutoModelForPreTraining", "AutoModelForPreTraining"),
        ("electra", "AutoModelForPreTraining", "AutoModelForPreTraining"),
        ("marian", "AutoModelForSeq2SeqLM", "AutoModelForSeq2SeqLM"),
        # The head that was saved is not the only one the code knows.
        ("roberta", "AutoModelForMaskedLM", "AutoModel"),
        ("bert", "AutoModelForTokenClassification", "AutoModel"),
        ("marian", "AutoModelForSeq2SeqLM", "AutoModel"),
    ):
        folder = tmp_path / f"{len(checkpoints)}"
        build(kind, saved).save_pretrained(folder)
        here = getattr(transformers, loaded).from_pretrained(folder)
        checkpoints.append((here, folder, loaded, kind, {"output_guidance_loss": True}))
    # A stock model that lost heads is brought back by the code of its twin.
    stock, folder = transformers.BertForSequenceClassification(stock_config("bert")), tmp_path / "pruned"
    had.prune_heads(stock, {0: [1]}).save_pretrained(folder)
    here = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    checkpoints.append((here, folder, "AutoModelForSequenceClassification", "bert", {}))
    assert_same_in_a_fresh_process(checkpoints, package=False)


def test_a_checkpoint_with_an_unknown_pattern_loads_without_guidance(tmp_path):
    had.register_pattern("mine", patterns.first_token)
    build("roberta", "AutoModel", guidance={"heads": {"mine": [0]}}).save_pretrained(tmp_path)
    del patterns._PATTERNS["mine"]
    with pytest.raises(ValueError, match=r"pattern 'mine'.* or load the model with guidance=None"):
        had.HeadwiseRobertaModel.from_pretrained(tmp_path)
    for load in (had.HeadwiseRobertaModel, transformers.AutoModel):
        assert load.from_pretrained(tmp_path, guidance=None).config.guidance is None


def test_saving_leaves_the_configuration_as_it_was(tmp_path):
    model = build("bert", "AutoModel")
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, "auto_map")


def test_the_saved_code_loads_from_a_folder_of_any_name(tmp_path):
    folder = tmp_path / "my modèl+x (2)"
    build("roberta", "AutoModel").save_pretrained(folder)
    remote = transformers.dynamic_module_utils.get_class_from_dynamic_module(
        "headwise_classes.HeadwiseRobertaModel", str(folder)
    )
    assert remote.from_pretrained(folder)(torch.tensor([[4, 5]]), output_guidance_loss=True).guidance_loss > 0


def test_the_saved_code_and_the_package_work_in_one_process(tmp_path):
    model = build("roberta", "AutoModelForMaskedLM")
    model.save_pretrained(tmp_path)
    remote = transformers.dynamic_module_utils.get_class_from_dynamic_module(
        "headwise_classes.HeadwiseRobertaForMaskedLM", str(tmp_path)
    )
    assert remote is not type(model)
    copy = remote.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[4, 7, 5, 9, 11]])
    for one in (model, copy, model):
        found = one(ids, output_guidance_loss=True)
        expected = model(ids, output_guidance_loss=True)
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.guidance_loss, expected.guidance_loss)


TEXT = "the cat sat here on the mat"


def save_tokenizer(kind, folder):
    """A tokenizer of the kind of the stock model, and the number of its tokens."""
    if kind == "marian":
        pytest.importorskip("sentencepiece")
        return len(train_marian_tokenizer([TEXT], [TEXT], 17, folder))
    if kind == "roberta":
        tokenizer = train_byte_level_bpe([TEXT] * 3, vocab_size=290)
    else:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(TEXT.split())]
        tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_is_found_by_the_kind_of_the_model(kind, tmp_path):
    save_tokenizer(kind, tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings.pop("tokenizer_class", None)
    file.write_text(json.dumps(settings))
    found = []
    for config in (stock_config(kind), tiny_config(kind)):
        config.save_pretrained(tmp_path)
        found.append(transformers.AutoTokenizer.from_pretrained(tmp_path))
    stock, ours = found
    assert type(ours) is type(stock)
    assert type(ours).__name__ in (f"{kind.capitalize()}Tokenizer", "BertTokenizer")
    assert ours(TEXT)["input_ids"] == stock(TEXT)["input_ids"]


PIPELINES = [
    *((kind, "AutoModelForMaskedLM", "fill-mask") for kind in ("roberta", "bert", "electra")),
    ("roberta", "AutoModelForSequenceClassification", "text-classification"),
    ("electra", "AutoModelForTokenClassification", "token-classification"),
    ("bert", "AutoModel", "feature-extraction"),
]


@pytest.mark.parametrize(("kind", "auto", "task"), PIPELINES)
def test_pipelines_take_every_head(kind, auto, task, tmp_path, caplog):
    build(kind, auto, vocab_size=save_tokenizer(kind, tmp_path), guidance=None).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = TEXT.replace("cat", tokenizer.mask_token) if task == "fill-mask" else TEXT
    with caplog.at_level("ERROR", logger="transformers"):
        answer = transformers.pipeline(task, model=str(tmp_path))(text)
    assert answer
    assert "is not supported" not in caplog.text


def test_positions_of_a_loaded_translator_are_not_trained(tmp_path):
    build("marian", "AutoModelForSeq2SeqLM").save_pretrained(tmp_path)
    for loaded in (
        had.HeadwiseMarianMTModel.from_pretrained(tmp_path),
        had.HeadwiseMarianMTModel.from_pretrained(tmp_path, output_loading_info=True)[0],
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path),
    ):
        frozen = {name for name, p in loaded.named_parameters() if not p.requires_grad}
        assert frozen == {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
