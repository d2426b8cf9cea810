# Licensed under the Apache License, Version 2.0.
import csv
import functools
import json
import operator

import pytest
import torch
from recipe_runs import Recipe
from tiny_models import tiny_config, vivid
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    RobertaConfig,
    RobertaModel,
)

from hf_attn_dynamics import (
    MapCorrelation,
    RelativeAttention,
    RelativePositions,
    attention_maps,
    correlate,
    global_contribution,
    local_contribution,
    map_types,
    observe,
    prune_heads,
)
from hf_attn_dynamics.analysis.attribution.claims import CLAIMS, NOT_METRICS, AttributionFindings
from hf_attn_dynamics.analysis.attribution.statistics import MAP_TYPES
from hf_attn_dynamics.data import embedded_trees, train_byte_level_bpe
from hf_attn_dynamics.recipes import attribute_heads


TEXTS = [tree.text for tree in embedded_trees()[:13]]
RECIPE = Recipe("attribute_heads", batch_size=2)
run, arguments = RECIPE.run, RECIPE.parse_flags
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
PICTURES = ("local", "positions", "centers", "global", "types", "examples")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Text, a headwise language model, one without some of its heads, and a decoder; one has no separator."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "text.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    (folder / "one.txt").write_text(TEXTS[0] + "\n", encoding="utf-8")
    tokenizer = train_byte_level_bpe(TEXTS, 300, kind="bert")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 70, "pad_token_id": tokenizer.pad_token_id}
    decoder = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_inner=24, n_positions=70)
    models = {
        "headwise": vivid(AutoModelForMaskedLM.from_config(tiny_config("bert", **sizes))),
        "pruned": vivid(prune_heads(BertModel(BertConfig(**SIZES, **sizes)), {1: [0, 3]})),
        "decoder": vivid(GPT2Model(decoder)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    models["headwise"].save_pretrained(folder / "no_separator")
    tokenizer.sep_token = None
    tokenizer.save_pretrained(folder / "no_separator")
    return folder


@pytest.fixture(scope="module")
def pairs(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "heads"
    return folder, run(folder, model=files / "headwise", data=files / "text.txt")


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "heads"
    return folder, run(folder, model=files / "headwise", data=files / "text.txt", pairs="false", max_length=25)


def test_everything_is_measured_and_written(pairs):
    folder, summary = pairs
    assert summary == json.loads((folder / "summary.json").read_text())
    # The last of 13 sentences has no partner.
    assert summary["sentences"] + summary["too_long"] == 6
    assert (summary["layers"], summary["heads"], summary["method"]) == (2, 8, "exact")
    assert list(summary["claims"]) == list(CLAIMS)
    assert {claim["holds"] for claim in summary["claims"].values()} == {None}
    few = f"{summary['sentences']} texts are too few; at least 20 are needed."
    assert summary["claims_not_judged"] == dict.fromkeys(CLAIMS, few)
    found = AttributionFindings.load(folder / "findings.json")
    assert {name: {"holds": None, **claim} for name, claim in found.claims().items()} == summary["claims"]
    rows = list(csv.DictReader((folder / "heads.csv").open(encoding="utf-8")))
    assert [(row["layer"], row["head"]) for row in rows] == [
        (str(layer), str(head)) for layer in range(2) for head in range(4)
    ]
    local = MapCorrelation.load(folder / "results" / "correlation_local.json")
    assert [float(row["pearson_local"]) for row in rows] == pytest.approx(local.pearson["encoder"].flatten().tolist())
    assert {row["type_attention"] for row in rows} <= set(MAP_TYPES)
    RelativeAttention.load(folder / "results" / "positions_global.json")
    types = json.loads((folder / "results" / "map_types.json").read_text())
    assert torch.tensor(types["attention_and_global"]).sum((2, 3)).eq(summary["sentences"]).all()
    for name in PICTURES:
        assert (folder / f"{name}.png").is_file()
        assert (folder / f"{name}.svg").is_file()


def test_the_report_has_everything_in_the_file(pairs):
    folder, _ = pairs
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == len(PICTURES)
    assert all(claim in html for claim in CLAIMS.values())
    assert html.count("not judged: ") == len(CLAIMS)


def test_figures_are_those_of_sentences_alone(files, alone):
    folder, summary = alone
    model, tokenizer = attribute_heads.load_model(*arguments(model=files / "headwise"))
    encoded = [torch.tensor([ids]) for ids in tokenizer(TEXTS)["input_ids"]]
    encoded = [ids for ids in encoded if ids.shape[1] <= 25]
    assert (summary["sentences"], summary["too_long"]) == (len(encoded), len(TEXTS) - len(encoded))
    found, types = {"local": [], "global": []}, 0
    for ids in encoded:
        batch = {"input_ids": ids}
        attention, whole = attention_maps(model, batch)["encoder"], global_contribution(model, batch)
        found["local"].append(correlate(attention, local_contribution(model, batch)))
        found["global"].append(correlate(attention, whole))
        one, two = (torch.nn.functional.one_hot(map_types(maps)[:, 0], 5) for maps in (attention, whole))
        types = types + one[..., None] * two[..., None, :]
    for name, parts in found.items():
        expected = functools.reduce(operator.add, parts)
        result = MapCorrelation.load(folder / "results" / f"correlation_{name}.json")
        for measure in ("pearson", "spearman", "rows", "constant"):
            pair = (getattr(one, measure)["encoder"] for one in (result, expected))
            torch.testing.assert_close(*pair, rtol=0, atol=1e-5)
    result = json.loads((folder / "results" / "map_types.json").read_text())["attention_and_global"]
    assert result == types.tolist()

    with torch.no_grad(), observe(model, RelativePositions(24, excluded_ids=[])) as seen:
        for ids in encoded:
            model(input_ids=ids)
    positions = RelativeAttention.load(folder / "results" / "positions_attention.json")
    for name in ("attention", "largest"):
        pair = (getattr(one, name)["encoder"] for one in (positions, seen.relative_positions))
        torch.testing.assert_close(*pair, rtol=0, atol=1e-6, equal_nan=True)


def test_attention_between_words_leaves_out_special_tokens(files, pairs):
    """Against sums over single pairs of tokens."""
    folder, summary = pairs
    model, tokenizer = attribute_heads.load_model(*arguments(model=files / "headwise"))
    sums, counts = torch.zeros(2, 4, 127, dtype=torch.float64), torch.zeros(127)
    for one, two in zip(TEXTS[::2], TEXTS[1::2]):
        encoded = tokenizer(one, two, return_tensors="pt")
        ids = encoded["input_ids"][0].tolist()
        if len(ids) > 64:
            continue
        words = [place for place, token in enumerate(ids) if token not in tokenizer.all_special_ids]
        maps = attention_maps(model, dict(encoded))["encoder"][:, 0].double()
        for query in words:
            whole = sum(maps[:, :, query, key] for key in words)
            for key in words:
                sums[:, :, key - query + 63] += maps[:, :, query, key] / whole
                counts[key - query + 63] += 1
    found = AttributionFindings.load(folder / "findings.json")
    expected = sums / counts
    result = found.positions["attention_between_words"].attention["encoder"]
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6, equal_nan=True)
    centers = (expected.nan_to_num() * torch.arange(-63, 64)).sum(-1) / expected.nansum(-1)
    claim = summary["claims"]["past_before_future"]
    assert claim["early_center_between_words"] == pytest.approx(centers[0].mean().item(), abs=1e-4)
    assert claim["late_center_between_words"] == pytest.approx(centers[1].mean().item(), abs=1e-4)


def test_contributions_by_the_spectral_norm(files, tmp_path):
    flags = {"data": files / "text.txt", "pairs": "false", "max_sentences": 2, "max_length": 64}
    summary = run(tmp_path / "heads", model=files / "headwise", **flags, norm="spectral")
    assert (summary["norm"], summary["method"]) == ("spectral", "exact")
    model, tokenizer = attribute_heads.load_model(*arguments(model=files / "headwise"))
    parts = []
    for text in TEXTS[:2]:
        batch = dict(tokenizer(text, return_tensors="pt"))
        attention = attention_maps(model, batch)["encoder"]
        parts.append(correlate(attention, global_contribution(model, batch, norm="spectral")))
    expected = functools.reduce(operator.add, parts).pearson.mean()
    assert summary["pearson"]["global"] == pytest.approx(expected, abs=1e-5)


def test_the_spectral_norm_needs_whole_jacobians(files, tmp_path, refused):
    with refused("norm spectral needs whole Jacobians, of which probes are only some directions"):
        run(
            tmp_path / "heads", model=files / "headwise", data=files / "text.txt", norm="spectral", method="probes",
            probes=4,
        )  # fmt: skip
    with refused("norm must be frobenius or spectral, got 'nuclear'"):
        run(tmp_path / "heads", model=files / "headwise", data=files / "text.txt", norm="nuclear")


def test_in_the_first_layer_local_and_global_are_the_same(pairs):
    folder, _ = pairs
    local, whole = (
        MapCorrelation.load(folder / "results" / f"correlation_{name}.json").pearson["encoder"]
        for name in ("local", "global")
    )
    torch.testing.assert_close(local[0], whole[0], rtol=0, atol=1e-5)
    assert not torch.allclose(local[1], whole[1], rtol=0, atol=1e-2)


def test_a_run_stopped_while_its_model_is_trained_goes_on(files, tmp_path, monkeypatch, capsys):
    asked = []

    def train(folder, seed, disable_tqdm):
        asked.append(folder)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return files / "headwise"

    monkeypatch.setattr("hf_attn_dynamics.recipes.reading.demonstration_model", train)
    settings = {"data": files / "text.txt", "max_sentences": 4}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "heads", **settings)
    with pytest.raises(SystemExit):
        run(tmp_path / "heads", **settings)
    assert (
        "already holds files; name another folder, or continue the run with --resume true" in capsys.readouterr().err
    )
    summary = run(tmp_path / "heads", **settings, resume="true")
    assert asked == [tmp_path / "heads" / "pretraining"] * 2
    assert (summary["model"], summary["sentences"]) == ("the demonstration", 2)


def test_progress_is_told_of_each_text(files, pairs, tmp_path, monkeypatch):
    told = []

    class Bar:
        def __init__(self, total, initial, **settings):
            self.n = initial
            told.append((total, initial))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def update(self, n=1):
            self.n += n
            told.append(n)

    monkeypatch.setattr(attribute_heads, "tqdm", Bar)
    run(tmp_path / "heads", model=files / "headwise", data=files / "text.txt")
    number = pairs[1]["sentences"]
    assert told[0] == (number, 0)
    assert told.count(1) == number
    assert {*told[1:]} <= {0, 1}


def test_claims_of_resampled_texts_depend_neither_on_batches_nor_on_a_stop(files, tmp_path, monkeypatch):
    settings = {"model": files / "headwise", "pairs": "false", "max_sentences": 24}
    one = run(tmp_path / "one", **settings, batch_size=1)
    four = run(tmp_path / "four", **settings, batch_size=4)
    assert one["sentences"] == four["sentences"] == 24
    for name, claim in one["claims"].items():
        other = four["claims"][name]
        assert (claim["holds"], claim.get("holds_in")) == (other["holds"], other.get("holds_in"))
        assert claim["intervals"].keys() == other["intervals"].keys() == claim.keys() - {*NOT_METRICS}
        for metric, bounds in claim["intervals"].items():
            assert bounds == (None if bounds is None else pytest.approx(other["intervals"][metric], abs=1e-5))
    widths = [
        high - low for claim in one["claims"].values() for low, high in filter(None, claim["intervals"].values())
    ]
    assert max(widths) > 0.01

    whole, calls = attribute_heads.Measurement.sums, []

    def sums(*arguments):
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(attribute_heads.Measurement, "sums", sums)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", **settings, batch_size=4)
    resumed = run(tmp_path / "stopped", **settings, batch_size=4, resume="true")
    assert resumed["claims"] == four["claims"]
    # One call of each run is a check on a short text; two batches were saved.
    assert len(calls) == 4 + 1 + 4
    found = [AttributionFindings.load(tmp_path / name / "findings.json") for name in ("stopped", "four")]
    assert found[0] == found[1]


def test_pairs_may_be_in_two_columns(files, tmp_path):
    rows = list(zip(TEXTS[:4], TEXTS[4:8]))
    names = "premise\thypothesis\n"
    (tmp_path / "dev.tsv").write_text(names + "".join(f"{a}\t{b}\n" for a, b in rows) + " \tblank\n")
    (tmp_path / "bare.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in rows))
    settings = {"model": files / "headwise", "data": f"{tmp_path}/dev.tsv", "text_column": "premise"}
    args = attribute_heads.AttributeArguments(data=[f"{tmp_path}/dev.tsv"], max_examples=3,
                                              text_column="premise", text_pair_column="hypothesis")  # fmt: skip
    assert attribute_heads.read_texts(args) == rows[:3]
    by_place = {"data": [f"{tmp_path}/bare.tsv"], "text_column": "0", "text_pair_column": "1"}
    assert attribute_heads.read_texts(attribute_heads.AttributeArguments(**by_place)) == rows
    summary = run(tmp_path / "heads", **settings, text_pair_column="hypothesis", max_length=60)
    assert summary["sentences"] + summary["too_long"] == 4


def test_removed_heads_have_no_figures(files, tmp_path):
    settings = {"model": files / "pruned", "data": files / "text.txt", "max_sentences": 6}
    summary = run(tmp_path / "heads", **settings, method="probes", probes=4)
    assert (summary["heads"], summary["method"]) == (6, "probes")
    rows = list(csv.DictReader((tmp_path / "heads" / "heads.csv").open(encoding="utf-8")))
    removed = [(int(row["layer"]), int(row["head"])) for row in rows if row["pearson_global"] == "nan"]
    assert removed == [(1, 0), (1, 3)]
    empty = [row for row in rows if not row["type_attention"]]
    assert [row["center_attention"] for row in empty] == ["nan", "nan"]
    positions = RelativeAttention.load(tmp_path / "heads" / "results" / "positions_global.json")
    assert positions.attention["encoder"][1, [0, 3]].isnan().all()


def test_decoders_look_at_the_past_only(files, tmp_path):
    settings = {"model": files / "decoder", "data": files / "text.txt", "pairs": "false", "max_sentences": 3}
    summary = run(tmp_path / "heads", **settings)
    scores = MapCorrelation.load(tmp_path / "heads" / "results" / "correlation_local.json")
    assert list(scores.pearson) == ["decoder"]
    assert summary["claims"]["past_before_future"]["late_center"] < 0


# ---------------------------------------------------------------------------------------------------------------------
# Sentences and claims
# ---------------------------------------------------------------------------------------------------------------------


def test_pairs_are_sentences_in_turn(files):
    (args,) = arguments(data=files / "text.txt", max_examples=5)
    assert attribute_heads.read_texts(args) == [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[3])]


def test_a_folder_with_characters_only_has_a_tokenizer(tmp_path):
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "A": 4, "C": 5, "D": 6, "<mask>": 7}
    vivid(RobertaModel(RobertaConfig(**SIZES, vocab_size=8, max_position_embeddings=20))).save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "model" / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "proteins.txt").write_text("CADDXC\nACCA\n")
    settings = {"model": tmp_path / "model", "data": tmp_path / "proteins.txt", "pairs": "false"}
    assert run(tmp_path / "heads", **settings)["tokens"] == 6 + 2 + 4 + 2
    _, tokenizer = attribute_heads.load_model(*arguments(**settings))
    assert tokenizer("CADX")["input_ids"] == [0, 5, 4, 6, 3, 2]


