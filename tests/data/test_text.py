import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, IterableDataset

from hf_attn_dynamics.data import load_classification, load_texts, pack_blocks, pad_sentences, train_byte_level_bpe


TEXTS = ["One text.", 'Two, "quoted" text', "Drei Größen: 数 🙂"]


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module", params=["roberta", "bert"])
def tokenizer(request):
    return train_byte_level_bpe(["one text and another text of some length"] * 2, 280, request.param)


def write(path, texts=TEXTS, column="text"):
    records = [{"label": 1, column: text} for text in texts]
    name = path.name.lower()
    if name.endswith(".txt"):
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress("\n\n".join(texts).encode()))
    elif name.endswith(".json"):
        path.write_text(json.dumps(records), encoding="utf-8")
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    elif name.endswith(".csv"):
        rows = ['1,"' + text.replace('"', '""') + '"' for text in texts]
        path.write_text("\n".join([f"label,{column}", *rows]) + "\n", encoding="utf-8")
    elif name.endswith(".tsv"):
        path.write_text("\n".join([f"label\t{column}", *(f"1\t{text}" for text in texts)]) + "\n", encoding="utf-8")
    else:
        pa.parquet.write_table(pa.Table.from_pylist(records), path)
    return str(path)


def read(*files, **options):
    return list(load_texts(list(files), None, **options)["text"])


