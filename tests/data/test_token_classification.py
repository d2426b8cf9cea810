import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_attn_dynamics.data import (
    entity_labels,
    iob2,
    label_words,
    load_token_classification,
    train_byte_level_bpe,
    word_tags,
)


IOB1 = ["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-ORG", "O"]
IOB2 = ["B-PER", "I-PER", "B-PER", "O", "B-LOC", "B-ORG", "O"]
IOBES = ["B-PER", "E-PER", "S-PER", "O", "S-LOC", "S-ORG", "O"]
WORDS = ["Ada", "Roe", "Bo", "saw", "Jimma", "FAO", "."]
SENTENCES = [(WORDS, IOB2), (["Hi", "Bo"], ["O", "B-PER"])]


@pytest.fixture(scope="module", params=["roberta", "bert", "words"])
def tokenizer(request):
    if request.param != "words":
        return train_byte_level_bpe(["a"], 261, request.param)
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "Ada", "Roe"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")


def conll(sentences, separator=" ", middle=()):
    lines = ("\n".join(separator.join([w, *middle, t]) for w, t in zip(words, tags)) for words, tags in sentences)
    return "\n\n".join(lines) + "\n"


def as_dataset(sentences):
    return Dataset.from_dict({"tokens": [words for words, _ in sentences], "tags": [tags for _, tags in sentences]})


def load(path, content, **options):
    path.write_text(content, encoding="utf-8")
    return load_token_classification(path, **options)


def test_words_between_tabs_may_have_spaces(tmp_path):
    sentences = load(tmp_path / "a.conll", "New York\tNNP\tB-LOC\nis \tVBZ\tO\n\nbig JJ O\n")
    assert sentences["tokens"][:] == [["New York", "is"], ["big"]]
    assert sentences["tags"][:] == [["B-LOC", "O"], ["O"]]


def test_empty_cells_between_tabs_are_columns(tmp_path):
    # The first column is filled in the first row of a sentence only.
    rows = "Sentence: 1\tAda\tNNP\tB-PER\t\n\tsaw\tVBD\tO\n\t\t\t\nSentence: 2\tJimma\tNNP\tB-LOC\n"
    sentences = load(tmp_path / "a.txt", rows, token_column=1)
    assert sentences["tokens"][:] == [["Ada", "saw"], ["Jimma"]]
    assert sentences["tags"][:] == [["B-PER", "O"], ["B-LOC"]]


@pytest.mark.parametrize("tags", [IOB1, IOB2, IOBES], ids=["IOB1", "IOB2", "IOBES"])
def test_every_scheme_is_read_as_iob2(tags, tmp_path, caplog):
    assert iob2(tags) == IOB2
    assert load(tmp_path / "a.conll", conll([(WORDS, tags)]))["tags"][:] == [IOB2]
    assert not caplog.records


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["B-A", "O", "B-A", "O", "I-A"], "1 tags of a.conll are invalid in IOB2, such as I-A after O"),
        (["I-A", "O", "I-A", "O", "B-A"], "1 tags of a.conll are invalid in IOB1, such as B-A after O"),
        (["B-A", "O", "I-A", "E-A", "S-A"], "2 tags of a.conll are invalid in IOBES, such as O after B-A"),
    ],
)
def test_tags_that_fit_no_scheme_are_counted_once(tags, message, tmp_path, caplog):
    load(tmp_path / "a.conll", conll([(["x"] * len(tags), tags)]))
    [record] = caplog.records
    assert message in record.getMessage()


@pytest.mark.parametrize(
    "name",
    ["a.conll", "a.txt", "a.tsv", "a.bio", "a.conll.gz", "a.tsv.gz", "a.train.it", "a.jsonl", "a.json", "a.parquet"],
)
def test_every_kind_of_file_gives_its_sentences(name, tmp_path):
    path = tmp_path / name
    if name.endswith(".parquet"):
        as_dataset(SENTENCES).to_parquet(path)
    elif "json" in name:
        path.write_text("".join(json.dumps({"tokens": words, "tags": tags}) + "\n" for words, tags in SENTENCES))
    else:
        content = conll(SENTENCES, "\t").encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    dataset = load_token_classification([path])
    assert list(zip(dataset["tokens"], dataset["tags"])) == SENTENCES


