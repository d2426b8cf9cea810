# Licensed under the Apache License, Version 2.0.
"""Words of texts, their ids, vectors and classes."""

import gzip

import numpy as np
import pytest
from transformers import AutoTokenizer

from hf_attn_dynamics.data import load_class_files, load_word_vectors, train_word_tokenizer


TEXTS = ["The film's state-of-the-art plot did n't work .", "the film, THE plot: It's 'fun'!", "film"]


def tokens(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def test_texts_are_split_into_words_in_lower_case():
    tokenizer = train_word_tokenizer(TEXTS, min_count=1)
    expected = ["the", "film's", "state-of-the-art", "plot", "did", "n't", "work", "."]
    assert tokens(tokenizer, TEXTS[0]) == expected
    # A quotation mark before a word may be that of a contraction.
    assert tokens(tokenizer, TEXTS[1]) == ["the", "film", ",", "the", "plot", ":", "it's", "'fun", "'", "!"]
    assert tokens(tokenizer, "") == []


def test_texts_that_are_split_already_stay_so():
    words = ["it", "'s", "a", "film", "you", "'ve", "got", "to", "see", ",", "wo", "n't", "you", "?", "9", "10"]
    assert tokens(train_word_tokenizer([" ".join(words)], min_count=1), " ".join(words)) == words


def test_words_are_ordered_by_frequency_and_rare_ones_are_unknown():
    tokenizer = train_word_tokenizer(TEXTS, min_count=2)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    assert vocabulary == ["<pad>", "<unk>", "the", "film", "plot"]
    assert tokens(tokenizer, "The film fails") == ["the", "film", "<unk>"]
    assert train_word_tokenizer(TEXTS, min_count=2, vocab_size=4).get_vocab().keys() == {
        "<pad>",
        "<unk>",
        "the",
        "film",
    }
    assert tokenizer.pad_token_id == 0


def test_a_tokenizer_is_saved_and_loaded(tmp_path):
    tokenizer = train_word_tokenizer(TEXTS, min_count=1)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    batch = loaded(TEXTS, padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"][2][-1] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"texts": "the film"}, "texts must be a list of strings, got a string"),
        ({"min_count": 0}, "min_count must be at least 1, got 0"),
        ({"min_count": 9}, "no word of the texts occurs min_count=9 times"),
        ({"min_count": 2, "vocab_size": 2}, "vocab_size must be at least 3 for <pad>, <unk> and a word, got 2"),
    ],
)
def test_vocabularies_that_texts_do_not_support_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        train_word_tokenizer(**{"texts": TEXTS, **arguments})


def test_the_size_of_a_vocabulary_is_the_largest_that_it_may_have(caplog):
    tokenizer = train_word_tokenizer(TEXTS, min_count=2, vocab_size=3000)
    assert tokenizer.get_vocab() == train_word_tokenizer(TEXTS, min_count=2).get_vocab()
    [record] = caplog.records
    assert "only give 5 tokens instead of vocab_size=3000; lower min_count" in record.getMessage()


def write_vectors(folder, kind):
    words, vectors = ["the", "film", "plot"], np.arange(6, dtype=np.float32).reshape(3, 2) / 4
    if kind == "npz":
        path = folder / "vectors.npz"
        np.savez(path, words=np.array(words), vectors=vectors.astype(np.float16))
        return path
    lines = [f"{word} {a} {b}" for word, (a, b) in zip(words, vectors)]
    text = "\n".join((["3 2"] if kind == "word2vec" else []) + lines) + "\n"
    path = folder / ("vectors.txt.gz" if kind == "gz" else "vectors.txt")
    path.write_bytes(gzip.compress(text.encode()) if kind == "gz" else text.encode())
    return path


