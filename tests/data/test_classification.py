import collections
import json
import math
import re
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from hf_attn_dynamics.data import (
    align_labels,
    classification,
    embedded_classification,
    load_class_files,
    load_classification,
    load_texts,
)
from hf_attn_dynamics.data.files import find_files


ROWS = [("a fine film", "pos"), ('it "drags", a bit', "neg"), ("Größe", "pos")]


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def splits():
    return embedded_classification()


def write(path, *rows, header=("sentence", "label")):
    """A table of one of the kinds; rows of strings, numbers and so on."""
    rows = rows or ROWS
    if path.suffix == ".parquet":
        Dataset.from_list([dict(zip(header, row)) for row in rows]).to_parquet(path)
    elif path.suffix in (".json", ".jsonl"):
        lines = [json.dumps(dict(zip(header, row)), ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines) if path.suffix == ".jsonl" else f"[{', '.join(lines)}]", encoding="utf-8")
    else:
        cells = [list(map(str, row)) for row in ([header] if header else []) + list(rows)]
        if path.suffix == ".csv":
            cells = [['"' + cell.replace('"', '""') + '"' for cell in row] for row in cells]
        mark = "," if path.suffix == ".csv" else "\t"
        path.write_text("\n".join(map(mark.join, cells)) + "\n", encoding="utf-8")
    return path


def named(dataset):
    """Rows with the name of the class in place of its number."""
    return [
        (*(row[name] for name in dataset.column_names[:-1]), label) for row, label in zip(dataset, labels(dataset))
    ]


def labels(dataset):
    return [dataset.features["label"].names[number] for number in dataset["label"]]


def labelled(names, numbers=None, **columns):
    numbers = list(range(len(names))) if numbers is None else numbers
    features = Features({**dict.fromkeys(columns, Value("string")), "label": ClassLabel(names=names)})
    return Dataset.from_dict({**columns, "label": numbers}, features=features)


# Embedded texts


def test_splits_have_every_class_equally_often(splits):
    for split, count in zip(splits, (500, 100)):
        assert collections.Counter(split["label"]) == dict.fromkeys(range(8), count)
        assert split.column_names == ["text", "label"]
        assert split.features["label"].names == sorted(split.features["label"].names)


def test_no_text_comes_twice(splits):
    texts = [*splits[0]["text"], *splits[1]["text"]]
    assert len(texts) == len(set(texts))


def test_texts_are_long_enough_and_name_no_library(splits):
    names = "matplotlib|networkx|numpy|pandas|python|sympy|torch|transformers|hugging ?face"
    for text in [*splits[0]["text"], *splits[1]["text"]]:
        assert len(text.split()) >= 20, text
        assert not re.search(rf"{names}|\b(np|pd|plt|mpl|nx)\b", text, re.IGNORECASE), text


def test_no_file_has_texts_in_both_splits(tmp_path, monkeypatch):
    paragraph = (
        "Each of the {} that one file has in it is a {} of the same file and of no other, whatever is in them{}."
    )
    for library in classification.LIBRARIES:
        (tmp_path / library).mkdir()
        for file in range(8):
            words = [paragraph.format(*(f"{library}x{file}y{i}z{j}" for j in range(3))) * 2 for i in range(6)]
            code = "".join(f'"""{text.replace(".Each", ". Each")}"""\n' for text in words)
            (tmp_path / library / f"{file}.py").write_text(code)
    monkeypatch.setattr(classification, "_folder", lambda library: tmp_path / library)
    monkeypatch.setattr(classification, "LIBRARY_NAME", re.compile("(?!)"))
    files = [
        {re.search(r"\w+x\dy", text)[0] for text in split["text"]}
        for split in embedded_classification(train_per_class=25, validation_per_class=8)
    ]
    assert files[0].isdisjoint(files[1])
    assert [len(side) for side in files] == [8 * 5, 8 * 2]
    with pytest.raises(
        ValueError, match="matplotlib has too few texts for train_per_class=48 and validation_per_class=1; lower"
    ):
        embedded_classification(train_per_class=48, validation_per_class=1)