def test_a_number_without_a_declared_name_is_refused(tmp_path):
    declared = Features({"tags": List(ClassLabel(names=["O", "B-PER"]))}).arrow_schema.metadata
    pa.parquet.write_table(pa.table({"tokens": [["a"]], "tags": [[2]]}, metadata=declared), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="'tags' in row 1 of .*a.parquet is .*, not a list of strings"):
        load_token_classification(tmp_path / "a.parquet")


def test_columns_can_be_chosen(tmp_path):
    content = "1 Ada NNP B-PER I-X\n2 slept VBD O O\n"
    dataset = load(tmp_path / "a.txt", content, token_column=1, tag_column=3)
    assert dataset[0] == {"tokens": ["Ada", "slept"], "tags": ["B-PER", "O"]}
    content = json.dumps({"words": ["Ada"], "ner_tags": ["B-PER"], "pos": ["X"]})
    assert load(tmp_path / "a.jsonl", content, token_column="words")[0] == {"tokens": ["Ada"], "tags": ["B-PER"]}


def test_separators_comments_and_document_marks_are_no_words(tmp_path):
    content = "-DOCSTART- -X- O O\n\n# id 7\nAda \t B-PER\r\n# O\n\u00a0x O\n \n\n-DOCSTART-\nBo B-PER"
    dataset = load(tmp_path / "a.txt", content)
    assert dataset["tokens"][:] == [["Ada", "#", "\u00a0x"], ["Bo"]]


@pytest.mark.parametrize(
    ("comment", "separator"),
    [
        ("# text = Vitamin B-12", "\t"),
        ("# text = Vitamin B-12", " "),
        ("# sent_id = O", "\t"),
        ("# sent_id = O", " "),
        ("# O", "\t"),
        ("#newdoc O", "\t"),
    ],
)
def test_comments_of_conll_are_no_words_whatever_they_end_in(comment, separator, tmp_path):
    sentences = load(tmp_path / "a.conll", f"{comment}\nAda{separator}B-PER\n#1{separator}O\n")
    assert sentences["tokens"][:] == [["Ada", "#1"]]


