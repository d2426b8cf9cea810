import gzip
import json
import re

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from hf_attn_dynamics.data import load_parallel


PAIRS = [("Guten Tag!", "Hello!"), ("Größe", 'a "size"'), ("drei\u2028vier", "three four")]


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def pairs(dataset):
    assert dataset.column_names == ["source", "target"]
    return list(zip(dataset["source"], dataset["target"]))


def write_sides(folder, sources, targets, suffix=""):
    paths = []
    for name, lines in (("a.de", sources), ("a.en", targets)):
        content = ("\n".join(lines) + "\n").encode()
        path = folder / (name + suffix)
        path.write_bytes(gzip.compress(content) if suffix == ".gz" else content)
        paths.append(path)
    return paths


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_are_aligned_also_if_they_hold_other_separators(suffix, tmp_path):
    assert pairs(load_parallel(*write_sides(tmp_path, *zip(*PAIRS), suffix))) == PAIRS


def test_sides_and_tables_may_be_in_another_encoding(tmp_path):
    for name, content in (
        ("a.train.de", "Größe\n"),
        ("a.train.it", "più\n"),
        ("a.tsv", "source\ttarget\nGröße\tpiù\n"),
    ):
        (tmp_path / name).write_text(content, encoding="latin-1")
    sides = tmp_path / "a.train.de", tmp_path / "a.train.it"
    assert pairs(load_parallel(*sides, encoding="latin-1")) == [("Größe", "più")]
    assert pairs(load_parallel(tmp_path / "a.tsv", encoding="latin-1")) == [("Größe", "più")]


def test_several_files_follow_each_other(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    first = write_sides(tmp_path / "1", ["a"], ["b"])
    second = write_sides(tmp_path / "2", ["c"], ["d"])
    assert pairs(load_parallel([first[0], str(second[0])], [first[1], str(second[1])])) == [("a", "b"), ("c", "d")]


def test_pairs_with_a_blank_side_are_dropped_together(tmp_path, caplog):
    sides = write_sides(tmp_path, ["a", "", "  ", "d"], ["b", "", "x", " e\r"])
    assert pairs(load_parallel(*sides)) == [("a", "b"), ("d", "e")]
    assert "2 pairs with a blank side were skipped" in caplog.text


def test_marks_and_ends_of_lines_are_no_text(tmp_path):
    (tmp_path / "a.de").write_bytes("\ufeffa\r\nb".encode())
    (tmp_path / "a.en").write_bytes(b"c\nd\n")
    assert pairs(load_parallel(tmp_path / "a.de", tmp_path / "a.en")) == [("a", "c"), ("b", "d")]


def test_another_number_of_lines_is_an_error_with_both(tmp_path):
    source, target = write_sides(tmp_path, ["a", "b", "c"], ["a", "b"])
    message = f"{source} has 3 lines and {target} 2; they must be aligned by line"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_parallel(source, target)


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "json", "parquet"])
def test_tables_hold_both_sides(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    records = [{"id": 1, "source": source, "target": target} for source, target in PAIRS]
    if kind in ("tsv", "csv"):
        mark = "\t" if kind == "tsv" else ","
        quoted = PAIRS if kind == "tsv" else [[cell.replace('"', '""').join('""') for cell in pair] for pair in PAIRS]
        lines = ["id" + mark + mark.join(("source", "target")), *("1" + mark + mark.join(pair) for pair in quoted)]
        path.write_text("\n".join(lines), encoding="utf-8")
    elif kind == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(records), path)
    else:
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        path.write_text("\n".join(lines) if kind == "jsonl" else f"[{','.join(lines)}]", encoding="utf-8")
    assert pairs(load_parallel(path)) == PAIRS


def test_columns_can_be_named_or_counted(tmp_path):
    (tmp_path / "named.tsv").write_text("en\tde\nb\ta\n")
    (tmp_path / "bare.tsv").write_text("b\ta\nd\tc\n")
    assert pairs(load_parallel(tmp_path / "named.tsv", None, "de", "en")) == [("a", "b")]
    assert pairs(load_parallel(tmp_path / "bare.tsv", None, 1, 0)) == [("a", "b"), ("c", "d")]


