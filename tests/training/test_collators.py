import numpy as np
import pytest
import torch

from hf_attn_dynamics import MaskedLanguageModelCollator, ReplacedTokenCollator
from hf_attn_dynamics.data import train_byte_level_bpe


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe(["the quick brown fox jumps over the lazy dog. " * 5], vocab_size=300)


def sentences(tokenizer, count=200, length=60):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, len(tokenizer), (count, length), generator=generator).tolist()
    return [{"input_ids": [0, *row, 2]} for row in ids]


def masking(tokenizer, **settings):
    return MaskedLanguageModelCollator(tokenizer, **settings)


def replacing(tokenizer, **settings):
    """Draws token i with a frequency that grows with i."""
    return ReplacedTokenCollator(tokenizer, np.arange(len(tokenizer)), **settings)


BOTH = pytest.mark.parametrize("collator_for", [masking, replacing])


@BOTH
def test_batches_depend_on_seed_epoch_and_example_alone(collator_for, tokenizer):
    examples = sentences(tokenizer, 8)
    collator = collator_for(tokenizer, seed=3)
    together = collator(examples)
    torch.manual_seed(99)
    np.random.seed(99)
    alone = [collator_for(tokenizer, seed=3)([example]) for example in reversed(examples)]
    for name in ("input_ids", "labels"):
        assert torch.equal(torch.cat([batch[name] for batch in reversed(alone)]), together[name])
    collator.set_epoch(1)
    assert not torch.equal(collator(examples)["labels"], together["labels"])
    collator.set_epoch(0)
    assert torch.equal(collator(examples)["labels"], together["labels"])
    assert not torch.equal(collator_for(tokenizer, seed=4)(examples)["labels"], together["labels"])


@BOTH
def test_the_global_random_states_are_left_alone(collator_for, tokenizer):
    torch.manual_seed(0)
    np.random.seed(0)
    collator_for(tokenizer)(sentences(tokenizer, 4))
    found = torch.rand(1), np.random.random()
    torch.manual_seed(0)
    np.random.seed(0)
    assert (torch.rand(1), np.random.random()) == found


def test_shares_are_those_of_the_paper(tokenizer):
    examples = sentences(tokenizer, 500)
    batch = MaskedLanguageModelCollator(tokenizer, mlm_probability=0.15)(examples)
    original = torch.tensor([example["input_ids"] for example in examples])
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])
    assert not chosen[:, [0, -1]].any()
    # 30,000 tokens: four standard deviations are 0.8 points of the share chosen.
    assert chosen[:, 1:-1].float().mean().item() == pytest.approx(0.15, abs=0.009)
    masked = batch["input_ids"][chosen]
    is_mask = masked == tokenizer.mask_token_id
    stays = masked == original[chosen]
    assert is_mask.float().mean().item() == pytest.approx(0.8, abs=0.025)
    # One in some 300 random tokens is the same again.
    assert stays.float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert not torch.isin(masked[~is_mask], torch.tensor([0, 1, 2, 3, 4])).any()


def test_short_examples_have_one_token_chosen_and_empty_ones_none(tokenizer):
    batch = MaskedLanguageModelCollator(tokenizer)([{"input_ids": [0, 9, 2]}, {"input_ids": [0, 2]}])
    assert batch["labels"].tolist() == [[-100, 9, -100], [-100, -100, -100]]


@BOTH
def test_ragged_examples_are_padded_and_other_columns_kept(collator_for, tokenizer):
    examples = [{"input_ids": [0, 9, 8, 2], "token_type_ids": [0, 0, 1, 1], "next_sentence_label": 1}]
    examples.append({"input_ids": [0, 2], "token_type_ids": [0, 0], "next_sentence_label": 0})
    batch = collator_for(tokenizer, pad_to_multiple_of=8)(examples)
    assert batch["attention_mask"].tolist() == [[1] * 4 + [0] * 4, [1] * 2 + [0] * 6]
    assert batch["input_ids"][1].tolist() == [0, 2] + [tokenizer.pad_token_id] * 6
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert batch["token_type_ids"].tolist()[0] == [0, 0, 1, 1, 0, 0, 0, 0]
    assert batch["next_sentence_label"].tolist() == [1, 0]


