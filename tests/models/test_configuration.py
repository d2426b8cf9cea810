import json

import pytest
from tiny_models import ALL_GATES, CONFIGS, KINDS, UNEVEN, sizes, stock_config, tiny_config
from transformers import AutoConfig

import hf_attn_dynamics as had
from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseElectraConfig, HeadwiseRobertaConfig


def config(guidance, **changes):
    return tiny_config(guidance=guidance, **changes)


def test_half_of_the_heads_are_guided_as_in_the_paper_by_default():
    layouts = HeadwiseRobertaConfig(num_hidden_layers=3, guidance={}).guided_heads()
    assert layouts == {layer: {"next": [0], "prev": [1], "first": [2, 3, 4, 5]} for layer in range(3)}


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.25, {"next": [0]}),
        (0.5, {"next": [0], "prev": [1]}),
        (0.75, {"next": [0], "prev": [1], "first": [2]}),
        (1, {"next": [0], "prev": [1], "first": [2, 3]}),
    ],
)
def test_a_fraction_guides_the_first_heads(fraction, expected):
    assert config({"fraction": fraction}).guided_heads()[0] == expected


def test_named_patterns_take_the_heads_in_turn_and_the_last_one_the_rest():
    guidance = {"fraction": 1.0, "patterns": ["self", "delim"], "delimiter_token_ids": [2]}
    assert config(guidance).guided_heads()[1] == {"self": [0], "delim": [1, 2, 3]}


def test_heads_can_be_assigned_for_all_layers_or_layer_by_layer():
    assert config({"heads": {"next": [3], "prev": [0, 1]}}).guided_heads() == {
        0: {"next": [3], "prev": [0, 1]},
        1: {"next": [3], "prev": [0, 1]},
    }
    assert config({"heads": {1: {"first": [2]}}}).guided_heads() == {1: {"first": [2]}}


def test_delimiters_default_to_the_ends_of_a_sentence():
    assert HeadwiseRobertaConfig(guidance={}).guidance["delimiter_token_ids"] == [0, 2]
    assert HeadwiseBertConfig(guidance={}).guidance["delimiter_token_ids"] is None
    assert HeadwiseElectraConfig(guidance={}).guidance["delimiter_token_ids"] is None
    marian = tiny_config("marian", guidance={"encoder": {}}).guidance["encoder"]
    assert marian["delimiter_token_ids"] == [sizes("marian")["eos_token_id"]]


@pytest.mark.parametrize(
    "guidance",
    [
        {},
        {"heads": {0: {"next": [1]}}},
        {"fraction": 0.25, "reduction": "paper"},
        None,
        {"heads": {"why": [1], "prev": [0]}, "targets": {"why": "sparse"}, "loss": {"why": "mass"}},
        {"patterns": ["prev", "why"], "targets": {"why": "keys"}, "loss": "avoid"},
    ],
)
def test_a_saved_configuration_comes_back_equal(guidance, tmp_path):
    before = config(guidance)
    before.save_pretrained(tmp_path)
    for after in (HeadwiseRobertaConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(after) is HeadwiseRobertaConfig
        assert after.guidance == before.guidance
        assert after.guided_heads() == before.guided_heads()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{"pruned_heads": UNEVEN}, {"gates": ALL_GATES, "pruned_heads": UNEVEN}, {}])
