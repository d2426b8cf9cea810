# Licensed under the Apache License, Version 2.0.
import json
import math
import sys

import pytest
import torch
from stock_models import STOCK_MODELS, build_stock
from tiny_models import tiny_config, tiny_model
from transformers import AutoModel

from hf_attn_dynamics import CoreferenceScores, attention_maps, coreference_accuracy, prune_heads
from hf_attn_dynamics.analysis.heads.coreference import _encode, _Question
from hf_attn_dynamics.analysis.observers import observation
from hf_attn_dynamics.data import (
    CoreferenceItem,
    Mention,
    embedded_coreference,
    encode_words,
    load_open_sesame,
    train_byte_level_bpe,
)
from hf_attn_dynamics.models.head_roles import locate_heads


OTHER_INPUTS = ("vit", "deit", "clip-vision", "siglip-vision", "whisper", "gpt2-cross", "bert-decoder")
TEXT_MODELS = [name for name in STOCK_MODELS if name not in OTHER_INPUTS]


class TinyTokenizer:
    """Words of the tiny vocabulary: `w17` is the token 17, `w17w18` two; text is put between 2 and 3."""

    is_fast = False
    unk_token_id, pad_token_id = 9, 1

    def __call__(self, text, add_special_tokens=True):
        ids = [int(number) for number in text.split("w")[1:]]
        return {"input_ids": self.build_inputs_with_special_tokens(ids) if add_special_tokens else ids}

    def build_inputs_with_special_tokens(self, ids):
        return [2, *ids, 3]


