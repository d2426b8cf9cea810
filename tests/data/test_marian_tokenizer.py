import json
import re

import pytest
from fresh_processes import python
from transformers import AutoTokenizer, MarianTokenizer

from hf_attn_dynamics.data import numeral_pairs, train_marian_tokenizer


SIZE = 90
GERMAN, ENGLISH = map(list, zip(*numeral_pairs(400)))
FILES = ["source.spm", "target.spm", "tokenizer_config.json", "vocab.json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("marian")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return train_marian_tokenizer(GERMAN, ENGLISH, SIZE, folder)


def test_ids_are_those_of_marian(tokenizer):
    assert isinstance(tokenizer, MarianTokenizer)
    assert len(tokenizer) == SIZE
    assert sorted(tokenizer.get_vocab().values()) == list(range(SIZE))
    assert tokenizer.convert_tokens_to_ids(["</s>", "<unk>", "<pad>"]) == [0, 1, SIZE - 1]
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id) == (0, 1, SIZE - 1)


def test_texts_of_both_sides_come_back_from_their_tokens(tokenizer):
    for texts, encoded in ((GERMAN, tokenizer(GERMAN)), (ENGLISH, tokenizer(text_target=ENGLISH))):
        assert tokenizer.batch_decode(encoded.input_ids, skip_special_tokens=True) == texts
        assert all(ids[-1] == 0 and 1 not in ids for ids in encoded.input_ids)


def test_texts_are_not_normalized(tmp_path):
    texts = ["ein  Wort", "„½ ﬁ…“ e\u0301"]
    tokenizer = train_marian_tokenizer(texts, ["a word"], 22, tmp_path)
    assert tokenizer.batch_decode(tokenizer(texts).input_ids, skip_special_tokens=True) == texts


def test_both_sides_have_their_words_in_the_vocabulary(tokenizer):
    for word in ("hundred", "thousand", "hundert", "tausend"):
        assert any(word in piece for piece in tokenizer.get_vocab()), word


def test_a_batch_is_padded_with_the_last_id(tokenizer):
    batch = tokenizer(["eins", "eins plus zwei"], text_target=["one", "one plus two"], padding=True)
    short, long = batch.input_ids
    alone = tokenizer("eins").input_ids
    assert short == alone + [SIZE - 1] * (len(long) - len(alone))
    assert batch.labels[1] == tokenizer(text_target="one plus two").input_ids


def test_the_folder_holds_what_auto_tokenizer_needs(tokenizer, folder, tmp_path):
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert (folder / "source.spm").read_bytes() == (folder / "target.spm").read_bytes()
    tokenizer.save_pretrained(tmp_path)
    code = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(json.dumps([type(tokenizer).__name__, tokenizer(json.loads(sys.argv[2])).input_ids]))
"""
    expected = tokenizer(GERMAN[:20]).input_ids
    (result,) = python(["-c", code, tmp_path, json.dumps(GERMAN[:20])])
    assert json.loads(result.stdout) == ["MarianTokenizer", expected], result.stderr
    assert AutoTokenizer.from_pretrained(folder)(GERMAN[:20]).input_ids == expected


def test_the_same_texts_give_the_same_files(tokenizer, folder, tmp_path):
    train_marian_tokenizer(iter(GERMAN), iter(ENGLISH), SIZE, tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_a_vocabulary_of_another_size_replaces_the_files(tmp_path):
    for size in (SIZE, SIZE + 10):
        train_marian_tokenizer(GERMAN, ENGLISH, size, tmp_path)
        assert len(AutoTokenizer.from_pretrained(tmp_path)) == size
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


@pytest.mark.parametrize(
    ("size", "pattern", "beyond"),
    [
        (5000, "vocab_size must be at most .* for these texts, got 5000", 1),
        (5, "vocab_size must be at least .* got 5", -1),
    ],
)
def test_sizes_that_are_impossible_name_the_limit(size, pattern, beyond, tmp_path):
    arguments = GERMAN[:20], ENGLISH[:20]
    with pytest.raises(ValueError, match=pattern) as error:
        train_marian_tokenizer(*arguments, size, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    limit = int(re.search(r"must be at (?:most|least) (\d+)", str(error.value))[1])
    assert len(train_marian_tokenizer(*arguments, limit, tmp_path / "b")) == limit
    with pytest.raises(ValueError, match=pattern.replace(f"got {size}", f"got {limit + beyond}")):
        train_marian_tokenizer(*arguments, limit + beyond, tmp_path / "c")


@pytest.mark.parametrize(
    ("source", "target", "size", "message"),
    [
        ([], ["a"], 9, "texts_source is empty or blank"),
        (["a"], ["", " \n"], 9, "texts_target is empty or blank"),
        ("ein Haus", ["a house"], 9, "texts_source must be a list of texts, got a string"),
        (["a"], ["b"], 0, "vocab_size must have room for 3 special tokens .* got 0"),
        (["a" * (1 << 20), "é"], ["a" * (1 << 20) + "b"], 9, "a text has more than 1048576 bytes; split"),
    ],
)
def test_texts_and_sizes_without_sense_are_refused(source, target, size, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_marian_tokenizer(source, target, size, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_missing_package_is_an_error_that_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs the package sentencepiece; install hf_attn_dynamics\[recipes\]"):
        train_marian_tokenizer(GERMAN, ENGLISH, SIZE, tmp_path)
