# Licensed under the Apache License, Version 2.0.
import subprocess
import sys

import pytest
import torch
from matplotlib.figure import Figure
from tiny_models import vivid
from transformers import (
    AutoModelForMaskedLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
)

from hf_attn_dynamics import (
    DuplicateTokens,
    HeadConfidence,
    HeadDistance,
    HeadEntropy,
    HeadReading,
    MaskedLanguageModelCollator,
    RareWords,
    RelativePositions,
    SyntacticRoles,
    head_importance,
    observe,
    prune_heads,
    read_heads,
    role_overlap,
)
from hf_attn_dynamics.analysis.sentences import Sentences
from hf_attn_dynamics.data import embedded_trees


TREES = embedded_trees()
TEXTS = [tree.text for tree in TREES]


@pytest.fixture(scope="module")
def everything(model, tokenizer):
    collator = MaskedLanguageModelCollator(tokenizer)
    measured = {"frequent": 20, "importance_sentences": 20, "relevance_sentences": 4}
    return read_heads(model, TREES, tokenizer, collator=collator, batch_size=7, **measured)


@pytest.fixture(scope="module")
def plain(model, tokenizer):
    return read_heads(model, TEXTS[:6], tokenizer)


def test_one_pass_gives_what_each_observer_gives(model, tokenizer, everything):
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    counts = torch.bincount(torch.tensor([one for some in ids for one in some]), minlength=len(tokenizer))
    observers = [HeadConfidence(), HeadEntropy(), HeadDistance(), RelativePositions(), DuplicateTokens(),
                 RareWords(counts, frequent=20), SyntacticRoles(TREES, tokenizer)]  # fmt: skip
    with torch.no_grad(), observe(model, *observers, tokenizer=tokenizer) as seen:
        for one in ids:
            model(input_ids=torch.tensor([one]))
    assert everything.not_measured == {}
    for name in ("confidence", "entropy"):
        torch.testing.assert_close(everything[name]["encoder"], seen.results()[name]["encoder"])
    torch.testing.assert_close(everything["distance"].distances["encoder"], seen.distance.distances["encoder"])
    torch.testing.assert_close(
        everything["relative_positions"].largest["encoder"], seen.relative_positions.largest["encoder"]
    )
    for name in ("syntactic_roles", "rare_words", "duplicate_tokens"):
        for role, scores in everything[name].accuracy.items():
            torch.testing.assert_close(scores["encoder"], seen.results()[name].accuracy[role]["encoder"])


def test_functions_are_the_heads_that_play_roles(everything):
    functions = everything.functions()
    assert list(functions) == ["positional", "syntactic", "rare words", "duplicate tokens", "delimiters"]
    syntactic = {head[:3] for heads in everything["syntactic_roles"].roles().values() for head in heads}
    assert {head[:3] for head in functions["syntactic"]} == syntactic
    assert functions["rare words"] == everything["rare_words"].roles()["rarest"]
    delimiters = {head[:3] for head in everything["delimiter_attention"].ranked() if head.score >= 0.5}
    assert {head[:3] for head in functions["delimiters"]} == delimiters
    assert functions["positional"] == everything["relative_positions"].positional()
    summary = everything.summary()
    assert summary["syntactic_heads"] == {"encoder": len(syntactic)}
    assert summary["roles"]["rarest"]["score"] == everything["rare_words"].best("rarest").score


def test_what_was_not_measured_is_none_and_says_why(plain):
    assert plain.not_measured == {
        "syntactic_roles": "these sentences have no trees; .conllu files do.",
        "rare_words": plain.not_measured["rare_words"],
        "importance": "not requested.",
        "relevance": "not requested.",
    }
    assert "number of tokens that occur" in plain.not_measured["rare_words"]
    assert plain.functions()["syntactic"] is None
    assert plain.summary()["syntactic_heads"] == plain.summary()["rare_word_heads"] == {"encoder": None}
    with pytest.raises(KeyError, match="syntactic_roles was not measured: these sentences have no trees"):
        plain["syntactic_roles"]
    with pytest.raises(KeyError, match="there is no result 'sureness', but confidence, entropy"):
        plain["sureness"]
    # Functions that were not measured are not counted among those that are kept, either.
    kept = plain.functions_kept({"one": [("encoder", 0, 1)]})
    measured = {name: heads for name, heads in plain.functions().items() if heads is not None}
    assert kept["one"] == {"heads": 1, "syntactic": None, "rare words": None,
                           **role_overlap(measured, [("encoder", 0, 1)])}  # fmt: skip