def test_columns_of_fractions_stay_fractions(tokenizer):
    examples = [{"input_ids": [0, 9, 2], "score": [0.5, 0.25, 1.0]}, {"input_ids": [0, 2], "score": [0.5, 0.5]}]
    assert MaskedLanguageModelCollator(tokenizer)(examples)["score"].tolist() == [[0.5, 0.25, 1.0], [0.5, 0.5, 0.0]]


@BOTH
def test_examples_with_labels_are_only_padded(collator_for, tokenizer):
    batch = collator_for(tokenizer)([{"input_ids": [0, 9, 2], "labels": [-100, 7, -100]}])
    assert batch["input_ids"].tolist() == [[0, 9, 2]]
    assert batch["labels"].tolist() == [[-100, 7, -100]]


@pytest.mark.parametrize("share", [0, 1, -0.1])
@pytest.mark.parametrize(("collator_for", "name"), [(masking, "mlm_probability"), (replacing, "replace_probability")])
def test_impossible_shares_are_refused(tokenizer, collator_for, name, share):
    with pytest.raises(ValueError, match=f"{name} must be between 0 and 1, got {share}"):
        collator_for(tokenizer, **{name: share})


def test_a_tokenizer_without_mask_token_is_refused():
    from transformers import PreTrainedTokenizerFast

    plain = train_byte_level_bpe(["a b c"], vocab_size=270).backend_tokenizer
    with pytest.raises(ValueError, match="mask_token"):
        MaskedLanguageModelCollator(PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>"))


def test_replacements_are_drawn_from_the_frequencies_of_the_corpus(tokenizer):
    examples = sentences(tokenizer, 2000)
    counts = np.zeros(len(tokenizer))
    counts[[7, 9, 11]] = 6, 3, 1
    counts[tokenizer.all_special_ids] = 1000
    batch = ReplacedTokenCollator(tokenizer, counts, replace_probability=0.2)(examples)
    original = torch.tensor([example["input_ids"] for example in examples])
    changed = batch["input_ids"] != original
    assert torch.equal(batch["labels"], changed.long())
    assert not changed[:, [0, -1]].any()
    draws = batch["input_ids"][changed]
    # 24,000 draws: four standard deviations are at most 1.3 points.
    for token, share in ((7, 0.6), (9, 0.3), (11, 0.1)):
        assert (draws == token).float().mean().item() == pytest.approx(share, abs=0.014)
    assert torch.isin(draws, torch.tensor([7, 9, 11])).all()
    # One in some 300 tokens is drawn in its own place.
    assert changed[:, 1:-1].float().mean().item() == pytest.approx(0.2, abs=0.006)


def test_a_draw_that_is_the_original_token_counts_as_original(tokenizer):
    counts = np.zeros(len(tokenizer))
    counts[9] = 1
    batch = ReplacedTokenCollator(tokenizer, counts, 0.99)([{"input_ids": [0, 9, 8, 2]}, {"input_ids": [0, 9, 2]}])
    assert batch["input_ids"].tolist() == [[0, 9, 9, 2], [0, 9, 2, tokenizer.pad_token_id]]
    assert batch["labels"].tolist() == [[0, 0, 1, 0], [0, 0, 0, -100]]


def test_examples_of_special_tokens_alone_have_nothing_replaced(tokenizer):
    assert replacing(tokenizer)([{"input_ids": [0, 2]}])["labels"].tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda counts: counts[:-1], r"counts must have shape \(\d+,\), one for each token"),
        (lambda counts: counts - 8, "counts must be at least 0 and finite, got -8.0 for token 0"),
        (lambda counts: np.where(counts == 7, np.inf, counts), "at least 0 and finite, got inf for token 7"),
        (lambda counts: counts * (counts < 5), "counts must be positive for some ordinary token"),
    ],
    ids=["length", "negative", "infinite", "empty"],
)
def test_impossible_counts_are_refused(tokenizer, change, message):
    # The special tokens are those below 5.
    with pytest.raises(ValueError, match=message):
        ReplacedTokenCollator(tokenizer, change(np.arange(len(tokenizer), dtype=float)))