def random_items(count=12, seed=0):
    """Sentences of 4 to 15 words of one or two tokens, with mentions of one or two words; some share a sentence."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    items = []
    while len(items) < count:
        words = tuple("".join(f"w{draw(10, 60)}" for _ in range(draw(1, 3))) for _ in range(draw(4, 16)))
        for _ in range(draw(1, 3)):
            places = torch.randperm(len(words) // 2, generator=generator)[:3].tolist()
            first, *others = (Mention(2 * at, 2 * at + draw(1, 3), 2 * at) for at in places)
            items.append(CoreferenceItem(words, first, tuple(others[:1]), tuple(others[1:]), f"group {draw(0, 2)}"))
    return items


@torch.no_grad()
def reference_hits(model, tokenizer, item, special_tokens, mentions_only, attentions=None):
    """Sentence by sentence, word by word: whether each head is right about an item, `(layers, heads)`."""
    ids, words = encode_words(item, tokenizer)
    if attentions is None:
        reader = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
        attentions = reader(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    antecedents = {word for one in item.antecedents for word in range(one.start, one.stop)}
    antecedents -= set(range(item.mention.start, item.mention.stop))
    competing = set(range(len(item.words)))
    if mentions_only:
        antecedents = {one.head for one in item.antecedents}
        competing = antecedents | {one.head for one in item.distractors}
    hits = []
    for layer in attentions:
        hits.append([])
        for head in layer[0]:
            rows = [row for row, word in zip(head, words) if word == item.mention.head]
            row = sum(rows) / len(rows)
            received = {}
            for index, word in enumerate(words):
                if word in competing or (word is None and special_tokens):
                    key = f"special {index}" if word is None else word
                    received[key] = received.get(key, 0) + row[index].item()
            most = max(received, key=received.get)
            hits[-1].append(float(most in antecedents))
    return torch.tensor(hits, dtype=torch.float64)


def assert_as_reference(scores, model, tokenizer, items, special_tokens=True, mentions_only=False):
    for group in scores.counts:
        chosen = [item for item in items if group in ("all", item.group)]
        hits = [reference_hits(model, tokenizer, item, special_tokens, mentions_only) for item in chosen]
        (table,) = scores.accuracy[group].values()
        torch.testing.assert_close(table, torch.stack(hits).mean(0), rtol=0, atol=1e-12)
        assert scores.counts[group] == len(chosen)


@pytest.mark.parametrize("special_tokens", [True, False])
@pytest.mark.parametrize("mentions_only", [True, False])
def test_accuracy_is_that_of_one_sentence_after_the_other(special_tokens, mentions_only):
    model, items = tiny_model("roberta").double(), random_items()
    settings = {"special_tokens": special_tokens, "mentions_only": mentions_only}
    scores = coreference_accuracy(model, TinyTokenizer(), items, batch_size=4, **settings)
    assert list(scores.counts) == ["all", *dict.fromkeys(item.group for item in items)]
    model.set_attn_implementation("eager")
    assert_as_reference(scores, model, TinyTokenizer(), items, **settings)
    assert 0 < scores.mean() < 1


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_accuracy_is_right_for_every_stock_architecture(name):
    model, items = build_stock(name), random_items(4)
    before = model.config._attn_implementation
    scores = coreference_accuracy(model, TinyTokenizer(), items)
    assert model.config._attn_implementation == before
    model.set_attn_implementation("eager")
    assert_as_reference(scores, model, TinyTokenizer(), items)


@pytest.mark.parametrize("kind", ["bert", "electra", "marian"])
def test_headwise_models_are_scored_as_stock_ones(kind):
    model, items = tiny_model(kind).double(), random_items(4)
    scores = coreference_accuracy(model, TinyTokenizer(), items)
    assert model.config._attn_implementation == "sdpa"
    assert_as_reference(scores, model, TinyTokenizer(), items)


def test_weights_of_half_precision_are_not_rounded():
    # Heads that attend about alike to all have ties among rounded weights.
    model, items = tiny_model("bert").bfloat16(), random_items()
    found = coreference_accuracy(model, TinyTokenizer(), items, batch_size=1).accuracy["all"]["encoder"]
    hits = []
    for item in items:
        ids, _ = encode_words(item, TinyTokenizer())
        maps = attention_maps(model, {"input_ids": torch.tensor([ids])})["encoder"]
        hits.append(reference_hits(model, TinyTokenizer(), item, True, False, maps))
    torch.testing.assert_close(found, torch.stack(hits).mean(0), rtol=0, atol=1e-12)


def test_rows_of_long_texts_may_come_in_pieces(monkeypatch):
    model, items = tiny_model("bert").double(), random_items(6)
    whole = coreference_accuracy(model, TinyTokenizer(), items)
    monkeypatch.setitem(observation.MAX_WEIGHTS, "cpu", 150)
    assert coreference_accuracy(model, TinyTokenizer(), items) == whole


def test_batches_do_not_change_scores():
    model, items = tiny_model("bert").double(), random_items(20)
    one, many = (coreference_accuracy(model, TinyTokenizer(), items, batch_size=size) for size in (1, 20))
    assert one == many
    assert one.accuracy == coreference_accuracy(model, TinyTokenizer(), items[::-1]).accuracy


@pytest.mark.parametrize("build", [lambda: tiny_model("bert"), lambda: build_stock("bert")], ids=["headwise", "stock"])
def test_heads_of_pruned_models_keep_their_numbers(build):
    items = random_items()
    model = build().double()
    # Heads of the last layer, whose removal changes no attention.
    layer = model.config.num_hidden_layers - 1
    whole = coreference_accuracy(model, TinyTokenizer(), items).accuracy["all"]["encoder"]
    pruned = coreference_accuracy(prune_heads(model, {layer: [0, 2]}), TinyTokenizer(), items)
    expected = whole.clone()
    expected[layer, [0, 2]] = math.nan
    torch.testing.assert_close(pruned.accuracy["all"]["encoder"], expected, equal_nan=True)
    assert (pruned.best().layer, pruned.best().head) != (layer, 0)
    assert pruned.mean() == pytest.approx(expected.nanmean().item())
    empty = coreference_accuracy(prune_heads(model, {layer: [1, 3]}), TinyTokenizer(), items)
    assert empty.accuracy["all"]["encoder"][layer].isnan().all()


def test_the_model_stays_as_it_was():
    model = tiny_model("roberta").train()
    model.base_model.encoder.layer[0].eval()
    coreference_accuracy(model, TinyTokenizer(), random_items(2))
    # Transformers leaves hooks of its own at the first pass.
    hooks = [len(module._forward_hooks) for module in model.modules()]
    coreference_accuracy(model, TinyTokenizer(), random_items(2))
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert model.training
    assert not model.base_model.encoder.layer[0].training
    with pytest.raises(ValueError, match="none can be used"):
        coreference_accuracy(model, TinyTokenizer(), [])
    assert model.config._attn_implementation == "sdpa"


# ---- Heads whose attention is known ---------------------------------------------------------------------------------


@pytest.fixture
def fixed_attention(monkeypatch):
    """Replaces the attention that is seen: each of four heads puts all weight on one key, at a distance or a place."""

    def fix(previous=1):
        def softmax(scores, sinks):
            weights, rows = torch.zeros_like(scores), torch.arange(scores.shape[-1])
            weights[:, 0, rows, (rows - previous).clamp(min=0)] = 1
            weights[:, 1, rows, 0] = 1
            weights[:, 2, rows, 1] = 1
            weights[:, 3] = 1 / len(rows)
            return weights

        monkeypatch.setattr(observation, "_softmax", softmax)

    return fix


ITEM = CoreferenceItem(
    ("w20", "w21", "w22", "w23", "w24"), Mention(4, 5, 4), (Mention(1, 2, 1),), (Mention(0, 1, 0), Mention(3, 4, 3))
)


def heads(item, **settings):
    scores = coreference_accuracy(build_stock("bert"), TinyTokenizer(), [item], **settings)
    return scores.accuracy["all"]["encoder"][0].tolist()


def test_a_hand_worked_case(fixed_attention):
    fixed_attention(previous=3)
    # Three words back; special token; first word; uniform, where all ties are wrong.
    assert heads(ITEM) == [1, 0, 0, 0]
    fixed_attention(previous=1)
    assert heads(ITEM) == [0, 0, 0, 0]


def test_special_tokens_win_only_where_they_compete(fixed_attention):
    fixed_attention()
    split = CoreferenceItem(("w20", "w21w25", "w22"), Mention(2, 3, 2), (Mention(1, 2, 1),))
    # A word of two tokens gets twice as much from a uniform head as any other.
    assert heads(split) == [1, 0, 0, 1]
    first = CoreferenceItem(ITEM.words, ITEM.mention, (Mention(0, 2, 0),))
    assert heads(first) == [0, 0, 1, 0]
    assert heads(first, special_tokens=False) == [0, 0, 1, 0]


def test_words_of_the_mention_are_no_answer(fixed_attention):
    fixed_attention(previous=0)
    around = CoreferenceItem(ITEM.words, Mention(2, 3, 2), (Mention(0, 4, 0),))
    assert heads(around) == [0, 0, 1, 0]


def test_baselines_are_those_worked_out_by_hand():
    model = build_stock("bert")
    near = CoreferenceItem(ITEM.words, Mention(2, 4, 3), (Mention(0, 2, 1),), (Mention(4, 5, 4),), "near")
    scores = coreference_accuracy(model, TinyTokenizer(), [ITEM, near])
    assert scores.baselines == {
        "previous word": {"all": 0.5, "near": 1.0},
        "first word": {"all": 0.5, "near": 1.0},
        "nearest mention": {"all": 0.5, "near": 1.0},
        "chance": {"all": pytest.approx((1 / 7 + 2 / 7) / 2), "near": pytest.approx(2 / 7)},
    }
    scores = coreference_accuracy(model, TinyTokenizer(), [ITEM], special_tokens=False, mentions_only=True)
    assert scores.baselines["chance"]["all"] == pytest.approx(1 / 3)


# ---- What is skipped ------------------------------------------------------------------------------------------------


def test_items_that_cannot_be_asked_are_skipped_and_counted():
    long = CoreferenceItem(tuple(f"w{n % 50 + 10}" for n in range(37)), ITEM.mention, ITEM.antecedents)
    fits = CoreferenceItem(long.words[:36], long.mention, long.antecedents)
    unknown = CoreferenceItem(("w20", "w9", *ITEM.words[2:]), ITEM.mention, ITEM.antecedents)
    elsewhere = CoreferenceItem((*ITEM.words, "w9"), ITEM.mention, ITEM.antecedents)
    items = [long, fits, unknown, elsewhere, long]
    scores = coreference_accuracy(tiny_model("roberta"), TinyTokenizer(), items)
    assert scores.skipped == {"too long": 2, "unknown word": 1}
    assert scores.counts == {"all": 2}
    with pytest.raises(ValueError, match=r"none can be used \(1 too long, 1 unknown word\)"):
        coreference_accuracy(tiny_model("roberta"), TinyTokenizer(), [long, unknown])


def test_a_text_is_read_once_for_all_its_items():
    items = [ITEM, CoreferenceItem(ITEM.words, Mention(3, 4, 3), ITEM.antecedents), random_items(1)[0]]
    texts, _ = _encode(items, TinyTokenizer(), None, True, False)
    assert [len(text.questions) for text in texts] == [2, 1]
    assert texts[0].questions[0] == _Question(ITEM, {1}, {0, 2, 3, 4, 5, 6})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"items": []}, r"items: none can be used \(none was given\)"),
    ],
)
def test_bad_input_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        coreference_accuracy(
            **{"model": tiny_model("bert"), "tokenizer": TinyTokenizer(), "items": random_items(2), **settings}
        )


def test_a_model_without_attention_weights_is_refused():
    model = build_stock("mpnet")  # which computes attention by itself
    locate_heads(model)[1].module.register_forward_hook(lambda module, inputs, output: (output[0], None))
    with pytest.raises(ValueError, match="encoder layer 1 of MPNetModel returns no attention weights"):
        coreference_accuracy(model, TinyTokenizer(), random_items(2))


def test_attention_that_is_not_a_number_is_refused():
    model = build_stock("bert")
    model.bert.encoder.layer[1].attention.self.key.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="weights are NaN; run the model in single precision"):
        coreference_accuracy(model, TinyTokenizer(), random_items(2))


# ---- Results --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scores():
    model = prune_heads(tiny_model("bert"), {0: [1]})
    return coreference_accuracy(model, TinyTokenizer(), random_items())


def test_scores_survive_saving(scores, tmp_path):
    scores.save(tmp_path / "scores.json")
    assert CoreferenceScores.load(tmp_path / "scores.json") == scores
    assert json.loads((tmp_path / "scores.json").read_text()) == scores.to_dict()
    for text in ("{}", "[]", "no JSON", '{"accuracy": {}}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"other\.json does not hold CoreferenceScores"):
            CoreferenceScores.load(tmp_path / "other.json")


def test_the_best_head_is_the_highest(scores):
    for group, tables in scores.accuracy.items():
        best = scores.best(group)
        assert best.score == tables["encoder"].nan_to_num(-1).max() == tables[best.site][best.layer, best.head]
    with pytest.raises(ValueError, match="group must be one of 'all', 'group .', 'group .', got 'none'"):
        scores.best("none")


def test_tables_have_a_row_for_each_group_and_head(scores, monkeypatch):
    pandas = pytest.importorskip("pandas")
    table = scores.to_pandas()
    assert list(table.columns) == ["group", "site", "layer", "head", "accuracy"]
    assert len(table) == len(scores.counts) * 8
    row = table[(table.group == "all") & (table.layer == 1) & (table["head"] == 2)]
    assert row.accuracy.item() == scores.accuracy["all"]["encoder"][1, 2].item()
    assert isinstance(table, pandas.DataFrame)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        scores.to_pandas()


def test_a_real_tokenizer_gives_the_same_as_the_reference():
    items = embedded_coreference()
    tokenizer = train_byte_level_bpe([item.text for item in items], 300, kind="roberta")
    model = AutoModel.from_config(tiny_config("roberta", vocab_size=300, max_position_embeddings=200)).double().eval()
    assert_as_reference(coreference_accuracy(model, tokenizer, items), model, tokenizer, items)


def test_a_trained_model_has_heads_for_reflexive_pronouns(real_data, real_models):
    from transformers import AutoTokenizer

    folder = real_models / "minilm"
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    items = load_open_sesame(real_data / "open-sesame" / "refl.0.gz")[:60]
    scores = coreference_accuracy(model, tokenizer, items, special_tokens=False)
    assert scores.best().score > 0.9
    assert scores.baselines["previous word"]["all"] == 0