def test_a_reading_is_saved_and_read_back(everything, tmp_path):
    everything.save(tmp_path / "reading.json")
    again = HeadReading.load(tmp_path / "reading.json")
    assert again == everything
    assert again.examples == everything.examples
    assert again.summary() == everything.summary()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other.json does not hold HeadReading"):
        HeadReading.load(tmp_path / "other.json")


def test_the_table_has_a_row_for_each_head(everything):
    table = everything.to_pandas()
    assert len(table) == 8
    assert list(table.columns[:4]) == ["site", "layer", "head", "functions"]
    assert {"confidence", "entropy", "importance", "relevance", "rarest", "distance_mean"} <= {*table.columns}
    assert table.confidence.tolist() == everything["confidence"]["encoder"].flatten().tolist()


def test_pictures_are_figures_that_are_saved_where_there_is_a_path(everything, plain, tmp_path):
    assert isinstance(everything.plot(), Figure)
    assert isinstance(everything.plot(tmp_path / "roles.png", what="syntactic_roles"), Figure)
    assert {path.name for path in tmp_path.iterdir()} == {"roles.png", "roles.svg"}
    with pytest.raises(ValueError, match=r"what must be one of functions, .*, got 'syntactic_roles'"):
        plain.plot(what="syntactic_roles")
    (legend,) = plain.plot().legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[-2:] == ["syntactic: not measured", "rare words: not measured"]


def test_the_page_says_what_was_measured_and_what_was_not(everything, plain, tmp_path):
    everything.save_page(tmp_path / "all.html")
    plain.save_page(tmp_path / "some.html", facts={"made by": "a test"})
    whole, some = ((tmp_path / name).read_text(encoding="utf-8") for name in ("all.html", "some.html"))
    assert {path.name for path in tmp_path.iterdir()} == {"all.html", "some.html"}
    assert "not measured" not in whole.lower()
    assert whole.count("<svg width") == 16  # two sentences for each of eight heads
    assert some.count("not measured</td>") == 2
    assert "Syntactic roles: not measured; these sentences have no trees" in some
    assert "a test" in some
    for html in (everything._repr_html_(), plain._repr_html_()):
        assert html.count("<img") == 1
        assert "<html" not in html


def test_causal_models_need_no_labels_and_masked_ones_a_collator(tokenizer, model):
    causal = vivid(GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=4)))
    reading = read_heads(causal, TEXTS[:4], tokenizer, importance_sentences=4, batch_size=3)
    single = [torch.tensor([tokenizer(text)["input_ids"]]) for text in TEXTS[:4]]
    expected = head_importance(causal, [{"input_ids": ids, "labels": ids} for ids in single], normalize="l2")
    torch.testing.assert_close(reading["importance"]["decoder"], expected["decoder"])
    masked = read_heads(model, TEXTS[:4], tokenizer, importance_sentences=4)
    assert masked.not_measured["importance"].startswith("a masked language model needs collator=")


def test_of_encoder_decoder_models_the_encoder_is_read(tokenizer):
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
    model = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), d_model=16, **sizes, **heads))
    reading = read_heads(model, TEXTS[:3], tokenizer)
    assert reading.summary()["heads"] == {"encoder": 8}


def test_removed_heads_have_no_numbers(tokenizer):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = prune_heads(vivid(BertModel(BertConfig(vocab_size=len(tokenizer), **sizes))), {1: [0, 3]})
    reading = read_heads(model, TEXTS[:3], tokenizer)
    assert reading.summary()["heads"] == {"encoder": 6}
    assert reading["confidence"]["encoder"].isnan().nonzero().tolist() == [[1, 0], [1, 3]]
    assert not {("encoder", 1, 0), ("encoder", 1, 3)} & {*reading.examples}
    assert reading["distance"].head_scores()["mean"]["encoder"].shape == (2, 4)
    assert len(reading.rows()) == 8