@pytest.mark.parametrize("kind", ["npz", "txt", "gz", "word2vec"])
def test_vectors_are_read_of_those_words_that_are_wanted(tmp_path, kind):
    vectors = load_word_vectors(write_vectors(tmp_path, kind), ["plot", "the", "unheard"])
    assert {word: vector.tolist() for word, vector in vectors.items()} == {"the": [0, 0.25], "plot": [1, 1.25]}
    assert {vector.dtype for vector in vectors.values()} == {np.dtype("float32")}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "the 1 2\nfilm 3\n", "a.txt, line 2: 1 numbers, but 2 in preceding lines"),
        ("a.txt", "the 1 2\nfilm 3 4 5\n", "a.txt, line 2: 3 numbers, but 2 in preceding lines"),
        ("a.txt", "the 1 x\n", "a.txt, line 1 must have a word and 2 numbers"),
        ("a.txt", "THE 1 2\n", "a.txt has none of the 2 words"),
        ("a.txt", "the 1 nan\n", "a.txt has a non-finite value in the vector of 'the'"),
        ("a.npz", "no archive", "a.npz must be a file with the arrays words and vectors"),
        ("a.npz", "", "a.npz must be a file with the arrays words and vectors"),
    ],
)
def test_files_without_vectors_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_word_vectors(tmp_path / name, ["the", "film"])


def test_words_may_have_spaces(tmp_path):
    (tmp_path / "a.txt").write_text("the 1 2\n. . . 3 4\nat name@domain.com 5 6\n")
    vectors = load_word_vectors(tmp_path / "a.txt", ["the", ". . .", "at name@domain.com"])
    assert [vector.tolist() for vector in vectors.values()] == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("words", "vectors"),
    [(["the"], np.ones((2, 1))), (["the"], np.ones(1)), ([["the"]], np.ones((1, 1))), (["the"], np.array([["1"]]))],
)
def test_arrays_that_are_no_vectors_of_words_are_refused(words, vectors, tmp_path):
    np.savez(tmp_path / "a.npz", words=np.array(words), vectors=vectors)
    with pytest.raises(ValueError, match="a.npz must have a row of numbers for each word, got words of shape"):
        load_word_vectors(tmp_path / "a.npz", ["the"])


def test_real_vectors_have_their_words(real_data):
    vectors = load_word_vectors(real_data / "glove-6b-50d-top30k" / "glove30k_f16.npz", ["good", "bad", "xqzzy"])
    assert {word: vector.shape for word, vector in vectors.items()} == {"good": (50,), "bad": (50,)}


def test_texts_come_from_a_file_or_a_folder_a_class(tmp_path):
    (tmp_path / "good").mkdir()
    for name, text in (("b", "a solid\n  film"), ("a", "fun"), ("c", "\n")):
        (tmp_path / "good" / f"{name}.txt").write_text(text)
    (tmp_path / "bad.neg").write_text("a mess\n\n stupid\n")
    texts = load_class_files({"bad": tmp_path / "bad.neg", "good": tmp_path / "good"})
    assert texts["text"][:] == ["a mess", "stupid", "fun", "a solid film"]
    assert texts["label"][:] == [0, 0, 1, 1]
    assert texts.features["label"].names == ["bad", "good"]


def test_the_files_of_a_class_need_no_suffix_and_may_be_in_another_encoding(tmp_path):
    (tmp_path / "sci").mkdir()
    for name, text in (("51060", "Größe"), ("00001.7848dde1", "b"), (".DS_Store", "no text")):
        (tmp_path / "sci" / name).write_text(text, encoding="latin-1")
    (tmp_path / "rec.txt.gz").write_bytes(gzip.compress("Fuß\n".encode("latin-1")))
    paths = {"sci": tmp_path / "sci", "rec": tmp_path / "rec.txt.gz"}
    assert load_class_files(paths, encoding="latin-1")["text"][:] == ["b", "Größe", "Fuß"]
    with pytest.raises(
        ValueError, match="51060 is not in UTF-8: byte 0xf6 at position 2, in line 1; convert it or pass"
    ):
        load_class_files(paths)


def test_classes_without_texts_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "folder").mkdir()
    for path in ("empty.txt", "folder"):
        with pytest.raises(ValueError, match=f"class bad: .*{path} has no texts"):
            load_class_files({"bad": tmp_path / path})
    with pytest.raises(FileNotFoundError, match="class bad: .* does not exist"):
        load_class_files({"bad": tmp_path / "nowhere"})