def test_gates_and_removed_heads_come_back_equal_whatever_they_were_given_as(changes, kind, tmp_path):
    before = tiny_config(kind, **{name: of_kind[kind] for name, of_kind in changes.items()})
    before.save_pretrained(tmp_path)
    for after in (CONFIGS[kind].from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(after) is CONFIGS[kind]
        for name in ("guidance", "gates", "pruned_heads"):
            assert getattr(after, name) == getattr(before, name)
        assert after.kept_heads() == before.kept_heads()
        assert after.guided_heads() == before.guided_heads()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stock_configuration_becomes_a_headwise_one(kind, tmp_path, caplog):
    stock = stock_config(kind)
    stock.save_pretrained(tmp_path)
    after = CONFIGS[kind].from_pretrained(tmp_path)
    assert (after.model_type, after.guidance, after.gates, after.pruned_heads) == (
        f"headwise-{kind}",
        None,
        None,
        None,
    )
    found, expected = after.to_dict(), {**stock.to_dict(), "model_type": f"headwise-{kind}"}
    assert {name: found[name] for name in expected} == expected
    assert "You are using a model of type" not in caplog.text


def test_each_site_of_an_encoder_and_decoder_has_its_heads_and_gates():
    marian = tiny_config("marian", gates={"cross": {}}, pruned_heads={"decoder": {1: [0]}})
    assert {str(site): heads for site, heads in marian.kept_heads().items()} == {
        "encoder layer 0": [0, 1, 2, 3],
        "encoder layer 1": [0, 1, 2, 3],
        "decoder layer 0": [0, 1],
        "decoder layer 1": [1],
        "cross layer 0": [0, 1],
        "cross layer 1": [0, 1],
    }
    assert list(marian.gate_settings()) == ["cross"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance": {"fraction": 0.5}}, r"guidance of a model with heads at several sites must name them"),
        ({"gates": {"variant": "paper"}}, "gates of a model with heads at several sites must name them"),
        ({"gates": {}}, r"gates=\{\} has no sites; pass \{site: \{\}\} for some of encoder, decoder, cross"),
        ({"gates": {"cross": {"init": 1}}}, r"gates\['cross'\] has no key 'init'"),
        ({"pruned_heads": {0: [1]}}, "pruned_heads of a model with heads at several sites must name them"),
        ({"pruned_heads": {"cross": {0: [2]}}}, r"\(layer 0 of the cross\) names head 2, but .* are 0 to 1"),
        ({"pruned_heads": {"cross": {2: [0]}}}, "pruned_heads names layer 2 of the cross, but its layers are 0 to 1"),
        ({"pruned_heads": {"encoder": {0: [1, 1]}}}, "names head 1 twice"),
        ({"pruned_heads": {"middle": {0: [1]}}}, "must name them"),
    ],
)
def test_impossible_heads_of_a_translation_model_are_named_at_construction(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config("marian", **{"guidance": None, **changes})


def test_the_callers_dictionary_is_left_alone():
    guidance = {"heads": {0: {"next": [1]}}}
    config(guidance)
    assert guidance == {"heads": {0: {"next": [1]}}}


@pytest.mark.parametrize(
    ("guidance", "message"),
    [
        (
            {"heads": {1: {"nxt": [3]}}},
            r"pattern 'nxt' \(layer 1, head 3\) is not one of next, prev, .*register_pattern",
        ),
        ({"patterns": ["nxt"]}, r"pattern 'nxt' \(layer 0, head 0\)"),
        ({"fraction": 0}, "fraction must be greater than 0 and at most 1, got 0"),
        ({"fraction": 1.5}, "got 1.5"),
        ({"fraction": 10**400}, "at most 1, got 1000"),
        ({"fraction": float("nan")}, "at most 1, got nan"),
        ({"fraction": True}, "at most 1, got True"),
        ({"fraction": "half"}, "got 'half'"),
        ({"fraction": 0.1}, "guides 0 heads"),
        ({"fraction": 0.5, "patterns": ["next", "prev", "first"]}, "of 4 heads guides 2 heads, fewer than"),
        ({"patterns": "next"}, "patterns must be a list of names, got 'next'"),
        ({"heads": {"next": [4]}}, r"names head 4 \(layer 0, pattern 'next'\), but a layer has 4 heads"),
        ({"heads": {"next": [-1]}}, "names head -1"),
        ({"heads": {"next": [0, 1], "prev": [1]}}, "names head 1 of layer 0 twice"),
        ({"heads": {"next": 0}}, "needs a list of heads, got 0"),
        ({"heads": {"next": []}}, "needs a list of heads"),
        ({"heads": {2: {"next": [0]}}}, "names layer 2, but the model has 2 layers"),
        ({"heads": {-1: {"next": [0]}}}, "names layer -1"),
        ({"heads": {"--1": {"next": [0]}}}, r"pattern '--1' \(layer 0, no head\) is not one of"),
        ({"heads": {"²": {"next": [0]}}}, r"pattern '²' \(layer 0, no head\) is not one of"),
        ({"heads": {}}, "heads must be"),
        ({"heads": {"next": [0]}, "fraction": 0.5}, "either 'heads' or 'fraction', not both"),
        (
            {"heads": {"period": [0]}},
            r"pattern 'period' needs the ids of its tokens: set guidance\['period_token_ids'\]",
        ),
        ({"period_token_ids": [60]}, "token ids below vocab_size 60, got \\[60\\]"),
        ({"period_token_ids": []}, "period_token_ids"),
        ({"reduction": "mean"}, "reduction must be one of row_mean, paper, code, got 'mean'"),
        ({"edge_rows": "none"}, "edge_rows must be one of uniform, zero, got 'none'"),
        ({"share": 0.5}, "no key 'share'; its keys are fraction, patterns"),
        ({"heads": {"why": [0]}}, "register your own .*, name it in targets if batches bring it"),
        ({"heads": {"next": [0]}, "targets": {"why": "keys"}}, "targets name 'why', which no head has; assign heads"),
        ({"heads": {"why": [0]}, "targets": {"why": "words"}}, "'why' must be one of keys, weights, sparse, got 'wor"),
        ({"heads": {"why": [0]}, "targets": {"why": ["keys"]}}, r"'why' must be one of .*, got \['keys'\]"),
        ({"heads": {"why": [0]}, "targets": "keys"}, r"targets must be \{name: form\}, got 'keys'"),
        ({"heads": {"next": [0]}, "targets": {"next": "keys"}}, "targets name 'next', which is a pattern"),
        ({"heads": {"rows": [0]}, "targets": {"rows": "keys"}}, "targets name 'rows'; choose a name of letters"),
        ({"heads": {"7": [0]}, "targets": {"7": "keys"}}, "targets name '7'; choose a name of letters"),
        (
            {"heads": {"a": [0], "a_weights": [1]}, "targets": {"a": "sparse", "a_weights": "weights"}},
            "'a' and 'a_weights' .* both read the column 'guidance_a_weights'",
        ),
        ({"heads": {"next": [0]}, "loss": "kl"}, "loss of 'next' must be one of squared, .*, got 'kl'"),
        ({"heads": {"next": [0]}, "loss": {"next": 1}}, "loss of 'next' must be one of squared, .*, got 1"),
        ({"heads": {"next": [0]}, "loss": {"prev": "mass"}}, "loss names 'prev', but heads have next"),
        ({"heads": {"next": [0]}, "loss": ["mass"]}, r"loss of 'next' must be one of .*, got \['mass'\]"),
    ],
)
def test_impossible_guidance_is_named_at_construction(guidance, message):
    with pytest.raises(ValueError, match=message):
        config(guidance)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("guidence", "guidance"), ("guidance_", "guidance"), ("gate", "gates"), ("prune_heads", "pruned_heads")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_misspelt_settings_are_not_swallowed(kind, name, meant):
    with pytest.raises(ValueError, match=f"{CONFIGS[kind].__name__} has no '{name}'; did you mean '{meant}'"):
        CONFIGS[kind](**{name: {}})


def test_the_callers_heads_are_left_alone():
    given = {"gates": {"cross": {}}, "pruned_heads": {"decoder": {"1": [1, 0]}}}
    tiny_config("marian", **given)
    assert given == {"gates": {"cross": {}}, "pruned_heads": {"decoder": {"1": [1, 0]}}}


def test_classes_may_be_called_as_sizes_are():
    config = tiny_config("bert", id2label={0: "dim", 1: "num_layers"}, label2id={"dim": 0, "num_layers": 1})
    assert config.label2id == {"dim": 0, "num_layers": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_printed_configuration_shows_all_that_a_stock_one_shows_and_what_is_said_of_heads(kind):
    gates = {"encoder": {}} if kind == "marian" else {}
    shown = repr(tiny_config(kind, gates=gates))
    name, _, values = shown.partition(" ")
    assert name == f"Headwise{kind.capitalize()}Config"
    stock = json.loads(repr(stock_config(kind)).partition(" ")[2])
    assert stock.keys() | {"guidance", "gates", "pruned_heads", "hard_coded"} <= json.loads(values).keys()
    assert '"initial_log_alpha": 2.5' in shown
    assert '"row_mean"' in shown


@pytest.mark.parametrize(
    ("config", "size"),
    [(had.LstmConfig, "hidden_size"), (had.LstmSeq2SeqConfig, "readout_size"), (had.BowAttentionConfig, "key_size"),
     (had.ProxyConfig, "embedding_size")],
)  # fmt: skip
def test_a_printed_configuration_of_a_lexical_model_shows_its_sizes(config, size):
    assert f'"{size}": 7' in repr(config(**{size: 7}))


@pytest.mark.parametrize("kind", KINDS)
def test_configurations_are_equal_only_if_all_their_values_are(kind):
    size = "d_model" if kind == "marian" else "hidden_size"
    assert tiny_config(kind) == tiny_config(kind)
    assert tiny_config(kind) != tiny_config(kind, **{size: 32})
    assert tiny_config(kind) != tiny_config(kind, gates={"encoder": {}} if kind == "marian" else {})
