import gzip
import json
import random
import shutil
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_attn_dynamics import MaskedLanguageModelCollator
from hf_attn_dynamics.data import load_documents, sentence_pairs, split_sentences, train_byte_level_bpe


# Each sentence has a letter and a number that no other has. A token is a byte: five, and the space before it.
DOCUMENTS = [[f"{letter}{number}-{number}." for number in range(9)] for letter in "abcdef"] + [["g0-0."]]


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module", params=["roberta", "bert"])
def tokenizer(request):
    return train_byte_level_bpe(["a"], 261, request.param)


def as_documents(documents):
    return Dataset.from_dict({"sentences": documents})


def make(tokenizer, documents=DOCUMENTS, max_length=43, **options):
    return list(sentence_pairs(as_documents(documents), tokenizer, max_length, **options))


def sides(pair, tokenizer):
    """A and B as lists of sentences."""
    ids = pair["input_ids"]
    cut = ids.index(tokenizer.sep_token_id)
    return [tokenizer.decode(side).split() for side in (ids[1:cut], ids[cut + 1 : -1])]


def write(path, documents):
    if path.name.endswith(".jsonl"):
        path.write_text("".join(json.dumps({"text": "\n".join(lines)}) + "\n" for lines in documents))
        return str(path)
    content = "\n\n \n".join("\n".join(lines) for lines in documents).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four… five.", ["One.", "Two!", "Three?", "Four… five."]),
        ('He said "no." "Why?" (He knew.) Then', ['He said "no."', '"Why?"', "(He knew.)", "Then"]),
        ("Version 2.5 of p. 7, e.g. here", ["Version 2.5 of p. 7, e.g. here"]),
        ("Dr. Roe", ["Dr.", "Roe"]),
        ("ሰላም። እንዴት ነህ፧ ደህና", ["ሰላም።", "እንዴት ነህ፧", "ደህና"]),
        ("Élan. Öl", ["Élan.", "Öl"]),
        ("a line\r\n\n another ", ["a line", "another"]),
        (" \n", []),
    ],
)
def test_sentences_end_where_another_seems_to_begin(text, sentences):
    assert split_sentences(text) == sentences


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
@pytest.mark.parametrize("split_lines", [True, False])
def test_documents_are_runs_of_lines_or_rows(name, split_lines, tmp_path):
    path = write(tmp_path / name, [["One. Two.", "Three."], ["Four."]])
    first = ["One.", "Two.", "Three."] if split_lines else ["One. Two.", "Three."]
    documents = load_documents([path], split_lines=split_lines)
    assert documents["sentences"][:] == [first, ["Four."]]


def test_a_document_ends_with_its_file(tmp_path):
    paths = [write(tmp_path / name, [["One."]]) for name in ("a.txt", "b.txt")]
    assert load_documents(paths)["sentences"][:] == [["One."], ["One."]]


def test_rows_without_a_sentence_are_no_documents(tmp_path):
    Dataset.from_dict({"body": ["One.", " \n ", "Two."]}).to_parquet(tmp_path / "a.parquet")
    documents = load_documents([str(tmp_path / "a.parquet")], text_column="body")
    assert documents["sentences"][:] == [["One."], ["Two."]]


def test_files_are_checked_as_those_of_texts(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="a.txt is not in UTF-8"):
        load_documents([str(tmp_path / "a.txt")])
    with pytest.raises(ValueError, match="Pass either files or dataset_name"):
        load_documents(None)


def test_pairs_are_framed_and_typed(tokenizer):
    for pair in make(tokenizer):
        ids, types = pair["input_ids"], pair["token_type_ids"]
        assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert ids.count(tokenizer.sep_token_id) == 2
        cut = ids.index(tokenizer.sep_token_id) + 1
        assert types == [0] * cut + [1] * (len(ids) - cut)
        assert len(ids) <= 43


@pytest.mark.parametrize("seed", range(3))
def test_labels_say_whether_b_follows_a(tokenizer, seed):
    # Two documents fit: nothing is cut off.
    pairs = make(tokenizer, max_length=121, seed=seed)
    labels = Counter()
    for pair in pairs:
        a, b = sides(pair, tokenizer)
        if pair["next_sentence_label"] == 0:
            assert b[0][0] == a[-1][0]
            assert int(b[0][1]) == int(a[-1][1]) + 1
        else:
            assert b[0][0] != a[-1][0]
        labels[pair["next_sentence_label"]] += 1
    assert set(labels) == {0, 1}