def test_pairs_of_texts_have_segments(model, tokenizer):
    pairs, single = [("Dogs bark.", "Cats do not."), ("A text.", "B.")], "One text alone."
    sentences = Sentences([*pairs, single], model, tokenizer)
    for ids, types in zip(sentences.ids, tokenizer([*pairs])["token_type_ids"]):
        assert sentences.padded([ids])["token_type_ids"].tolist() == [types]
    assert not sentences.padded(sentences.ids)["token_type_ids"][2].any()
    assert "token_type_ids" not in Sentences([single], model, tokenizer).padded([[5]])
    with pytest.raises(ValueError, match=r"sentences\[1\] is a list of 3 strings; join words by spaces"):
        Sentences(["a", ["the", "cat", "sat"]], model, tokenizer)


def test_the_tokenizer_of_the_checkpoint_is_found(model, tokenizer, tmp_path):
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert read_heads(loaded, TEXTS[:3])["entropy"] == read_heads(loaded, TEXTS[:3], tokenizer)["entropy"]
    with pytest.raises(ValueError, match=r"has no tokenizer to read texts with: it was not loaded .* Pass one"):
        read_heads(BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)), TEXTS)


def test_token_ids_need_no_tokenizer(model, tokenizer, plain):
    ids = [tokenizer(text)["input_ids"] for text in TEXTS[:6]]
    reading = read_heads(model, [ids[0], torch.tensor(ids[1]), *ids[2:]])
    assert reading["confidence"] == plain["confidence"]
    assert "no tokenizer" in reading.not_measured["duplicate_tokens"]


def test_sentences_that_are_too_long_are_left_out_and_counted(model, tokenizer):
    sentences = Sentences([TEXTS[0], ("a pair", "of texts"), "word " * 90], model, tokenizer)
    assert (sentences.too_long, len(sentences.ids)) == (1, 2)
    assert sentences.ids[1] == tokenizer("a pair", "of texts")["input_ids"]
    with pytest.raises(ValueError, match="sentences: none of 1 sentences fits; they have"):
        Sentences(["word " * 90], model, tokenizer)
    with pytest.raises(ValueError, match="relevance_sentences must be at least 0, got -1"):
        read_heads(model, TEXTS, tokenizer, relevance_sentences=-1)


def test_sentences_without_a_word_are_read_too(model, tokenizer, tmp_path):
    reading = read_heads(model, [[3], [3, 3]], tokenizer)
    assert reading.summary()["mean_confidence"] == 0
    reading.save_page(tmp_path / "page.html")
    with pytest.raises(
        ValueError, match="what must be one of functions, confidence, entropy, distances, got 'positions'"
    ):
        reading.plot(what="positions")


def test_what_are_no_sentences_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match=r"sentences must be a list of sentences, got a single text; pass \[text\]"):
        read_heads(model, TEXTS[0], tokenizer)


def test_heads_are_read_without_the_library_that_draws():
    # A process of its own: those that are shared have drawn before.
    code = "import sys, hf_attn_dynamics as h; h.read_heads; print('matplotlib' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False"]


def test_it_prints_what_there_is_and_not_all_numbers(plain):
    text = repr(plain)
    assert text.startswith("HeadReading(model=")
    assert "'confidence'" in text
    assert "'syntactic_roles'" in text.partition("not_measured=")[2]
    assert len(text) < 600


def test_contributions_that_a_model_does_not_support_are_named_and_left_out(tokenizer):
    class Shifted(torch.nn.Linear):
        def forward(self, states):
            return super().forward(states + states.roll(1, 1))

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = vivid(BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)))
    model.encoder.layer[0].attention.self.key = Shifted(16, 16)
    reading = read_heads(model, TEXTS[:4], tokenizer, contributions=["value_weighted", "local"])
    assert "depends on the inputs of several positions" in reading.not_measured["local_contribution"]
    assert reading.sentence_maps[0].weights.keys() == {"attention", "value_weighted"}
    assert HeadReading.from_dict(reading.to_dict()) == reading


@pytest.mark.parametrize("contributions", ["local", ["lokal"]])
def test_contributions_must_be_known(contributions, tokenizer):
    with pytest.raises(ValueError, match="contributions must be some of value_weighted, local, global, got"):
        read_heads(None, TEXTS, tokenizer, contributions=contributions)


def test_logits_of_batches_are_not_computed(tokenizer):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).eval()
    sizes = []
    model.cls.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    read_heads(model, TEXTS[:2], tokenizer)
    # Examples are read one by one.
    assert max(sizes, default=0) <= 1
