import json

import pytest
from fresh_processes import python
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_attn_dynamics.data import (
    character_tokenizer,
    delimiter_token_ids,
    period_token_ids,
    train_byte_level_bpe,
    unknown_rate,
    warn_of_unknown,
)


TEXTS = ["the cat sat on the mat . the end.", "a dog and a cat. They met, and sat down."] * 3
SAMPLES = ["the cat sat.", " a <mask> [MASK] dog", "Größe 数 🙂\n\ttabs", ""]

LOAD = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
samples = json.loads(sys.argv[2])
print(json.dumps([dict(tokenizer(text, pair)) for text in samples for pair in (None, "the end.")]))
"""


@pytest.fixture(scope="module", params=["roberta", "bert"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(kind):
    return train_byte_level_bpe(TEXTS, 300, kind)


def test_special_tokens_have_the_first_ids(kind, tokenizer):
    expected = {
        "roberta": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    }
    assert tokenizer.convert_ids_to_tokens(range(5)) == expected[kind]
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3, 4]


def test_roberta_frames_single_texts_and_pairs():
    tokenizer = train_byte_level_bpe(TEXTS, 261)
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert tokenizer("a")["input_ids"] == [0, a, 2]
    assert tokenizer("a", "b")["input_ids"] == [0, a, 2, 2, b, 2]
    assert "token_type_ids" not in tokenizer("a", "b")


def test_bert_frames_single_texts_and_pairs():
    tokenizer = train_byte_level_bpe(TEXTS, 261, "bert")
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert tokenizer("a")["input_ids"] == [2, a, 3]
    assert tokenizer("a", "b")["input_ids"] == [2, a, 3, b, 3]
    assert tokenizer("a", "b")["token_type_ids"] == [0, 0, 0, 1, 1]


def test_any_text_comes_back_from_its_tokens(tokenizer):
    for text in ("Größe 数 🙂", " the cat \n sat\t."):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text


def test_the_mask_takes_the_place_of_a_word_and_its_space(tokenizer):
    ids = tokenizer(f"a {tokenizer.mask_token} b", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["a", tokenizer.mask_token]


def test_the_same_texts_give_the_same_tokenizer(kind, tokenizer):
    again = train_byte_level_bpe(iter(TEXTS), 300, kind)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize("model_type", [None, "headwise-roberta"])
def test_auto_tokenizer_brings_it_back_in_another_process(model_type, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (result,) = python(["-c", LOAD, tmp_path, json.dumps(SAMPLES)])
    expected = [dict(tokenizer(text, pair)) for text in SAMPLES for pair in (None, "the end.")]
    assert json.loads(result.stdout) == expected, result.stderr


def test_saving_keeps_the_special_tokens(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.model_input_names == tokenizer.model_input_names
    assert again.padding_side == tokenizer.padding_side == "right"


def test_delimiters_are_the_tokens_at_the_ends():
    assert delimiter_token_ids(train_byte_level_bpe(TEXTS, 261, "roberta")) == [0, 2]
    assert delimiter_token_ids(train_byte_level_bpe(TEXTS, 261, "bert")) == [2, 3]


def test_periods_are_found_with_and_without_a_space(tokenizer):
    tokens = [tokenizer.convert_ids_to_tokens(index) for index in period_token_ids(tokenizer)]
    assert set(tokens) == {".", "Ġ."}
    assert period_token_ids(tokenizer) == sorted(period_token_ids(tokenizer))


def test_a_small_text_gives_a_smaller_vocabulary_and_a_warning(caplog):
    assert len(train_byte_level_bpe(["aaa"], 5000)) < 300
    assert "instead of vocab_size=5000" in caplog.text


def test_the_smallest_vocabulary_is_bytes_and_special_tokens(kind):
    assert len(train_byte_level_bpe(TEXTS, 261, kind)) == 261
    with pytest.raises(ValueError, match="vocab_size must be at least 261 .* got 260"):
        train_byte_level_bpe(TEXTS, 260, kind)


@pytest.mark.parametrize("texts", [[], ["", " \n"], iter([])])
def test_no_text_is_an_error(texts):
    with pytest.raises(ValueError, match="texts is empty or blank"):
        train_byte_level_bpe(texts, 300)


def test_a_single_string_is_an_error():
    with pytest.raises(ValueError, match="texts must be a list of strings, got a string"):
        train_byte_level_bpe("the cat", 300)


def test_an_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="kind must be one of roberta, bert, got 'gpt'"):
        train_byte_level_bpe(TEXTS, 300, "gpt")


def word_level(words):
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["[UNK]", *words])}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def test_the_unknown_rate_is_a_share_of_tokens():
    tokenizer = word_level(["a", "b"])
    assert unknown_rate(["a b c", "", "d"], tokenizer) == 0.5
    assert unknown_rate(["a b c", "", "d"], tokenizer, limit=1) == pytest.approx(1 / 3)


def test_byte_level_tokenizers_know_everything(tokenizer):
    assert unknown_rate(SAMPLES, tokenizer) == 0
    tokenizer = train_byte_level_bpe(TEXTS, 300)
    tokenizer.unk_token = None
    assert unknown_rate(SAMPLES, tokenizer) == 0


def test_one_warning_names_rate_and_lost_characters(caplog):
    tokenizer = word_level(["a"])
    assert warn_of_unknown(["a ዘ ዘ ሰ"], tokenizer, "train.txt") == 0.75
    assert warn_of_unknown(["a ዘ"], tokenizer, "train.txt", threshold=0.5) == 0.5
    [record] = caplog.records
    assert record.getMessage().startswith("75 % of the tokens of train.txt are the unknown token [UNK]")
    assert "the tokenizer lacks: ዘ ሰ." in record.getMessage()


def test_ids_are_texts_whose_characters_are_not_known(caplog):
    tokenizer = character_tokenizer(RESIDUES)
    column = [tokenizer(text)["input_ids"] for text in ("CAXD", "XX")]
    assert warn_of_unknown(column, tokenizer, "the blocks") == unknown_rate(["CAXD", "XX"], tokenizer) == 0.5
    [record] = caplog.records
    assert record.getMessage() == (
        "50 % of the tokens of the blocks are the unknown token <unk>. Choose a tokenizer for this "
        "language, or a byte-level one."
    )
    tokenizer.unk_token = tokenizer.eos_token = "</s>"  # as in GPT-2, whose texts end in its unknown token
    assert unknown_rate(column, tokenizer) == 0
    with pytest.raises(ValueError, match="texts is empty or blank"):
        unknown_rate([[], []], tokenizer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tokenizer: unknown_rate("text", tokenizer), "texts must be a list of strings, got a string"),
        (lambda tokenizer: unknown_rate([" "], tokenizer), "texts is empty or blank"),
        (lambda tokenizer: unknown_rate(["a"], tokenizer, limit=0), "limit must be at least 1, .* got 0"),
        (lambda tokenizer: warn_of_unknown(["a"], tokenizer, "x", 2), "threshold must be between 0 and 1, got 2"),
    ],
)
def test_texts_that_can_not_be_checked_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(word_level(["a"]))


RESIDUES = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "A": 4, "C": 5, "D": 6, "<mask>": 7}
LETTERS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "A": 5, "C": 6, "D": 7}


def test_every_character_is_a_token_and_what_is_not_known_is_not_lost():
    tokenizer = character_tokenizer(RESIDUES)
    ids = tokenizer("CAX D\n<mask>é")["input_ids"]
    assert ids == [0, 5, 4, 3, 3, 6, 3, 7, 3, 2]
    assert tokenizer.decode(tokenizer("CADD")["input_ids"], skip_special_tokens=True) == "CADD"
    assert unknown_rate(["CAXD"], tokenizer) == 0.25


def test_characters_are_framed_as_the_special_tokens_tell():
    assert dict(character_tokenizer(RESIDUES)("A", "CD")) == {
        "input_ids": [0, 4, 2, 2, 5, 6, 2],
        "attention_mask": [1] * 7,
    }
    assert character_tokenizer(LETTERS)("A", "CD")["input_ids"] == [2, 5, 3, 6, 7, 3]
    assert character_tokenizer(LETTERS)("A", "CD")["token_type_ids"] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("vocab", [RESIDUES, LETTERS], ids=["roberta", "bert"])
def test_auto_tokenizer_brings_characters_back(vocab, tmp_path):
    tokenizer = character_tokenizer(vocab)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["CAXD", "", tokenizer.mask_token + "A"]
    assert dict(loaded(texts, texts, padding=True)) == dict(tokenizer(texts, texts, padding=True))
    assert loaded.get_vocab() == vocab


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        ({"A": 0, "C": 1}, "must have the special tokens of roberta or bert, got A, C …; add them"),
        ({**RESIDUES, "AC": 8}, "vocab must have single characters, got 'AC'"),
    ],
    ids=["no special tokens", "longer"],
)
def test_other_vocabularies_are_refused(vocab, message):
    with pytest.raises(ValueError, match=message):
        character_tokenizer(vocab)
