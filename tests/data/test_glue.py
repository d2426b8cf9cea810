import gzip
import re

import datasets
import glue_files
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import ClassLabel

from hf_attn_dynamics.data import GLUE_TASKS, class_order, find_glue_file, glue_task, load_glue, write_submission


EVERY_SPLIT = [(task, split) for task in glue_files.TITLES for split in glue_files.splits(task)] + [("mnli", "ax")]


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue_data")
    glue_files.write_tsv(folder)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    glue_files.write_hub(folder)
    return folder


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def assert_rows(dataset, expected):
    assert dataset.column_names == list(expected[0])
    for found, row in zip(dataset, expected, strict=True):
        assert found == {**row, **({"label": pytest.approx(row["label"], abs=1e-3)} if "label" in row else {})}


def test_the_tasks_are_those_of_the_benchmark():
    assert {name: task.title for name, task in GLUE_TASKS.items()} == glue_files.TITLES
    assert {name: list(task.labels) for name, task in GLUE_TASKS.items() if task.labels} == glue_files.NAMES
    files = [title for task in GLUE_TASKS.values() for title in task.test]
    assert sorted(files) == ["AX", "CoLA", "MNLI-m", "MNLI-mm", "MRPC", "QNLI", "QQP", "RTE", "SST-2", "STS-B", "WNLI"]


@pytest.mark.parametrize(("task", "split"), EVERY_SPLIT)
def test_the_files_of_the_benchmark_are_read(task, split, benchmark):
    assert_rows(load_glue(task, split, benchmark), glue_files.rows(task, split))


@pytest.mark.parametrize(("task", "split"), EVERY_SPLIT)
def test_the_data_set_of_the_hub_is_read(task, split, hub):
    assert_rows(load_glue(task, split, dataset_name=str(hub)), glue_files.rows(task, split))


@pytest.mark.parametrize("named", [True, False], ids=["names", "numbers"])
@pytest.mark.parametrize("task", glue_files.TITLES)
def test_json_lines_are_read_with_labels_by_name_or_number(task, named, tmp_path):
    glue_files.write_jsonl(tmp_path, task, named)
    for split in glue_files.splits(task):
        assert_rows(load_glue(task, split, tmp_path), glue_files.rows(task, split))


def test_labels_are_classes_in_the_order_of_the_task_and_scores_are_numbers(benchmark):
    for task, names in glue_files.NAMES.items():
        split = GLUE_TASKS[task].validation[0]
        assert load_glue(task, split, benchmark).features["label"] == ClassLabel(names=names)
    assert load_glue("stsb", folder=benchmark).features["label"].dtype == "float32"


def test_names_are_matched_where_the_hub_has_them_in_another_order(tmp_path):
    label = ClassLabel(names=["NOT_entailment", "Entailment"])
    features = datasets.Features(
        {**dict.fromkeys(("sentence1", "sentence2"), datasets.Value("string")), "label": label}
    )
    rows = [{"sentence1": "a", "sentence2": "b", "label": number} for number in (0, 1)]
    rows = datasets.Dataset.from_list(rows, features=features)
    rows.to_parquet(tmp_path / "train.parquet")
    assert load_glue("rte", folder=tmp_path)["label"][:] == [1, 0]


def test_a_number_without_a_declared_name_is_refused(tmp_path):
    # There are two classes, but the file declares one.
    declared = datasets.Features({"label": ClassLabel(names=["negative"])}).arrow_schema.metadata
    pa.parquet.write_table(pa.table({"sentence": ["a"], "label": [1]}, metadata=declared), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="train.parquet has the label 1 in row 1, but sst2 has the labels"):
        load_glue("sst2", "train", tmp_path)


def test_whole_floats_are_numbers_of_classes(tmp_path):
    write(tmp_path / "train.csv", "sentence,label\na,1.0\nb,0.0\n")
    write(tmp_path / "dev.jsonl", '{"sentence": "a", "label": 1.0}')
    assert load_glue("sst2", "train", tmp_path)["label"][:] == [1, 0]
    assert load_glue("sst2", "validation", tmp_path)["label"][:] == [1]


def test_the_folder_of_one_task_and_files_without_header_are_read(tmp_path):
    write(tmp_path / "dev.tsv", "a fine film\t1\na bore\t0\n")
    write(tmp_path / "test.tsv", "a film\t1\n")
    assert load_glue("SST-2", "validation", tmp_path).to_list() == [
        {"text": "a fine film", "label": 1},
        {"text": "a bore", "label": 0},
    ]
    # Labels of a test set are not read, and rows without an index are counted.
    assert load_glue("sst2", "test", tmp_path).to_list() == [{"text": "a film", "index": 0}]