@pytest.mark.parametrize("random_probability", [0.0, 0.5, 1.0])
def test_every_sentence_is_used_in_order(tokenizer, random_probability):
    pairs = make(tokenizer, max_length=121, random_probability=random_probability)
    used = []
    for pair in pairs:
        a, b = sides(pair, tokenizer)
        used += a if pair["next_sentence_label"] else a + b
    assert used == [sentence for document in DOCUMENTS for sentence in document]


def test_nothing_but_its_sentences_marks_a_random_b():
    tokenizer = train_byte_level_bpe([" a. b."], 270)
    texts = {tokenizer.decode(pair["input_ids"]) for pair in make(tokenizer, [["a.", "b."], ["a.", "b."]])}
    assert texts <= {f"<s> {a}.</s> {b}.</s>" for a in "ab" for b in ("a", "b", "a. b")}


def test_one_sentence_is_followed_by_another_document(tokenizer):
    pairs = make(tokenizer, [["a0-0."], ["b0-0."]], random_probability=0)
    assert [pair["next_sentence_label"] for pair in pairs] == [1, 1]
    assert [sides(pair, tokenizer) for pair in pairs] == [[["a0-0."], ["b0-0."]], [["b0-0."], ["a0-0."]]]


def test_long_sentences_are_cut_to_the_same_length_at_either_end(tokenizer):
    documents = [["".join(map(chr, range(97, 122))) * 4], ["0123456789" * 10]]
    pairs = make(tokenizer, documents, max_length=23)
    for pair, whole, other in zip(pairs, documents, documents[::-1], strict=True):
        a, b = (side[0] for side in sides(pair, tokenizer))
        assert len(a) == len(b) == 10
        assert a in whole[0]
        assert b in other[0]
    starts = {tuple(make(tokenizer, documents, 23, seed=seed)[0]["input_ids"]) for seed in range(8)}
    assert len(starts) > 1


def test_shares_of_random_and_short_pairs_are_as_asked(tokenizer):
    documents = [[f"{letter}{number % 10}-{number % 10}." for number in range(4000)] for letter in "ab"]
    pairs = make(tokenizer, documents, max_length=63, random_probability=0.3, short_probability=0.2)
    labels = [pair["next_sentence_label"] for pair in pairs]
    # A sentence has six tokens: of the 59 targets from 2 to 60, five gather but one, which is followed at random.
    assert np.mean(labels) == pytest.approx(0.3 + 0.7 * 0.2 * 5 / 59, abs=0.05)
    full = [len(pair["input_ids"]) == 63 for pair in pairs if pair["next_sentence_label"] == 0]
    assert np.mean(full) == pytest.approx(0.8, abs=0.06)


def test_pairs_depend_on_the_seed_alone(tokenizer):
    def global_state():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = global_state()
    first = make(tokenizer)
    assert global_state() == before
    shutil.rmtree(datasets.config.HF_DATASETS_CACHE)
    random.seed(1)
    np.random.seed(1)
    assert make(tokenizer) == first
    assert make(tokenizer, seed=1) != first


def test_bos_and_eos_serve_as_ends():
    other = train_byte_level_bpe(["a"], 261)
    other.cls_token = other.sep_token = None
    other.bos_token, other.eos_token = "<s>", "</s>"
    [first, _, _, middle, _, _, last] = make(other, [["a"], ["b"]])[0]["input_ids"]
    assert [first, middle, last] == [other.bos_token_id, other.eos_token_id, other.eos_token_id]


def test_the_collator_takes_pairs(tokenizer):
    pairs = make(tokenizer, max_length=60)
    batch = MaskedLanguageModelCollator(tokenizer)(pairs[:4])
    longest = max(len(pair["input_ids"]) for pair in pairs[:4])
    assert batch["token_type_ids"].shape == batch["labels"].shape == (4, longest)
    assert batch["next_sentence_label"].tolist() == [pair["next_sentence_label"] for pair in pairs[:4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 4}, "max_length must be at least 5.* got 4"),
        ({"short_probability": 1.1}, "short_probability must be between 0 and 1, got 1.1"),
        ({"random_probability": -0.1}, "random_probability must be between 0 and 1, got -0.1"),
        ({"documents": [["one", "two"]]}, "documents must have at least two .* got 1; separate .* by blank lines"),
        ({"documents": [["one", "two"], [], [""]]}, "documents must have at least two documents with text, got 1"),
    ],
)
def test_what_gives_no_pairs_is_refused(tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        make(tokenizer, **options)


def test_texts_are_no_documents(tokenizer):
    with pytest.raises(ValueError, match='documents has no column "sentences", only text; create it with'):
        sentence_pairs(Dataset.from_dict({"text": ["a"]}), tokenizer, 20)