def test_separators_end_segments(files):
    model, tokenizer = attribute_heads.load_model(*arguments(model=files / "headwise"))
    ids = tokenizer([("a b", "c"), ("a", "b")], padding=True, return_tensors="pt")
    batch, segments = attribute_heads.with_segments({"input_ids": ids["input_ids"]}, model, tokenizer)
    real = ids["attention_mask"].bool()
    assert torch.equal(segments[real], ids["token_type_ids"][real])
    assert batch["token_type_ids"].max() == 1
    tokenizer = AutoTokenizer.from_pretrained(files / "no_separator")
    assert not attribute_heads.segments_of(ids["input_ids"], tokenizer).any()


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "nowhere/at-all"}, "model 'nowhere/at-all' cannot be loaded"),
        ({"save_every": 0}, "save_every must be at least 1, got 0"),
        ({"min_length": 65}, "min_length is 65, but max_length 64"),
        ({"method": "exact", "probes": 8}, "probes=8 has no effect here; contributions to this model are"),
        ({"method": "probes", "probes": 17}, "probes must be a whole number from 2 to 16"),
        ({"min_length": 60}, " tokens, and the model is to read 60 to 64"),
        ({"data": "one.txt"}, "pairs need at least two sentences, got one; use --pairs false"),
        (
            {"text_pair_column": "b", "pairs": "false"},
            "needs --data with tables and --pairs true, but pairs is false",
        ),
        ({"model": "no_separator"}, "has no separator; use --pairs false"),
    ],
)
def test_bad_input_is_one_line(files, tmp_path, settings, message, refused):
    settings = {"model": "headwise", "data": "text.txt", **settings}
    settings |= {name: files / settings[name] for name in ("model", "data") if (files / settings[name]).exists()}
    with refused(message):
        run(tmp_path / "heads", **settings)