def test_files_may_be_compressed(tmp_path):
    write(tmp_path / "RTE" / "dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\tA b.\tB.\tentailment\n")
    path = tmp_path / "RTE" / "dev.tsv"
    (tmp_path / "RTE" / "dev.tsv.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ValueError, match="dev.tsv or .*dev.tsv.gz; keep only one of them"):
        find_glue_file("rte", "validation", tmp_path)
    path.unlink()
    assert load_glue("rte", "validation", tmp_path).to_list() == [{"text": "A b.", "text_pair": "B.", "label": 0}]


def test_the_index_of_a_test_set_is_its_own(tmp_path):
    write(tmp_path / "CoLA" / "test.tsv", "index\tsentence\r\n7\tOne.\r\n3\tTwo.\r\n")
    assert load_glue("cola", "test", tmp_path).to_list() == [
        {"text": "One.", "index": 7},
        {"text": "Two.", "index": 3},
    ]


def test_torn_rows_and_rows_without_agreed_label_are_left_out_with_a_warning(tmp_path, caplog):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    write(tmp_path / "QQP" / "train.tsv", header + "1\t2\t3\tWho?\tWho is\nit?\t0\n1\t2\t3\tWho?\tHe?\t1\n")
    assert load_glue("qqp", folder=tmp_path).to_list() == [{"text": "Who?", "text_pair": "He?", "label": 1}]
    write(tmp_path / "MNLI" / "train.tsv", "sentence1\tsentence2\tgold_label\na\tb\t-\nc\td\tneutral\n")
    assert load_glue("mnli", folder=tmp_path).to_list() == [{"text": "c", "text_pair": "d", "label": 1}]
    rows = re.compile(r"(\d of \d rows) of \S+ (.*) and are skipped\.")
    assert [rows.fullmatch(record.getMessage()).groups() for record in caplog.records] == [
        ("2 of 3 rows", "do not have 6 cells"),
        ("1 of 2 rows", "have no agreed label (-)"),
    ]


@pytest.mark.parametrize(
    ("task", "split", "files", "message"),
    [
        (
            "sst",
            "train",
            {},
            "task must be one of GLUE (cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli), got 'sst'",
        ),
        ("rte", "validation_matched", {}, "split 'validation_matched' is not one of rte: train, validation, test"),
        ("rte", "train", {}, "has no file of the train split of rte, such as RTE/train.tsv (or .jsonl"),
        ("mnli", "validation_matched", {"MNLI/train.tsv": "x"}, "such as MNLI/dev_matched.tsv"),
        ("mnli", "ax", {"test.tsv": "x"}, "no file of the ax split of mnli"),
        (
            "rte",
            "train",
            {"RTE/train.tsv": "index\tpremise\tsentence2\tlabel\n0\ta\tb\tentailment\n"},
            "has no column sentence1 for the texts of rte, only index, premise, sentence2, label",
        ),
        (
            "qqp",
            "train",
            {"QQP/train.tsv": "question1\tquestion2\na\tb\n"},
            "has no column label or is_duplicate for the labels of qqp",
        ),
        ("cola", "train", {"CoLA/train.tsv": "gj04\t1\tA.\n" * 2}, "has no column sentence for the texts of cola"),
        ("cola", "train", {"CoLA/train.tsv": "\n"}, "train.tsv is empty; leave it out"),
        ("sst2", "train", {"SST-2/train.tsv": "sentence\tlabel\n"}, "has no row"),
        (
            "rte",
            "train",
            {"RTE/train.tsv": "sentence1\tsentence2\tlabel\na\tb\tentailment\na\tb\tneutral\n"},
            "has the label 'neutral' in row 2, but rte has the labels entailment, not_entailment, or their ids",
        ),
        ("sst2", "train", {"SST-2/train.tsv": "a\t2\n"}, "has the label '2' in row 1, but sst2 has"),
        ("sst2", "train", {"SST-2/train.jsonl": '{"sentence": "a", "label": 0.5}'}, "has the label 0.5 in row 1"),
        ("sst2", "train", {"SST-2/train.csv": "sentence,label,Label\na,0,1\n"}, "columns label and Label, which"),
        ("sst2", "train", {"SST-2/train.tsv": "a\t-1\n"}, "has '-1' in row 1, a missing label"),
        ("sst2", "train", {"SST-2/train.jsonl": '{"sentence": "a", "label": -1}'}, "has -1 in row 1, a missing label"),
        ("sst2", "train", {"SST-2/train.jsonl": '{"sentence": 5, "label": 1}'}, "has 5 in row 1, not a string"),
        (
            "stsb",
            "train",
            {"STS-B/train.tsv": "sentence1\tsentence2\tscore\na\tb\t7\n"},
            "has the label '7' in row 1, but stsb has scores from 0 to 5",
        ),
        (
            "stsb",
            "train",
            {"STS-B/train.tsv": "sentence1\tsentence2\tscore\na\tb\tmuch\n"},
            "has the label 'much' in row 1",
        ),
        (
            "sst2",
            "test",
            {"SST-2/test.tsv": "index\tsentence\n0\ta\n1\n"},
            "row 3 must have 2 cells like the first row, got 1 in '1'",
        ),
        ("sst2", "test", {"SST-2/test.tsv": "index\tsentence\nx\ta\n"}, "column 'index' of"),
        ("sst2", "test", {"SST-2/test.jsonl": '{"sentence": "a", "idx": null}'}, "column 'idx' of"),
        (
            "stsb",
            "train",
            {"STS-B/train.jsonl": '{"sentence1": "a", "sentence2": "b", "score": [1]}'},
            "has the label [1] in row 1",
        ),
        (
            "sst2",
            "validation",
            {"SST-2/dev.tsv": "a\t1\n", "SST-2/validation.jsonl": "{}"},
            "the validation split of sst2 could be",
        ),
    ],
)
def test_what_can_not_be_read_is_told(task, split, files, message, tmp_path):
    for name, text in files.items():
        write(tmp_path / name, text)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_glue(task, split, tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere' does not exist"):
        find_glue_file("rte", "train", tmp_path / "nowhere")


@pytest.mark.parametrize("place", ["AX/AX.tsv", "ax/test.jsonl", "diagnostic/diagnostic.tsv"])
def test_the_diagnostic_test_set_has_a_folder_of_its_own(place, tmp_path):
    (tmp_path / "MNLI").mkdir()
    assert find_glue_file("mnli", "ax", tmp_path) is None
    path = write(tmp_path / place, "x")
    assert find_glue_file("mnli", "ax", tmp_path) == path


@pytest.mark.parametrize("name", ["sst2", "SST-2", "SST2"])
def test_a_task_is_found_by_name_and_title(name):
    assert glue_task(name) is GLUE_TASKS["sst2"]


@pytest.mark.parametrize(
    ("labels", "id2label", "order"),
    [
        (("a", "not_a"), {0: "NOT-A", 1: "A"}, ["not_a", "a"]),
        (("a", "not_a"), {"1": "a", "0": "not a"}, ["not_a", "a"]),
        (("a", "b"), {0: "LABEL_0", 1: "LABEL_1"}, ["a", "b"]),
        (("a", "b"), {0: "0", 1: "1"}, ["a", "b"]),
        (("a", "b"), {0: "b", 1: "c"}, None),
        (("a", "b"), {0: "a", 1: "b", 2: "c"}, None),
        ((), {0: "LABEL_0"}, []),
        ((), {0: "a", 1: "b"}, None),
    ],
)
def test_classes_are_put_in_the_order_of_the_model(labels, id2label, order):
    assert class_order(labels, id2label) == order


@pytest.mark.parametrize(
    ("task", "answers", "cells"),
    [
        ("sst2", [1, 0], ["1", "0"]),
        ("wnli", [1, 0], ["1", "0"]),
        ("mnli", [2, 0], ["contradiction", "entailment"]),
        ("rte", [1, 0], ["not_entailment", "entailment"]),
        ("stsb", [5.31, 2.34567], ["5.000", "2.346"]),
        ("stsb", [-0.2, 0], ["0.000", "0.000"]),
    ],
)
def test_answers_are_written_in_the_format_of_the_server(task, answers, cells, tmp_path):
    write_submission(tmp_path / "file.tsv", task, [4, 5], answers)
    assert (tmp_path / "file.tsv").read_text() == f"index\tprediction\n4\t{cells[0]}\n5\t{cells[1]}\n"


def test_answers_must_be_as_many_as_questions(tmp_path):
    with pytest.raises(ValueError, match="answers must have one value for each of 2 indices, got 1"):
        write_submission(tmp_path / "file.tsv", "rte", [0, 1], [0])


def test_the_sentences_of_sst2_are_read(real_data):
    folder = real_data / "sst2"
    sizes = {split: len(load_glue("sst2", split, folder)) for split in ("train", "validation", "test")}
    assert sizes == {"train": 6920, "validation": 872, "test": 1821}