def test_texts_depend_on_the_seed_and_not_on_hashes():
    code = """
import json
from hf_attn_dynamics.data import embedded_classification
print(json.dumps([split.to_dict() for split in embedded_classification(20, 5, seed=3)]))
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True)
    here = [split.to_dict() for split in embedded_classification(20, 5, seed=3)]
    assert json.loads(result.stdout) == here
    assert embedded_classification(20, 5, seed=4)[0].to_dict() != here[0]


def test_a_bag_of_words_learns_the_classes_but_not_to_the_end(splits):
    counts = [collections.Counter() for _ in range(8)]
    for row in splits[0]:
        counts[row["label"]].update(set(re.findall(r"[a-z]{2,}", row["text"].lower())))
    right = 0
    for row in splits[1]:
        words = set(re.findall(r"[a-z]{2,}", row["text"].lower()))
        scores = [sum(math.log((count[word] + 0.1) / 500) for word in words) for count in counts]
        right += scores.index(max(scores)) == row["label"]
    assert 0.6 < right / len(splits[1]) < 0.9


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1), "train_per_class must be at least 1.* got 0"),
        ((1, 0), "validation_per_class must be at least 1.* got 0"),
    ],
)
def test_splits_without_texts_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        embedded_classification(*sizes)


def test_a_library_that_is_missing_is_an_error(monkeypatch):
    monkeypatch.setattr(classification, "LIBRARIES", ("python", "no_such_library"))
    with pytest.raises(ValueError, match="no_such_library, .* is not installed"):
        embedded_classification(1, 1)


# Files


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "json", "parquet"])
def test_tables_of_every_kind_say_the_same(kind, tmp_path):
    dataset = load_classification(write(tmp_path / f"a.{kind}"))
    assert named(dataset) == ROWS
    assert dataset.features == {"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])}


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "parquet"])
def test_numbers_stay_the_numbers_they_are(kind, tmp_path):
    dataset = load_classification(write(tmp_path / f"a.{kind}", ("a", 2), ("b", 0), ("c", 2)))
    assert dataset["label"][:] == [2, 0, 2]
    assert dataset.features["label"].names == ["0", "1", "2"]


def test_numbers_can_be_given_names(tmp_path):
    path = write(tmp_path / "a.tsv", ("a", 1), ("b", 0))
    dataset = load_classification(path, label_names=["negative", "positive"])
    assert labels(dataset) == ["positive", "negative"]


def test_a_split_without_the_last_class_is_numbered_as_the_others(tmp_path):
    names = ["world", "sports", "business"]
    part = write(tmp_path / "part.tsv", ("a", 1), ("b", 2))
    with pytest.raises(ValueError, match="has the numbers 1, 2, neither 0 nor 3, so that label_names world, sports, "):
        load_classification(part, label_names=names)
    assert labels(load_classification(part, label_names=names, first_label=1)) == ["world", "sports"]
    assert labels(load_classification(part, label_names=names, first_label=0)) == ["sports", "business"]
    whole = write(tmp_path / "whole.tsv", ("a", 3), ("b", 2))
    assert labels(load_classification(whole, label_names=names)) == ["business", "sports"]
    with pytest.raises(ValueError, match="add names for 3"):
        load_classification(whole, label_names=names, first_label=0)
    for settings in ({"first_label": 1}, {"first_label": 2, "label_names": names}):
        with pytest.raises(ValueError, match="first_label must be 0 or 1, beside label_names"):
            load_classification(whole, **settings)


def test_names_can_be_given_an_order_with_classes_that_are_absent(tmp_path):
    dataset = load_classification(write(tmp_path / "a.tsv"), label_names=["pos", "neutral", "neg"])
    assert dataset["label"][:] == [0, 2, 0]
    assert dataset.features["label"].names == ["pos", "neutral", "neg"]


def test_declared_classes_keep_their_order(tmp_path):
    labelled(["pos", "neg"], [1, 1], text=["a", "b"]).to_parquet(tmp_path / "a.parquet")
    dataset = load_classification(tmp_path / "a.parquet")
    assert dataset.features["label"].names == ["pos", "neg"]
    assert dataset["label"][:] == [1, 1]


def test_classes_of_files_that_declare_other_orders_are_joined_by_name(tmp_path):
    labelled(["pos", "neg"], [0], text=["a"]).to_parquet(tmp_path / "a.parquet")
    labelled(["neg", "pos"], [0], text=["b"]).to_parquet(tmp_path / "b.parquet")
    assert named(load_classification(tmp_path)) == [("a", "pos"), ("b", "neg")]


@pytest.mark.parametrize(
    "header",
    [
        ("index", "sentence1", "sentence2", "label"),
        ("pairID", "premise", "hypothesis", "gold_label"),
        ("idx", "question", "sentence", "label"),
        ("id", "question1", "question2", "is_duplicate"),
        ("#1 ID", "#1 String", "#2 String", "Quality"),
    ],
)
def test_pairs_are_found_under_their_usual_names(header, tmp_path):
    path = write(tmp_path / "a.tsv", ("7", "one", "two", "0"), ("8", "three", "four", "1"), header=header)
    dataset = load_classification(path)
    assert dataset.column_names == ["text", "text_pair", "label"]
    assert named(dataset) == [("one", "two", "0"), ("three", "four", "1")]


def test_columns_can_be_named(tmp_path):
    path = write(tmp_path / "a.csv", ("a", "b", "x"), ("c", "d", "y"), header=("one", "two", "kind"))
    assert named(load_classification(path, "two", "kind")) == [("b", "x"), ("d", "y")]
    assert named(load_classification(path, ["two", "one"], "kind")) == [("b", "a", "x"), ("d", "c", "y")]


@pytest.mark.parametrize("kind", ["tsv", "csv"])
def test_two_columns_without_header_are_text_and_label(kind, tmp_path):
    path = write(tmp_path / f"a.{kind}", *ROWS, header=None)
    assert named(load_classification(path)) == ROWS
    path = write(tmp_path / f"b.{kind}", ("a", 0), ("b", 1), header=None)
    assert load_classification(path)["label"][:] == [0, 1]


@pytest.mark.parametrize("kind", ["tsv", "csv"])
def test_positions_say_that_there_is_no_header(kind, tmp_path):
    path = write(tmp_path / f"a.{kind}", *[(label, text) for text, label in ROWS], header=None)
    assert named(load_classification(path, 1, 0)) == named(load_classification(path, -1, -2)) == ROWS


def test_a_header_of_unusual_names_is_not_taken_for_a_text(tmp_path):
    path = write(tmp_path / "a.tsv", *ROWS, header=("phrase", "judgement"))
    with pytest.raises(ValueError, match="first row of .* may be a header, since 'judgement' occurs only once"):
        load_classification(path)
    assert named(load_classification(path, "phrase", "judgement")) == ROWS


@pytest.mark.parametrize("blank", [" ", "\t", "\r\n \r"])
@pytest.mark.parametrize("kind", ["tsv", "csv"])
def test_lines_of_white_space_before_the_header_are_no_rows(kind, blank, tmp_path):
    path = write(tmp_path / f"a.{kind}")
    path.write_bytes(f"{blank}\n".encode() + path.read_bytes())
    assert named(load_classification(path)) == ROWS


def test_a_carriage_return_within_a_cell_of_a_tsv_is_white_space(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"sentence\tlabel\r\na\rb\tx\r\r\n\rc\ty\r")
    assert named(load_classification(tmp_path / "a.tsv")) == [("a b", "x"), (" c", "y")]
    assert load_texts([str(tmp_path / "a.tsv")], None, text_column="sentence")["text"][:] == ["a b", " c"]


@pytest.mark.parametrize("kind", ["tsv", "csv"])
def test_lines_may_end_in_carriage_returns_alone(kind, tmp_path):
    path = write(tmp_path / f"a.{kind}")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r"))
    assert named(load_classification(path)) == ROWS
    assert load_texts([str(path)], None, text_column="sentence")["text"][:] == [text for text, _ in ROWS]


def test_a_carriage_return_in_quotes_ends_no_row(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'text,label\n"a\rb",x\n"c\r\n",y\n')
    assert named(load_classification(tmp_path / "a.csv")) == [("a\rb", "x"), ("c\r\n", "y")]
    assert load_texts([str(tmp_path / "a.csv")], None)["text"][:] == ["a\rb", "c\r\n"]


@pytest.mark.parametrize("load", [load_classification, lambda path: load_texts([str(path)], None)])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            b'text,label\n"a\n",x\nb\rc,y\n',
            "row 3 must have 2 cells like .*, got 1 in 'b'; quote cells with",
        ),
        (
            "a.tsv",
            b"text\tlabel\na\tb\tx\n",
            r"row 2 must have 2 cells like .*, got 3 in 'a\\tb\\tx'; remove tabs and line",
        ),
    ],
)
def test_a_row_of_another_length_is_named_with_the_way_out(load, name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"files: .*{name} cannot be read as .{name[-3:]}: {message}"):
        load(tmp_path / name)


def test_files_are_joined(tmp_path):
    write(tmp_path / "a.tsv", *ROWS[:2])
    write(tmp_path / "b.jsonl", ROWS[2])
    assert named(load_classification(tmp_path)) == ROWS
    assert named(load_classification([str(tmp_path / "b.jsonl"), tmp_path / "a.tsv"])) == [ROWS[2], *ROWS[:2]]


def test_a_named_data_set_gives_its_columns(tmp_path):
    write(tmp_path / "train.jsonl")
    assert named(load_classification(dataset_name=str(tmp_path))) == ROWS


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "parquet"])
def test_whole_floats_are_numbers(kind, tmp_path):
    dataset = load_classification(write(tmp_path / f"a.{kind}", ("a", 1.0), ("b", 0.0)))
    assert dataset["label"][:] == [1, 0]
    assert dataset.features["label"].names == ["0", "1"]


def test_numbers_with_gaps_are_told(tmp_path, caplog):
    dataset = load_classification(write(tmp_path / "a.tsv", ("a", 4), ("b", 1)))
    assert dataset.features["label"].names == list("01234")
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "3 of the classes 0 to 4 have no rows, such as 0"
    ]
    load_classification(write(tmp_path / "b.tsv", ("a", 1), ("b", 0)))
    assert len(caplog.records) == 1


def test_numbers_that_begin_at_one_are_classes_from_zero_and_it_is_told_once(tmp_path, caplog):
    classification._tell_once.cache_clear()
    path = write(tmp_path / "a.tsv", *[(str(number), number) for number in (4, 1, 3, 2)])
    for _ in range(2):
        dataset = load_classification(path)
        assert dataset.features["label"].names == list("1234")
        assert dataset["label"][:] == [3, 0, 2, 1]
    [record] = caplog.records
    assert record.getMessage() == "label_column 'label' numbers classes from 1: 1 becomes class 0."
    named_by_hand = load_classification(path, label_names=["world", "sports", "business", "science"])
    assert labels(named_by_hand) == ["science", "world", "business", "sports"]
    # A split that lacks a class, and a model that has a class 0.
    part = load_classification(write(tmp_path / "b.tsv", ("a", 4), ("b", 2)))
    assert align_labels(part, dataset.features["label"].names)["label"][:] == [3, 1]
    assert align_labels(dataset, list("01234"))["label"][:] == [4, 1, 3, 2]
    with pytest.raises(ValueError, match="by name. Leave out the rows of 4, or choose a model"):
        align_labels(part, list("0123"))


def test_columns_that_only_differ_in_case_are_refused_unless_named(tmp_path):
    path = write(tmp_path / "a.jsonl", ("a", "x", "y"), header=("sentence", "Label", "label"))
    with pytest.raises(ValueError, match="a.jsonl has the columns Label and label, which only differ in case; rename"):
        load_classification(path)
    assert named(load_classification(path, label_column="label")) == [("a", "y")]


def test_a_number_without_a_declared_name_is_refused(tmp_path):
    declared = labelled(["pos", "neg"], text=["a", "b"]).features.arrow_schema.metadata
    pa.parquet.write_table(pa.table({"text": ["a", "b"], "label": [0, 2]}, metadata=declared), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="has 2 in row 2, but declares only 2 classes: pos, neg; leave out the row"):
        load_classification(tmp_path / "a.parquet")


@pytest.mark.parametrize("label", [-1, "", "-"])
def test_missing_labels_are_refused(label, tmp_path):
    path = write(tmp_path / "a.tsv", ("a", "0"), ("b", label))
    with pytest.raises(ValueError, match=f"label_column 'label' of .*a.tsv has '?{label}'? in row 2, a missing label"):
        load_classification(path)


@pytest.mark.parametrize("label", [None, math.nan])
def test_labels_of_json_that_are_missing_are_refused(label, tmp_path):
    path = write(tmp_path / "a.jsonl", ("a", 0), ("b", label))
    with pytest.raises(ValueError, match="in row 2, a missing label"):
        load_classification(path)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (0.5, "has 0.5 in row 2; a label must be a class name or a number from 0"),
        (-2, "has -2 in row 2"),
        (["a"], r"has \['a'\] in row 2"),
        ("a", "has both names and numbers, 'a' and 0; use one of them"),
    ],
)
def test_labels_that_are_no_classes_are_refused(label, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_classification(write(tmp_path / "a.jsonl", ("a", 0), ("b", label)))


def test_a_column_with_a_class_for_every_row_is_refused(tmp_path):
    path = write(tmp_path / "a.tsv", *[("same", f"text {number}") for number in range(101)])
    with pytest.raises(ValueError, match="label_column 'label' has 101 values in 101 rows"):
        load_classification(path, "sentence", "label")
    with pytest.raises(ValueError, match="has 2025 values in 2 rows"):
        load_classification(write(tmp_path / "b.tsv", ("a", 2024), ("b", 2023)), label_column="label")
    with pytest.raises(ValueError, match="label_column 'label' has 10{25} values in 1 rows"):
        load_classification(write(tmp_path / "c.tsv", ("a", "9" * 25)))


@pytest.mark.parametrize(
    ("rows", "names", "message"),
    [
        (ROWS, ["pos", "bad"], r"label_names is \['pos', 'bad'\], but .* labels neg, pos; add names for neg"),
        ([("a", 2), ("b", 0)], ["x", "y"], "labels 0, 2; add names for 2"),
        (ROWS, ["pos", "pos"], "label_names must be a list of unique names"),
        (ROWS, "pos", "label_names must be a list .* got 'pos'"),
    ],
)
def test_names_that_do_not_fit_are_refused(rows, names, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_classification(write(tmp_path / "a.tsv", *rows), label_names=names)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"", "a.tsv is empty"),
        ("a.csv", b"text,label\n", "a.csv has no row"),
        ("a.jsonl", b"\n", "a.jsonl is empty; leave it out"),
        ("a.tsv", b"text\tlabel\na\t0\nGr\xf6sse\t1\n", "a.tsv is not in UTF-8: byte 0xf6 at position 17, in line 3"),
        ("a.jsonl", b'{"text": "\xf6"}', "a.jsonl is not in UTF-8: byte 0xf6 at position 10, in line 1"),
        ("a.jsonl", b'{"text": ', "a.jsonl cannot be read as .jsonl"),
        ("a.jsonl", b"[1]", "a.jsonl has list as record 1, not a JSON object"),
        ("a.parquet", b"text", "a.parquet cannot be read as .parquet"),
        (
            "a.tsv",
            b"ID\twords\tlabel\n1\ta\t0\n",
            r"for texts, only ID, words, label; pass it as text_column \(for a file without header, pass the indices",
        ),
        (
            "a.tsv",
            b"text\tkind\na\t0\n",
            "no column with a common name for labels, only text, kind; pass it as label_co",
        ),
        ("a.csv", b"text,text,label\na,b,0\n", "must have unique column names, got text, text, label"),
        ("a.jsonl", b'{"text": 3, "label": 0}', "text_column 'text' of .* has 3 in row 1, not a string"),
        ("a.txt", b"a\n", "a.txt has an unsupported suffix; supported are .jsonl"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_classification(tmp_path / name)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("words", None), "text_column 'words' is not a column of .*a.tsv; choose one of sentence, label"),
        (
            (None, "kind"),
            "label_column 'kind' is not a column of .*a.tsv; choose one of sentence, label; or pass indices",
        ),
        (("label", "label"), "must be different columns"),
        ((0, "label"), "pass names for files with a header, or column indices"),
        ((0, None), "pass both column indices"),
        ((None, 1), "pass both column indices"),
        ((0, 2), "label_column 2 is not a column of .*a.tsv; choose one of 0, 1"),
        ((["a", "b", "c"], None), "text_column must be one column, or two for pairs"),
    ],
)
def test_columns_that_do_not_exist_are_refused(columns, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_classification(write(tmp_path / "a.tsv"), *columns)


def test_positions_in_a_file_with_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="columns of a .jsonl file have names"):
        load_classification(write(tmp_path / "a.jsonl"), 0, 1)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="files: .*missing.tsv is not a file"):
        load_classification(tmp_path / "missing.tsv")


@pytest.mark.parametrize("arguments", [{}, {"files": "a.tsv", "dataset_name": "b"}])
def test_files_and_a_name_exclude_each_other(arguments):
    with pytest.raises(ValueError, match="Pass either files or dataset_name"):
        load_classification(**arguments)


def test_pairs_and_single_texts_do_not_mix(tmp_path):
    write(tmp_path / "a.tsv")
    write(tmp_path / "b.tsv", ("one", "two", "pos"), header=("sentence1", "sentence2", "label"))
    with pytest.raises(ValueError, match="b.tsv has 2 texts per row, but .*a.tsv has 1"):
        load_classification(tmp_path)


def test_sst2_and_sms_spam_are_read(real_data):
    dataset = load_classification(real_data / "sst2" / "dev.tsv", label_names=["negative", "positive"])
    assert collections.Counter(labels(dataset)) == {"negative": 428, "positive": 444}
    assert dataset[0] == {"text": "one long string of cliches", "label": 0}
    messages = load_classification(real_data / "sms-spam" / "sms.tsv", 1, 0)
    assert collections.Counter(labels(messages)) == {"ham": 4827, "spam": 747}


# Labels


def test_labels_are_aligned_by_name_and_nothing_else_changes():
    dataset = labelled(["entailment", "neutral", "contradiction"], [0, 1, 2, 0], text=list("abcd"))
    aligned = align_labels(dataset, {"0": "CONTRADICTION", "1": "ENTAILMENT", "2": "NEUTRAL"})
    assert aligned["label"][:] == [1, 2, 0, 1]
    assert [name.lower() for name in labels(aligned)] == labels(dataset)
    assert aligned.features["label"].names == ["CONTRADICTION", "ENTAILMENT", "NEUTRAL"]
    assert aligned["text"][:] == dataset["text"][:]
    assert aligned.column_names == dataset.column_names


def test_the_model_may_have_more_classes():
    assert align_labels(labelled(["b", "c"]), ["a", "b", "c"])["label"][:] == [1, 2]


def test_case_and_separators_do_not_matter():
    assert align_labels(labelled(["not entailment", "Entailment"]), ["entailment", "NOT_ENTAILMENT"])["label"][:] == [
        1,
        0,
    ]


def test_numbered_classes_are_those_that_transformers_numbers():
    dataset = labelled(["0", "1", "2"])
    assert align_labels(dataset, {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"})["label"][:] == [0, 1, 2]


def test_a_format_is_kept():
    dataset = labelled(["a", "b"]).with_format("numpy")
    assert align_labels(dataset, ["b", "a"]).format == dataset.format


@pytest.mark.parametrize(
    ("own", "models", "message"),
    [
        (
            ["a", "b"],
            ["a", "c"],
            "classes a, b, but the model or the training data has a, c; .* Rename the classes of the",
        ),
        (["a", "b"], ["LABEL_0", "LABEL_1"], "has LABEL_0, LABEL_1; .* Name the latter in config.id2label or"),
        (["0", "1"], ["neg", "pos"], "classes 0, 1, .* has neg, pos; .* label_names or a ClassLabel"),
        (["0", "10", "2"], ["LABEL_0", "1"], "by name. Leave out the rows of 2, 10, or choose a model or training"),
        (["a", "b"], ["a", "b", "A"], "classes of names must have unique names, got a, b, a"),
        (["a b", "a-b"], ["a"], "classes of the dataset must have unique names"),
        (["a"], {0: "a", 2: "b"}, r"names must be numbered from 0 without gaps, got \[0, 2\]"),
    ],
)
def test_classes_that_do_not_match_are_refused(own, models, message):
    with pytest.raises(ValueError, match=message):
        align_labels(labelled(own), models)


def test_labels_that_are_missing_or_no_classes_are_refused():
    with pytest.raises(ValueError, match="label_column 'label' has -1, a missing label"):
        align_labels(labelled(["a", "b"], [0, -1]), ["b", "a"])
    with pytest.raises(ValueError, match="label_column 'label' has the type .*, not ClassLabel; name its classes"):
        align_labels(Dataset.from_dict({"label": [0, 1]}), ["a", "b"])
    with pytest.raises(ValueError, match="label_column 'kind' is not a column of the dataset; choose one of label"):
        align_labels(labelled(["a"]), ["a"], "kind")


def test_hidden_folders_are_not_read(tmp_path):
    for folder in ("good", "good/.ipynb_checkpoints", "bad"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.txt").write_text(folder)
    assert load_class_files({"good": tmp_path / "good", "bad": tmp_path / "bad"})["text"][:] == ["good", "bad"]
    (tmp_path / "good" / ".one.txt").touch()
    assert find_files(tmp_path, (".txt",)) == [tmp_path / "bad" / "one.txt", tmp_path / "good" / "one.txt"]


@pytest.mark.parametrize("name", ["texts.zip", "texts.tar.gz"])
def test_archives_in_a_folder_are_not_passed_over_in_silence(tmp_path, caplog, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"has no supported files .*; unpack {name}\."):
        find_files(tmp_path, (".txt",))
    assert caplog.text == ""
    (tmp_path / "license.txt").touch()
    assert find_files(tmp_path, (".txt",)) == [tmp_path / "license.txt"]
    assert f"{tmp_path} has archives, such as {name}, which are not read." in caplog.text
