import csv
import json
import math
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from documented import undocumented
from huggingface_hub import ModelCard
from PIL import Image
from swapped_classes import classes_swapped
from torch.nn.functional import cross_entropy
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    pipeline,
)

from hf_attn_dynamics import HeadScores, MaskedLanguageModelCollator, head_importance
from hf_attn_dynamics.data import embedded_images, pack_blocks, train_byte_level_bpe
from hf_attn_dynamics.recipes import prune_heads, pruning_tasks
from hf_attn_dynamics.recipes.arguments.classifying import BERT_FLAGS
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags


ROOT = Path(__file__).parents[2]


SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 290,
    "max_length": 16,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 8,
    "logging_steps": 2,
    "keep": "5 2",
    "importance_examples": 16,
    "latency_batch": 2,
    "disable_tqdm": "true",
    "device": "cpu",
    "cpu_threads": 1,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sentences about cats and dogs, by name; the validation file has the classes in the other order."""
    folder = tmp_path_factory.mktemp("text")
    rows = [(f"the {animal} number {i} sat here", animal) for i in range(16) for animal in ("cat", "dog")]
    for name, part in (("train", rows), ("validation", rows[::-1][:12])):
        lines = [f"{sentence}\t{label}" for sentence, label in part]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return folder


def run(folder, text, **settings):
    unread = (
        *BERT_FLAGS * bool({"model", "model_name"} & settings.keys()),
        *pruning_tasks.TOKEN_FLAGS * (settings.get("task") == "image"),
    )
    small = {name: value for name, value in SMALL.items() if name not in unread}
    files = {"train_file": text / "train.tsv", "validation_file": text / "validation.tsv"} if text else {}
    settings = {**small, **files, **settings}
    argv = [
        word
        for k, v in {"output_dir": folder, **settings}.items()
        if v is not None
        for word in (f"--{k}", *str(v).split(" "))
    ]
    arguments = parse_yaml_or_flags(
        prune_heads.PruneArguments, prune_heads.PruneTrainingArguments, argv=argv
    )  # fmt: skip
    return prune_heads.main(*arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("runs") / "first"
    return folder, run(folder, text, from_scratch="true")


def test_the_summary_has_every_figure_and_is_what_was_returned(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert undocumented(prune_heads, summary) == set()
    assert (summary["heads_total"], summary["heads_kept"], summary["importance"]) == (8, 5, "gates")
    assert summary["parameters_pruned"] == summary["parameters_dense"] - 3 * (4 * 16 * 4 + 3 * 4)
    assert 0 <= summary["metric_from_scratch"] <= 1
    assert summary["text"] == "train.tsv"


def test_every_way_keeps_exactly_so_many_heads(finished):
    folder, summary = finished
    rows = [(row["method"], row["heads"]) for row in summary["rows"]]
    ways = ("gates", "michel", "random", "from scratch")
    assert rows == [(way, keep) for way in ways for keep in (5, 2)]
    with open(folder / "curve.csv") as file:
        table = list(csv.DictReader(file))
    assert [(row["method"], int(row["heads"])) for row in table] == [("dense", 8), *rows]
    for picture in ("curve", "heads", "gates", "gate_history"):
        for suffix in (".png", ".svg"):
            assert (folder / (picture + suffix)).stat().st_size


def test_the_saved_models_are_those_that_were_measured(finished, text):
    folder, summary = finished
    for keep in (5, 2):
        model = AutoModelForSequenceClassification.from_pretrained(folder / f"model-{keep}")
        assert sum(map(len, model.config.kept_heads().values())) == keep
        assert model.config.gates is None
        tokenizer = AutoTokenizer.from_pretrained(folder / f"model-{keep}")
        lines = (text / "validation.tsv").read_text().splitlines()[1:]
        found = pipeline("text-classification", model=model, tokenizer=tokenizer)([x.split("\t")[0] for x in lines])
        right = sum(answer["label"] == line.split("\t")[1] for answer, line in zip(found, lines))
        expected = next(r for r in summary["rows"] if (r["method"], r["heads"]) == ("gates", keep))
        assert right / len(lines) == pytest.approx(expected["accuracy"])
        assert f"{keep} of 8 heads" in (folder / f"model-{keep}" / "README.md").read_text()


DECODER = {"task": "causal-lm", "num_key_value_heads": 2, "keep": "4 2", "per_device_train_batch_size": 4}


@pytest.fixture(scope="module")
def running_text(tmp_path_factory):
    """Simple sentences, a line each."""
    folder = tmp_path_factory.mktemp("running")
    lines = [f"the {a} number {n} sat near the {b}" for a in ("cat", "dog") for n in range(12) for b in ("cow", "fox")]
    (folder / "train.txt").write_text("\n".join(lines))
    (folder / "validation.txt").write_text("\n".join(lines[::5]))
    return {"train_file": folder / "train.txt", "validation_file": folder / "validation.txt"}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory, running_text):
    folder = tmp_path_factory.mktemp("decoder") / "run"
    return folder, run(folder, None, **DECODER, **running_text, from_scratch="true")


def test_a_decoder_loses_whole_groups(decoder):
    folder, summary = decoder
    assert undocumented(prune_heads, summary) == set()
    assert (summary["task"], summary["model"], summary["metric"]) == ("causal-lm", "small Llama", "perplexity")
    ways = ("gates", "michel", "random", "from scratch")
    assert [(row["method"], row["heads"]) for row in summary["rows"]] == [
        (way, keep) for way in ways for keep in (4, 2)
    ]
    assert summary["metric_from_scratch"] > 1
    for keep in (4, 2):
        model = AutoModelForCausalLM.from_pretrained(folder / f"model-{keep}")
        kept = [heads for heads in model.config.kept_heads().values() if heads]
        assert sum(map(len, kept)) == keep
        assert all(heads in ([0, 1], [2, 3], [0, 1, 2, 3]) for heads in kept)
    card = ModelCard.load(folder / "model-4" / "README.md")
    assert "A causal language model (small Llama) with 4 of 8 attention heads, chosen by gates" in card.text
    assert card.data.pipeline_tag == "text-generation"


@pytest.mark.parametrize("name", ["dense", "model-4"])
def test_perplexity_is_that_of_the_saved_model(decoder, running_text, name):
    folder, summary = decoder
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    lines = running_text["validation_file"].read_text().split("\n")
    tokens = [token for line in lines for token in [2, *tokenizer(line, add_special_tokens=False)["input_ids"]]][1:]
    blocks = [[0, *tokens[at : at + 14], 2] for at in range(0, len(tokens) - 13, 14)]
    blocks = torch.tensor(blocks)
    assert len(blocks) == summary["eval_examples"]
    stock = LlamaForCausalLM if name == "dense" else AutoModelForCausalLM
    with torch.no_grad():
        logits = stock.from_pretrained(folder / name)(blocks).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), blocks[:, 1:].flatten())
    assert summary["metric_dense" if name == "dense" else "metric_pruned"] == pytest.approx(
        loss.exp().item(), rel=1e-5
    )


def test_a_decoder_that_was_saved_loses_more(decoder, running_text, tmp_path):
    folder, before = decoder
    settings = {"task": "causal-lm", "model_name": folder / "model-4", "num_train_epochs": 0, "importance": "random"}
    summary = run(tmp_path / "run", None, **settings, **running_text, keep=2, gate_epochs=0.1, finetune_epochs=0)
    assert (summary["heads_total"], summary["heads_kept"]) == (4, 2)
    assert summary["metric_dense"] == pytest.approx(before["metric_pruned"], rel=1e-5)


def test_another_decoder_needs_no_groups(running_text, tmp_path):
    settings = {"task": "causal-lm", "architecture": "gpt2", "importance": "random", "keep": 3}
    summary = run(tmp_path / "run", None, **settings, **running_text, gate_epochs=0.1, finetune_epochs=0)
    assert (summary["model"], summary["heads_kept"]) == ("small GPT-2", 3)


MASKED = {"task": "masked-lm", "per_device_train_batch_size": 4, "importance_examples": 100}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, running_text):
    folder = tmp_path_factory.mktemp("encoder") / "run"
    return folder, run(folder, None, **MASKED, **running_text, from_scratch="true")


def masked_batches(folder, name, file, batch_size, seed=42):
    """The model that a run has saved, and masked blocks of a text as it has them in any evaluation."""
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    blocks = pack_blocks(Dataset.from_dict({"text": file.read_text().split("\n")}), tokenizer, SMALL["max_length"])
    collator = MaskedLanguageModelCollator(tokenizer, seed=seed)
    rows = blocks.to_list()
    batches = [collator(rows[at : at + batch_size]) for at in range(0, len(rows), batch_size)]
    return AutoModelForMaskedLM.from_pretrained(folder / name), batches


def test_an_encoder_loses_heads_in_every_way(encoder):
    folder, summary = encoder
    assert undocumented(prune_heads, summary) == set()
    assert (summary["task"], summary["model"], summary["metric"]) == ("masked-lm", "small RoBERTa", "perplexity")
    ways = ("gates", "michel", "random", "from scratch")
    assert [(row["method"], row["heads"]) for row in summary["rows"]] == [(way, k) for way in ways for k in (5, 2)]
    card = ModelCard.load(folder / "model-5" / "README.md")
    assert "A masked language model (small RoBERTa) with 5 of 8 attention heads, chosen by gates" in card.text
    assert card.data.pipeline_tag == "fill-mask"
    tokenizer = AutoTokenizer.from_pretrained(folder / "model-5")
    fill = pipeline("fill-mask", model=AutoModelForMaskedLM.from_pretrained(folder / "model-5"), tokenizer=tokenizer)
    assert len(fill(f"the {tokenizer.mask_token} sat")) == 5


@pytest.mark.parametrize(("name", "batch_size"), [("dense", 1), ("model-5", 100)])
def test_perplexity_is_that_of_masked_tokens_in_any_batches(encoder, running_text, name, batch_size):
    folder, summary = encoder
    model, batches = masked_batches(folder, name, running_text["validation_file"], batch_size)
    with torch.no_grad():
        sums = [
            cross_entropy(model(**batch).logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").item()
            for batch in batches
        ]
    count = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    expected = summary["metric_dense" if name == "dense" else "metric_pruned"]
    assert expected == pytest.approx(math.exp(sum(sums) / count), rel=1e-5)


def test_importance_is_of_the_masks_of_an_evaluation(encoder, running_text):
    folder, summary = encoder
    found = HeadScores.load(folder / "checkpoints" / "importance-michel.json")
    model, batches = masked_batches(folder, "dense", running_text["train_file"], 7)
    assert summary["train_examples"] <= MASKED["importance_examples"]
    expected = head_importance(model, batches, normalize="l2")["encoder"]
    torch.testing.assert_close(found["encoder"], expected, rtol=1e-4, atol=1e-6)


def test_an_encoder_that_was_saved_loses_more(encoder, running_text, tmp_path):
    folder, before = encoder
    settings = {"task": "masked-lm", "model_name": folder / "model-5", "num_train_epochs": 0, "importance": "random"}
    summary = run(tmp_path / "run", None, **settings, **running_text, keep=2, gate_epochs=0.1, finetune_epochs=0)
    assert (summary["heads_total"], summary["heads_kept"]) == (5, 2)
    assert summary["metric_dense"] == pytest.approx(before["metric_pruned"], rel=1e-5)


@pytest.mark.parametrize("architecture", ["albert", "bert", "distilbert", "modernbert"])
def test_other_encoders_fill_in_masks(running_text, tmp_path, architecture):
    settings = {**MASKED, "architecture": architecture, "keep": 3, "mlm_probability": 0.3}
    summary = run(tmp_path / "run", None, **settings, **running_text, num_train_epochs=0.5, importance="gates michel")
    assert [(row["method"], row["heads"]) for row in summary["rows"]] == [("gates", 3), ("michel", 3)]


@pytest.fixture
def few_images(monkeypatch):
    monkeypatch.setattr(pruning_tasks, "embedded_images", partial(embedded_images, 48, 20))


IMAGES = {"task": "image", "hidden_size": 16}


@pytest.fixture(scope="module")
def of_images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning_tasks, "embedded_images", partial(embedded_images, 48, 20))
        return folder, run(folder, None, **IMAGES, from_scratch="true")


def test_a_classifier_of_images_loses_heads_in_every_way(of_images):
    folder, summary = of_images
    assert undocumented(prune_heads, summary) == set()
    assert (summary["task"], summary["model"], summary["metric"]) == ("image", "small ViT", "accuracy")
    assert (summary["train_examples"], summary["eval_examples"], summary["latency_length"]) == (48, 20, None)
    ways = ("gates", "michel", "random", "from scratch")
    assert [(row["method"], row["heads"]) for row in summary["rows"]] == [(way, k) for way in ways for k in (5, 2)]
    card = ModelCard.load(folder / "model-5" / "README.md")
    assert "A classifier of images (small ViT) with 5 of 8 attention heads, chosen by gates" in card.text
    assert "The classes are above left, above right, below left, below right." in card.text
    assert (card.data.pipeline_tag, card.data.language) == ("image-classification", None)
    assert card.data.eval_results[0].dataset_type == "image"


@pytest.mark.parametrize("name", ["dense", "model-5"])
def test_accuracy_is_that_of_the_saved_model_on_the_drawings(of_images, name):
    folder, summary = of_images
    _, validation = embedded_images(48, 20)
    classify = pipeline(
        "image-classification",
        model=AutoModelForImageClassification.from_pretrained(folder / name),
        image_processor=AutoImageProcessor.from_pretrained(folder / name),
    )
    images = [Image.fromarray(np.array(image, dtype=np.uint8)) for image in validation["image"]]
    names = validation.features["label"].names
    right = [best["label"] == names[label] for (best, *_), label in zip(classify(images), validation["label"])]
    expected = summary["metric_dense" if name == "dense" else "metric_pruned"]
    assert sum(right) / len(right) == pytest.approx(expected)


def test_a_classifier_of_images_that_was_saved_loses_more(of_images, few_images, tmp_path):
    folder, before = of_images
    settings = {"task": "image", "model_name": folder / "model-5", "num_train_epochs": 0, "importance": "michel"}
    summary = run(tmp_path / "run", None, **settings, keep=2, gate_epochs=0.1, finetune_epochs=0)
    assert (summary["heads_total"], summary["heads_kept"]) == (5, 2)
    assert summary["metric_dense"] == pytest.approx(before["metric_pruned"])


def test_images_are_normalized_as_those_that_the_checkpoint_was_trained_on(of_images, few_images, tmp_path):
    folder, before = of_images
    shutil.copytree(folder / "dense", tmp_path / "model")
    processor = AutoImageProcessor.from_pretrained(folder / "dense")
    processor.image_mean, processor.image_std = [0.1, 0.2, 0.3], [0.4, 0.4, 0.4]
    processor.save_pretrained(tmp_path / "model")
    settings = {"task": "image", "model_name": tmp_path / "model", "num_train_epochs": 0, "importance": "random"}
    run(tmp_path / "run", None, **settings, keep=2, gate_epochs=0, finetune_epochs=0)
    for name in ("dense", "model-2"):
        saved = AutoImageProcessor.from_pretrained(tmp_path / "run" / name)
        assert list(saved.image_mean) == [0.1, 0.2, 0.3]


def test_another_classifier_of_images(few_images, tmp_path):
    settings = {**IMAGES, "architecture": "deit", "importance": "random", "keep": 3, "gate_epochs": 0.1}
    summary = run(tmp_path / "run", None, **settings, finetune_epochs=0)
    assert (summary["model"], summary["heads_kept"]) == ("small DeiT", 3)


def test_a_checkpoint_for_other_images_is_refused(few_images, tmp_path, capsys):
    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit):
        run(tmp_path / "run", None, task="image", model_name=tmp_path / "model")
    assert (
        "takes images of 8 pixels and 3 channels, but the images of task image have 16 and 3"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("numbered", [False, True])
def test_classes_in_another_order_are_found_by_name(finished, text, tmp_path, numbered):
    folder, summary = finished
    own = None if numbered else ["DOG", "CAT"]
    classes_swapped(folder / "dense", tmp_path / "model", own)
    settings = {"model_name": tmp_path / "model", "num_train_epochs": 0, "importance": "random", "keep": 7}
    swapped = run(tmp_path / "run", text, **settings, gate_epochs=0.1, finetune_epochs=0)
    dense = summary["metric_dense"]
    assert swapped["metric_dense"] == pytest.approx(1 - dense if numbered else dense)


def test_a_model_that_has_lost_heads_loses_more(finished, text, tmp_path):
    folder, before = finished
    settings = {"model_name": folder / "model-5", "num_train_epochs": 0, "importance": "random", "keep": 2}
    summary = run(tmp_path / "run", text, **settings, gate_epochs=0.1, finetune_epochs=0)
    assert (summary["heads_total"], summary["heads_kept"]) == (5, 2)
    for figure in ("parameters", "bytes"):
        assert summary[f"{figure}_dense"] == before[f"{figure}_pruned"] > summary[f"{figure}_pruned"]


def test_cards_say_what_is_known_of_each_model(finished):
    folder, summary = finished
    dense, pruned = (ModelCard.load(folder / name / "README.md") for name in ("dense", "model-5"))
    assert "with all 8 attention heads. The classes are cat, dog." in dense.text
    assert "accuracy_dense" not in dense.text
    assert "with 5 of 8 attention heads, chosen by gates; it was fine-tuned after the others were" in pruned.text
    # Nobody has said which language the text is in.
    assert dense.data.language is pruned.data.language is None
    assert dense.data.eval_results[0].metric_value == pytest.approx(summary["metric_dense"], abs=1e-4)


def test_blank_texts_are_left_out(text, tmp_path, caplog):
    lines = (text / "train.tsv").read_text().splitlines()
    (tmp_path / "train.tsv").write_text("\n".join([lines[0], "\tcat", *lines[1:]]) + "\n")
    settings = {"num_train_epochs": 0.1, "importance": "random", "keep": 2, "gate_epochs": 0.1, "finetune_epochs": 0}
    summary = run(tmp_path / "run", text, train_file=tmp_path / "train.tsv", **settings)
    assert summary["train_examples"] == len(lines) - 1
    assert "1 of 33 texts are blank and left out" in caplog.text


def test_files_may_be_in_another_encoding_and_columns_have_positions(text, tmp_path):
    for name in ("train", "validation"):
        lines = (text / f"{name}.tsv").read_text().replace("the cat", "das Kätzchen").splitlines()[1:]
        # Without a header; the texts are in column 2, the labels in column 0.
        cells = [line.split("\t") for line in lines]
        rows = "".join(f"{label}\t{number}\t{sentence}\n" for number, (sentence, label) in enumerate(cells))
        (tmp_path / f"{name}.tsv").write_bytes(rows.encode("latin-1"))
    files = {f"{name}_file": tmp_path / f"{name}.tsv" for name in ("train", "validation")}
    few = {"num_train_epochs": 0.1, "importance": "random", "keep": 2, "gate_epochs": 0.1, "finetune_epochs": 0}
    settings = {**few, **files, "text_column": 2, "label_column": 0}
    summary = run(tmp_path / "run", text, **settings, encoding="latin-1")
    assert (summary["train_examples"], summary["eval_examples"]) == (32, 12)
    with pytest.raises(SystemExit):
        run(tmp_path / "unread", text, **settings)


def test_running_text_may_be_in_another_encoding_and_a_column_without_name(tmp_path):
    for name in ("train", "validation"):
        rows = "".join(f"{number}\tdas Kätzchen Nummer {number} saß hier\n" for number in range(20))
        (tmp_path / f"{name}.tsv").write_bytes(rows.encode("latin-1"))
    files = {f"{name}_file": tmp_path / f"{name}.tsv" for name in ("train", "validation")}
    few = {"num_train_epochs": 0.1, "importance": "random", "keep": 2, "gate_epochs": 0.1, "finetune_epochs": 0}
    settings = {"task": "causal-lm", "text_column": 1, "encoding": "latin-1", **few, **files}
    run(tmp_path / "run", None, **settings)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/dense")
    assert tokenizer.decode(tokenizer(" saß hier", add_special_tokens=False)["input_ids"]) == " saß hier"
    assert any("ß" in tokenizer.decode([index]) for index in range(len(tokenizer)))


@pytest.mark.parametrize(("task", "positions"), [("text-classification", 24), ("masked-lm", 24), ("causal-lm", None)])
def test_a_length_that_is_not_set_fits_the_checkpoint(task, positions, text, running_text, tmp_path):
    tokenizer = train_byte_level_bpe(["the cat number sat here"], 280)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    sizes["vocab_size"] = len(tokenizer)
    model = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if task == "causal-lm"
        else BertForMaskedLM(BertConfig(max_position_embeddings=24, **sizes))
    )
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    files = {} if task == "text-classification" else running_text
    few = {"num_train_epochs": 0.1, "importance": "random", "keep": 2, "gate_epochs": 0.1, "finetune_epochs": 0}
    settings = {"task": task, "model": tmp_path / "model", "per_device_train_batch_size": 2, **few, **files}
    summary = run(tmp_path / "run", None if files else text, max_length=None, **settings)
    fitting = positions or 64
    assert f"max_length: {fitting}\n" in (tmp_path / "run/config.yaml").read_text()
    assert summary["latency_length"] == fitting


def test_a_length_that_the_checkpoint_does_not_have_is_refused(text, tmp_path, capsys):
    BertForMaskedLM(
        BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=24)
    ).save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit):
        run(tmp_path / "run", text, model=tmp_path / "model", max_length=25)
    assert "max_length=25, but the model has positions for 24 tokens" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_texts_of_one_class_are_refused(text, tmp_path, capsys):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "a cat\tcat\n" * 3)
    with pytest.raises(SystemExit):
        run(tmp_path / "run", text, train_file=tmp_path / "train.tsv")
    assert "all training texts have the label cat; two classes are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": "0"}, "keep must be at least 1, got 0"),
        ({"keep": "8"}, "keep=8, but the model has 8 heads; keep fewer"),
        ({"keep": "3 3"}, "keep must be non-empty and unique, got [3, 3]"),
        ({"importance": "taylor"}, "importance must be among gates, michel, random, fisher, margin, got 'taylor'"),
        ({"gate_penalty": "0.1"}, "gate_penalty=0.1 has no effect here; set keep"),
        ({"max_steps": "7"}, "max_steps=7 has no effect here; set num_train_epochs"),
        ({"gate_epochs": "0"}, "gate_epochs must be above 0 to train gates"),
        ({"finetune_epochs": "-1"}, "gate_epochs and finetune_epochs must be at least 0, got 1.0 and -1.0"),
        ({"gate_variant": "papr"}, "gate_variant must be paper or paper_code, got 'papr'"),
        ({"importance_examples": "0"}, "importance_examples must be at least 1, got 0"),
        ({"latency_batch": "0"}, "latency_batch must be at least 1, got 0"),
        ({"latency_length": "0"}, "latency_length must be at least 1, got 0"),
        ({"latency_length": "600"}, "latency_length=600, but the model has positions for"),
        ({"model_name": "no/such"}, "no/such"),
        (
            {"model_name": "no/such", "hidden_size": 32},
            "hidden_size=32 has no effect here; the checkpoint of",
        ),
        (
            {"model_name": "no/such", "dropout": 0.2},
            "dropout=0.2 has no effect here; the checkpoint of",
        ),
        ({"dataset_name": "a/b"}, "and dataset_name 'a/b' exclude each other; give one"),
        ({"validation_split": "dev"}, "validation_split=dev has no effect here; it needs --dataset_name"),
        ({"max_length": 2}, "max_length must be greater than the number of special tokens, 2, got 2"),
        ({"train_file": "nowhere.tsv"}, "nowhere.tsv"),
        ({"label_column": "mood"}, "mood"),
        (
            {"train_file": None, "validation_file": None, "encoding": "latin-1"},
            "encoding=latin-1 has no effect here; it needs files",
        ),
        ({"model": "nowhere/of/mine"}, "model 'nowhere/of/mine' cannot be loaded: no such folder."),
        ({"task": "lm"}, "task must be one of text-classification, causal-lm, masked-lm, image, got 'lm'"),
        ({"architecture": "gpt2"}, "architecture=gpt2 has no effect here; only causal-lm, masked-lm, image read it"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 has no effect here; only causal-lm, masked-lm read it"),
        ({"mlm_probability": 0.3}, "mlm_probability=0.3 has no effect here; only masked-lm reads it"),
        (
            {**DECODER, "text_column": "sentence", "keep": 3},
            "keep=3, but 2 heads share a key/value head and are removed together",
        ),
        ({**DECODER, "label_column": 1}, "label_column=1 has no effect here; running text has no labels"),
        ({**DECODER, "text_column": "a b"}, "has several columns, but running text has one"),
        ({**DECODER, "architecture": "lama"}, "'lama' has no row in the catalogue; the nearest is 'llama'"),
        ({**DECODER, "architecture": "vit"}, "architecture vit has no head for task causal-lm"),
        (
            {**DECODER, "text_column": "sentence", "num_key_value_heads": 3},
            "4 is not a multiple of num_key_value_heads 3",
        ),
        ({**DECODER, "mlm_probability": 0.3}, "mlm_probability=0.3 has no effect here; only masked-lm reads it"),
        ({**MASKED, "text_column": "sentence", "mlm_probability": 1}, "mlm_probability must be between 0 and 1"),
        ({**MASKED, "label_column": 1}, "label_column=1 has no effect here; running text has no labels"),
        ({**MASKED, "architecture": "llama"}, "architecture llama has no head for task masked-lm"),
        (
            {**MASKED, "text_column": "sentence", "num_key_value_heads": 2},
            "num_key_value_heads=2 needs grouped attention, which roberta does not have",
        ),
        (
            {**MASKED, "model_name": "no/such", "architecture": "bert"},
            "architecture=bert has no effect here; the checkpoint of --model has its own sizes",
        ),
        ({"task": "image"}, "train.tsv'] has no effect here; the images of task image are drawn by code"),
        (
            {**DECODER, "model_name": "no/such"},
            "num_key_value_heads=2 has no effect here; the checkpoint of",
        ),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(tmp_path, text, capsys, settings, message):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", text, **settings)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_name": "a/b"}, "dataset_name=a/b has no effect here; the images of task image"),
        ({"label_column": "x"}, "label_column=x has no effect here; the images of task image"),
        ({"encoding": "latin-1"}, "encoding=latin-1 has no effect here; the images of task image"),
        ({"max_length": 32}, "max_length=32 has no effect here; images have no tokens"),
        ({"latency_length": 32}, "latency_length=32 has no effect here; images have no tokens"),
        ({"mlm_probability": 0.3}, "mlm_probability=0.3 has no effect here; only masked-lm reads it"),
        ({"architecture": "bert"}, "architecture bert has no head for task image"),
        ({"hidden_size": 18}, "hidden_size 18 is not a multiple of 4 heads"),
    ],
)
def test_bad_input_of_images_is_one_line_before_anything_is_written(tmp_path, capsys, settings, message):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", None, **{**IMAGES, **settings})
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