def test_dictionaries_of_translations_are_opened(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"translation": {"de": "a", "en": "b"}}\n{"translation": {"de": "c", "en": "d"}}\n')
    assert pairs(load_parallel(path, None, "de", "en")) == [("a", "b"), ("c", "d")]
    with pytest.raises(ValueError, match="target_column 'fr' of .*a.jsonl has None in row 1, not a string"):
        load_parallel(path, None, "de", "fr")


def test_a_named_data_set_gives_its_columns(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"de": "a", "en": "b"}\n')
    assert pairs(load_parallel(None, None, "de", "en", dataset_name=str(tmp_path))) == [("a", "b")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"", "a.tsv is empty"),
        ("a.tsv", b"source\ttarget\n", "a.tsv has no row"),
        ("a.tsv", b"source\ttarget\na\tb\na\n", "a.tsv cannot be read as .tsv: row 3 must have 2 cells"),
        ("a.tsv", b"de\ten\na\tb\n", "has no columns source and target, only de, en; pass source_column"),
        ("a.csv", b"source,target\nGr\xf6\xdfe,b\n", "not in UTF-8: byte 0xf6 at position 16, in line 2; convert it"),
        ("a.jsonl", b'{"source": "a", "target": 3}', "target_column 'target' of .* has 3 in row 1, not a string"),
        (
            "a.jsonl",
            b'{"source": "a", "target": "b"}\n{"source": "a"}',
            "record 2 of .* needs 'target', which it lacks; it has source",
        ),
        ("a.jsonl", b'{"source": ', "a.jsonl cannot be read as .jsonl"),
        ("a.tsv", b"source\ttarget\n\t\n \ta\n", "one side of every pair is blank"),
        ("a.txt", b"a\n", "a.txt has an unsupported suffix; supported are .jsonl"),
    ],
)
def test_a_bad_table_is_an_error_that_names_it(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_parallel(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "suffix", "message"),
    [
        (b"", "", "source_files: .*a.x is empty"),
        (b" \n\n", "", "source_files: .*a.x is empty"),
        (b"a\n\xefbc", "", "a.x is not in UTF-8: byte 0xef at position 2, in line 2"),
        (b"\xef\xbb\xbfa\n\xefbc", "", "a.x is not in UTF-8: byte 0xef at position 5, in line 2"),
        (b"plain", ".gz", "a.x.gz cannot be read as .gz"),
        (gzip.compress(b"a\n" * 99, mtime=0)[:-9], ".gz", "a.x.gz cannot be read as .gz"),
    ],
)
def test_a_bad_file_of_lines_is_an_error_that_names_it(content, suffix, message, tmp_path):
    path = tmp_path / f"a.x{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_parallel(path, path)


def test_a_missing_file_is_an_error(tmp_path):
    path = write_sides(tmp_path, ["a"], ["b"])[0]
    with pytest.raises(FileNotFoundError, match="target_files: .*missing is not a file"):
        load_parallel(path, tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="files: .*missing.tsv is not a file"):
        load_parallel(tmp_path / "missing.tsv")


def test_another_number_of_files_is_an_error(tmp_path):
    source, target = write_sides(tmp_path, ["a"], ["b"])
    with pytest.raises(ValueError, match="source_files and target_files must correspond, got 2 and 1 files"):
        load_parallel([source, source], [target])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Pass either files or dataset_name"),
        ({"target_files": "a"}, "source_files must have one file for each file of the other side, got None"),
        ({"source_files": "a", "dataset_name": "b"}, "Pass either files or dataset_name"),
        ({"source_files": "a", "split": "test"}, "split='test' need dataset_name"),
        (
            {"source_files": "a", "target_files": "b", "source_column": "c", "split": "d"},
            "source_column, split cannot be combined with target_files",
        ),
        ({"source_files": "a", "source_column": "c"}, "source_column is 'c' and target_column None; pass two"),
        ({"source_files": "a", "source_column": "c", "target_column": "c"}, "pass two different columns"),
        ({"source_files": "a", "source_column": "c", "target_column": 1}, "pass names for files with a header, or"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_parallel(**arguments)


def test_multi30k_is_aligned(real_data):
    folder = real_data / "multi30k-de-en"
    dataset = load_parallel(folder / "val.de.gz", folder / "val.en.gz")
    assert len(dataset) == 1014
    assert dataset[0] == {
        "source": "Eine Gruppe von Männern lädt Baumwolle auf einen Lastwagen",
        "target": "A group of men are loading cotton onto a truck",
    }