def test_sentences_without_words_are_dropped_with_one_warning(tmp_path, caplog):
    rows = [{"tokens": [], "tags": []}, {"tokens": ["Bo"], "tags": ["O"]}, {"tokens": [], "tags": []}]
    dataset = load(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert dataset["tokens"][:] == [["Bo"]]
    [record] = caplog.records
    assert record.getMessage() == "2 of 3 sentences of a.jsonl have no words and are skipped."


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", "\n\n", {}, "a.txt has no sentences with words"),
        ("a.txt", "Ada B-PER\nslept\n", {}, "line 2 of .*a.txt has 1 columns, too few for token_column=0"),
        ("a.txt", "Ada B-PER\n", {"tag_column": 2}, "line 1 of .*a.txt has 2 columns, too few .* tag_column=2"),
        ("a.txt", "Ada NNP\n", {}, "tag_column -1 has 'NNP' in line 1 of .*a.txt, which is neither O nor B-"),
        ("a.txt", "Ada B-\n", {}, "has 'B-' in line 1"),
        (
            "a.txt",
            "Ada B-PER\n",
            {"tag_column": "ner"},
            "tag_column must be an index, from 0, since .* has no header, got 'ner'",
        ),
        ("a.txt", "2\t\tNN\tO\n", {"token_column": 1}, "line 1 of .*a.txt has no word in token_column=1"),
        ("a.csv", "tokens,tags\n", {}, "a.csv has an unsupported suffix"),
        ("a.jsonl", '{"tokens": ["a"], "tags": []}', {}, "row 1 of .*a.jsonl has 1 words, but 0 tags"),
        ("a.jsonl", '{"tokens": ["a"], "tags": [3]}', {}, r"'tags' in row 1 of .* is \[3\], not a list of strings"),
        ("a.jsonl", '{"tokens": "a", "tags": "O"}', {}, "'tokens' in row 1 of .* is 'a', not a list of strings"),
        (
            "a.jsonl",
            '{"text": "a", "tags": ["O"]}',
            {},
            "token_column 'tokens' is not a column of .*; choose one of text",
        ),
    ],
)
def test_bad_files_are_refused(name, content, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(tmp_path / name, content, **options)


def test_labels_are_those_of_every_type():
    assert entity_labels([IOB2]) == ["O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER"]
    with pytest.raises(ValueError, match="there are no entities"):
        entity_labels([["O"], []])


def test_the_first_token_of_a_word_has_its_label(tokenizer):
    labels = entity_labels([IOB2])
    encoded = label_words(as_dataset(SENTENCES), tokenizer, labels, max_length=64)
    for (words, tags), row in zip(SENTENCES, encoded, strict=True):
        pieces = [
            tokenizer(" " * (place > 0) + word, add_special_tokens=False)["input_ids"]
            for place, word in enumerate(words)
        ]
        expected = [label for tag, ids in zip(tags, pieces) for label in [labels.index(tag), *[-100] * (len(ids) - 1)]]
        framed = tokenizer.num_special_tokens_to_add() // 2
        assert row["labels"] == [-100] * framed + expected + [-100] * framed
        inner = row["input_ids"][framed : len(row["input_ids"]) - framed]
        assert inner == [token for ids in pieces for token in ids]
        assert row["words"] == list(range(len(words)))
        assert row["tags"] == tags


def test_tags_come_back_and_lost_words_are_o(caplog):
    tokenizer = train_byte_level_bpe(["a"], 261)
    labels = entity_labels([IOB2])
    # Room for "Ada Roe Bo" at a byte a token; the second sentence has a word without any.
    sentences = [*SENTENCES, (["", "Bo"], ["O", "B-PER"])]
    encoded = label_words(as_dataset(sentences), tokenizer, labels, max_length=2 + 10, name="dev.txt")
    [record] = caplog.records
    assert record.getMessage().startswith("5 words in 2 of 3 sentences of dev.txt are truncated by max_length=12")
    true = np.full((3, 12), -100)
    for row, ids in enumerate(encoded["labels"]):
        true[row, : len(ids)] = ids
    found = word_tags(np.where(true == -100, 1, true), true, encoded, labels)
    assert found == [IOB2[:3] + ["O"] * 4, ["O", "B-PER"], ["O", "B-PER"]]


@pytest.mark.parametrize(
    ("labels", "max_length", "message"),
    [
        (["O", "B-PER", "I-PER", "B-LOC", "I-LOC"], 20, "dev has the tag B-ORG, but the labels are only O, B-PER"),
        (entity_labels([IOB2]), 2, "max_length must be greater than the number of special tokens, 2, got 2"),
    ],
)
def test_what_can_not_be_labelled_is_refused(labels, max_length, message):
    with pytest.raises(ValueError, match=message):
        label_words(as_dataset(SENTENCES), train_byte_level_bpe(["a"], 261), labels, max_length, "dev")


def test_slow_tokenizers_are_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(ValueError, match="does not support `word_ids`"):
        label_words(as_dataset(SENTENCES), tokenizer, ["O"], 20)


def test_tags_may_be_numbers_of_declared_classes(tmp_path):
    names = ["O", "B-PER", "I-PER"]
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=names))})
    rows = {"tokens": [["Ada", "Lovelace", "slept"]], "ner_tags": [[1, 2, 0]]}
    path = tmp_path / "train.parquet"
    Dataset.from_dict(rows, features=features).to_parquet(path)
    assert load_token_classification(path)["tags"][:] == [["B-PER", "I-PER", "O"]]
    # Without their names, numbers mean nothing.
    Dataset.from_dict(rows).to_parquet(path)
    with pytest.raises(ValueError, match=r"'ner_tags' in row 1 of .* is \[1, 2, 0\], not a list of strings"):
        load_token_classification(path)