def slow_blocks(texts, tokenizer, block_size):
    stream = []
    for number, text in enumerate(texts):
        if number > 0:
            stream.append(tokenizer.sep_token_id)
        stream.extend(tokenizer(text, add_special_tokens=False)["input_ids"])
    inner = block_size - 2
    pieces = [stream[i * inner : (i + 1) * inner] for i in range(len(stream) // inner)]
    return [[tokenizer.cls_token_id] + piece + [tokenizer.sep_token_id] for piece in pieces]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.json", "a.jsonl", "a.csv", "a.tsv", "a.parquet", "A.TXT"])
def test_every_kind_of_file_gives_its_texts(name, streaming, tmp_path):
    dataset = load_texts([write(tmp_path / name)], None, streaming=streaming)
    assert isinstance(dataset, IterableDataset if streaming else Dataset)
    assert dataset.column_names == ["text"]
    assert [example["text"] for example in dataset] == TEXTS


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.parquet"])
def test_another_column_can_hold_the_texts(name, tmp_path):
    assert read(write(tmp_path / name, column="sentence"), text_column="sentence") == TEXTS


def test_a_json_file_may_have_one_object_a_line(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert read(str(tmp_path / "a.json")) == ["a", "b"]


def test_numbers_in_a_csv_are_texts_too(tmp_path):
    (tmp_path / "a.csv").write_text("text,n\n12,1\n1.50,x\nnull,2\n")
    assert read(str(tmp_path / "a.csv")) == ["12", "1.50", "null"]


def test_quotes_in_a_tsv_mean_nothing(tmp_path):
    (tmp_path / "a.tsv").write_text('text\tlabel\n"open\t1\n5" screen\t0\n')
    assert read(str(tmp_path / "a.tsv")) == ['"open', '5" screen']


def test_a_quoted_cell_of_a_csv_may_run_over_lines(tmp_path):
    (tmp_path / "a.csv").write_text('text\n"one\ntwo"\n')
    assert read(str(tmp_path / "a.csv")) == ["one\ntwo"]


def test_blank_lines_and_byte_order_marks_are_dropped(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffa\r\n\r\n   \r\nb".encode())
    (tmp_path / "b.csv").write_bytes("\ufefftext\nc\n".encode())
    (tmp_path / "c.csv").write_bytes("\ufeff\r\n \ntext,n\nd,1\n".encode())
    assert read(*(str(tmp_path / name) for name in ("a.txt", "b.csv", "c.csv"))) == ["a", "b", "c", "d"]


def test_folders_patterns_and_files_mix_and_repeat_nothing(tmp_path):
    (tmp_path / "sub").mkdir()
    first = write(tmp_path / "z.txt", ["z"])
    write(tmp_path / "sub" / "b.csv", ["b"])
    write(tmp_path / "sub" / "a.jsonl", ["a"])
    (tmp_path / "sub" / "notes.md").write_text("not read")
    assert read(first, str(tmp_path)) == ["z", "a", "b"]
    assert read(str(tmp_path / "**" / "*.csv"), str(tmp_path / "s*" / "a.*")) == ["b", "a"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_changed_file_is_read_again(streaming, tmp_path):
    path = write(tmp_path / "a.txt", ["old"])
    assert [example["text"] for example in load_texts([path], None, streaming=streaming)] == ["old"]
    status = os.stat(path)
    write(tmp_path / "a.txt", ["new"])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert [example["text"] for example in load_texts([path], None, streaming=streaming)] == ["new"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_named_data_set_gives_its_column(streaming, tmp_path):
    write(tmp_path / "train.jsonl", column="sentence")
    dataset = load_texts(None, str(tmp_path), text_column="sentence", streaming=streaming)
    assert list(dataset) == [{"text": text} for text in TEXTS]


@pytest.mark.parametrize("streaming", [False, True])
def test_blank_rows_of_a_named_data_set_are_left_out_as_those_of_files_are(streaming, tmp_path):
    pa.parquet.write_table(pa.table({"text": ["one", "", None, " \n", "two"]}), tmp_path / "train.parquet")
    dataset = load_texts(None, str(tmp_path), streaming=streaming)
    assert list(dataset) == [{"text": "one"}, {"text": "two"}]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_named_data_set_without_the_column_says_which_there_are(streaming, tmp_path):
    write(tmp_path / "train.jsonl", column="sentence")
    with pytest.raises(ValueError, match="text_column 'text' is not a column of .*choose one of label, sentence"):
        load_texts(None, str(tmp_path), streaming=streaming)


def test_a_named_data_set_with_numbers_as_texts_is_an_error(tmp_path):
    write(tmp_path / "train.jsonl")
    with pytest.raises(ValueError, match="text_column 'label' of .* not strings"):
        load_texts(None, str(tmp_path), text_column="label")


@pytest.mark.parametrize(("files", "name"), [(None, None), ([], None), ([], ""), (["a.txt"], "b")])
def test_files_and_a_name_exclude_each_other(files, name):
    with pytest.raises(ValueError, match="Pass either files or dataset_name"):
        load_texts(files, name)


def test_a_split_of_files_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="split='test' need dataset_name"):
        read(write(tmp_path / "a.txt"), split="test")


@pytest.mark.parametrize("pattern", ["missing.txt", "*.csv"])
def test_a_missing_file_is_an_error(pattern, tmp_path):
    with pytest.raises(
        FileNotFoundError, match="files: .* is not a file or folder, and no file matches it as a pattern"
    ):
        read(str(tmp_path / pattern))


def test_a_folder_without_texts_is_an_error(tmp_path):
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(
        ValueError,
        match=r"the folder .* has no supported files \(.txt, .jsonl, .json, .csv, .tsv, .parquet, each also as .gz",
    ):
        read(str(tmp_path))


@pytest.mark.parametrize(("name", "pattern"), [("a.train.it", "*.it"), ("a", "*"), ("a.md.gz", "a.md.gz")])
def test_a_file_named_with_another_suffix_is_plain_text(name, pattern, tmp_path):
    content = b"eins\nzwei\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(str(tmp_path / name)) == read(tmp_path / pattern) == ["eins", "zwei"]


def test_files_that_only_a_star_matches_are_not_taken_for_text(tmp_path):
    write(tmp_path / "a.txt")
    (tmp_path / "notes.md").write_text("not read")
    with pytest.raises(ValueError, match="notes.md has an unsupported suffix; supported are .txt"):
        read(str(tmp_path / "*"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.parquet"])
def test_every_table_may_be_compressed(name, streaming, tmp_path):
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(Path(write(tmp_path / name)).read_bytes()))
    assert [example["text"] for example in load_texts(path, None, streaming=streaming)] == TEXTS
    rows = load_classification(path)
    assert rows["text"][:] == TEXTS
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=f"{name}.gz cannot be read as "):
        read(path)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_positions_say_that_a_table_has_no_header(name, tmp_path):
    content = ("1,one\n0,two\n" if "csv" in name else "1\tone\n0\ttwo\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for column in (1, -1):
        assert read(tmp_path / name, text_column=column) == ["one", "two"]
    with pytest.raises(ValueError, match="text_column 2 is not a column of .*; choose one of 0, 1"):
        read(tmp_path / name, text_column=2)
    with pytest.raises(ValueError, match="columns of a .jsonl file have names; pass them"):
        read(write(tmp_path / "a.jsonl"), text_column=0)


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.jsonl", "a.json"])
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_another_encoding_can_be_named(name, encoding, tmp_path):
    path = Path(write(tmp_path / name, ["Größe", "b"]))
    text = path.read_text(encoding="utf-8").replace("\\u00f6", "ö").replace("\\u00df", "ß")
    path.write_bytes(text.encode(encoding))
    assert read(path, encoding=encoding) == ["Größe", "b"]
    with pytest.raises(
        ValueError, match=f"{name} is not in UTF-8: byte 0x.. at position .*, in line .; convert it or"
    ):
        read(path)
    with pytest.raises(ValueError, match="encoding must be one of Python's, .* got 'klingon'"):
        read(path, encoding="klingon")


def test_a_cell_of_a_csv_may_be_longer_than_python_allows_by_itself(tmp_path):
    (tmp_path / "a.csv").write_text(f"text\n{'long ' * 30000}\n")
    assert read(tmp_path / "a.csv") == ["long " * 30000]


def test_a_quote_that_is_not_closed_is_an_error(tmp_path):
    (tmp_path / "a.csv").write_text('label,text\n1,"one"\n2,"two\n3,three\n')
    with pytest.raises(ValueError, match="a.csv cannot be read as .csv: row 3 opens a quote and does not close it"):
        read(tmp_path / "a.csv")


@pytest.mark.parametrize(
    "content",
    [
        '{"sst2": [{"text": "a"}, {"text": "b"}]}',
        '{"version": "1.0",\n "sst2": [{"text": "a"}]}',
        '{\n  "text": "a"\n}\n',
    ],
)
def test_an_object_that_holds_the_records_is_not_taken_for_one(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(
        ValueError, match="a.json must be an array of objects, got an object; .* from one of its keys, (sst2|ver|te)"
    ):
        read(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b""),
        ("a.txt", b"\n \n"),
        ("a.txt.gz", gzip.compress(b"", mtime=0)),
        ("a.json", b"[]"),
        ("a.jsonl", b"\n"),
        ("a.csv", b"text,label\n"),
        ("a.tsv", b""),
        ("a.tsv", b"\n \n"),
    ],
)
def test_an_empty_file_is_an_error_before_others_are_read(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="is empty; leave it out"):
        load_texts([write(tmp_path / "0.txt"), str(tmp_path / name)], None, streaming=True)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.parquet"])
def test_a_missing_column_is_an_error_that_lists_the_columns(name, tmp_path):
    path = write(tmp_path / name, column="sentence")
    with pytest.raises(ValueError, match="text_column 'text' is not a column of .*choose one of label, sentence"):
        load_texts([write(tmp_path / "0.txt"), path], None, streaming=True)


@pytest.mark.parametrize("load", [read, load_classification])
def test_a_broken_line_of_json_is_named(load, tmp_path):
    records = [json.dumps({"text": "a", "label": "x"})] * 3
    (tmp_path / "a.jsonl").write_text("\n".join([*records[:2], "", records[2][:-3], *records]))
    with pytest.raises(ValueError, match="a.jsonl cannot be read as .jsonl: Unterminated .* in line 4, column 24"):
        load(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.csv", "a.tsv", "a.jsonl"])
def test_another_encoding_is_an_error_that_names_the_file(name, tmp_path):
    path = tmp_path / name
    lines = ["text", *["plain"] * 20000, "Größe"] if name[2:] != "jsonl" else ['{"text": "a"}', '{"text": "Größe"}']
    content = "\n".join(lines).encode("latin-1")
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(ValueError, match=f"files: .*{name} .*(UTF-8|UTF8)"):
        read(str(path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n'),
        ("a.txt.gz", b"plain"),
        ("a.parquet", b"plain"),
        ("a.csv", b"text,n\na\n"),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"files: .*{name} cannot be read as "):
        read(str(tmp_path / name))


@pytest.mark.parametrize("cell", [None, 3, ["a"]])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
def test_a_cell_that_is_no_string_is_an_error_that_names_the_file(name, cell, tmp_path):
    path = write(tmp_path / name, [cell] if name == "a.parquet" else ["a", cell])
    with pytest.raises(ValueError, match=f"text_column 'text' of .*{name} has .* in row ., not a string"):
        read(path)


def test_a_line_of_json_that_is_no_object_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n["b"]\n')
    with pytest.raises(ValueError, match="a.jsonl has list as record 2, not a JSON object"):
        read(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("block_size", [3, 7, 64])
def test_blocks_are_those_of_one_list_of_all_tokens(block_size, streaming, tokenizer):
    texts = ["one text", "", "another " * 50, "x", *["text of some length"] * 1100]
    dataset = Dataset.from_dict({"text": texts})
    blocks = list(pack_blocks(dataset.to_iterable_dataset() if streaming else dataset, tokenizer, block_size))
    assert [block["input_ids"] for block in blocks] == slow_blocks(texts, tokenizer, block_size)
    assert all(block["attention_mask"] == [1] * block_size for block in blocks)


def test_blocks_of_a_selection_follow_its_order(tokenizer):
    texts = [f"text {number} of some length" for number in range(40)]
    order = list(range(39, 3, -2))
    blocks = pack_blocks(Dataset.from_dict({"text": texts}).select(order), tokenizer, 9)
    assert list(blocks["input_ids"]) == slow_blocks([texts[number] for number in order], tokenizer, 9)


def test_blocks_do_not_depend_on_processes(tokenizer):
    dataset = Dataset.from_dict({"text": [f"text {number} of some length" for number in range(50)]})
    assert pack_blocks(dataset, tokenizer, 8, num_proc=2).to_list() == pack_blocks(dataset, tokenizer, 8).to_list()


def test_blocks_of_other_texts_are_not_taken_from_the_cache(tokenizer, tmp_path):
    for texts in (["one text of some length"] * 9, ["another text of some length"] * 9):
        dataset = load_texts([write(tmp_path / "a.txt", texts)], None)
        assert list(pack_blocks(dataset, tokenizer, 6)["input_ids"]) == slow_blocks(texts, tokenizer, 6)


def test_blocks_of_a_stream_of_files_can_be_read_twice(tokenizer, tmp_path):
    dataset = load_texts([write(tmp_path / "a.txt")], None, streaming=True)
    blocks = pack_blocks(dataset, tokenizer, 5)
    assert [b["input_ids"] for b in blocks] == [b["input_ids"] for b in blocks] == slow_blocks(TEXTS, tokenizer, 5)


def test_columns_are_stored_small(tokenizer):
    dataset = Dataset.from_dict({"text": TEXTS})
    for encoded in (pack_blocks(dataset, tokenizer, 5), pad_sentences(dataset, tokenizer, 5)):
        assert encoded.column_names == ["input_ids", "attention_mask"]
        assert [encoded.features[name].feature.dtype for name in encoded.column_names] == ["int32", "int8"]


@pytest.mark.parametrize("streaming", [False, True])
def test_texts_shorter_than_a_block_are_an_error(streaming):
    tokenizer = train_byte_level_bpe(["x"], 261)
    dataset = Dataset.from_dict({"text": ["abc", "de"]})
    with pytest.raises(ValueError, match="block_size=9 needs 7 tokens of text, but all texts have 6 tokens"):
        list(pack_blocks(dataset.to_iterable_dataset() if streaming else dataset, tokenizer, 9))
    assert len(pack_blocks(dataset, tokenizer, 8)) == 1


def test_a_block_without_room_for_text_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="block_size must be at least 3 .* got 2"):
        pack_blocks(Dataset.from_dict({"text": TEXTS}), tokenizer, 2)


def test_a_tokenizer_without_ends_is_an_error():
    tokenizer = train_byte_level_bpe(["x"], 261, "bert")
    tokenizer.cls_token = None
    with pytest.raises(ValueError, match="tokenizer needs a cls_token or bos_token"):
        pack_blocks(Dataset.from_dict({"text": TEXTS}), tokenizer, 8)


def test_processes_for_a_stream_are_an_error(tokenizer):
    stream = Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()
    with pytest.raises(ValueError, match="num_proc=2 has no effect on a stream"):
        pack_blocks(stream, tokenizer, 8, num_proc=2)


@pytest.mark.parametrize("streaming", [False, True])
def test_sentences_are_framed_and_cut(streaming, tokenizer):
    dataset = Dataset.from_dict({"text": ["", "ab", "qwertz" * 10]})
    examples = list(pad_sentences(dataset.to_iterable_dataset() if streaming else dataset, tokenizer, 6))
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in dataset["text"]]
    assert [example["input_ids"] for example in examples] == [[first, *ids[:4], last] for ids in plain]
    assert [example["attention_mask"] for example in examples] == [[1] * min(len(ids) + 2, 6) for ids in plain]


def test_sentences_without_room_for_text_are_an_error(tokenizer):
    with pytest.raises(ValueError, match="max_length must be greater than the number of special tokens, 2, got 2"):
        pad_sentences(Dataset.from_dict({"text": TEXTS}), tokenizer, 2)


def test_importing_the_readers_does_not_import_torch_by_itself():
    code = """
import sys, datasets
from transformers import PreTrainedTokenizerFast, RobertaTokenizer
before = "torch" in sys.modules
import hf_attn_dynamics.data
sys.exit(before != ("torch" in sys.modules))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
