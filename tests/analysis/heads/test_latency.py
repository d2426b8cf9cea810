"""Tables of seconds and FLOPs: method with a fake clock, exact FLOPs, stored tables and refused input."""

import functools
import inspect
import json
import random

import pytest
import torch
from stock_models import STOCK_MODELS, build_image_reader, build_stock
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertModel,
)

from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertModel
from hf_attn_dynamics.analysis.heads import latency, measuring
from hf_attn_dynamics.analysis.heads.latency import count_flops_table, measure_latency_table
from hf_attn_dynamics.models.cost_table import CostTable
from hf_attn_dynamics.models.head_pruning import prune_heads
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.unit_pruning import prune_units
from hf_attn_dynamics.models.unit_roles import locate_units


SIZES = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
SIZES |= {"num_hidden_layers": 3, "max_position_embeddings": 48}
IMAGES = {"clip-vision", "deit", "siglip-vision", "vit"}
# Their decoders have caches.
DECODERS = [
    name
    for name, (cls, _, settings) in STOCK_MODELS.items()
    if cls.endswith(("ForCausalLM", "ForConditionalGeneration", "MTModel", "LMHeadModel"))
]
MIXTURES = {"gpt-oss", "mixtral", "qwen2-moe", "qwen3-moe"}


def bert(cls=BertModel, **changes):
    return cls(BertConfig(**{**SIZES, **changes}))


def measured(model, batch=2, length=8, **arguments):
    return measure_latency_table(
        model, batch, length, **{"rounds": 3, "cache_dir": False, "progress": False, **arguments}
    )


class Clock:
    """A clock that stands still, except for forward passes of a class, which take as long as a test says."""

    def __init__(self, monkeypatch, model_class, seconds):
        self.now, self.passes, self.load = 0.0, [], lambda turn: 1.0
        stock = model_class.forward

        @functools.wraps(stock)
        def forward(model, *args, **kwargs):
            self.now += self.load(len(self.passes)) * seconds(*counts_of(model))
            self.passes.append(counts_of(model))
            return stock(model, *args, **kwargs)

        monkeypatch.setattr(model_class, "forward", forward)
        monkeypatch.setattr(measuring.time, "perf_counter", lambda: self.now)


def counts_of(model):
    """Numbers of heads and units in each layer."""
    return [len(layer.heads) for layer in locate_heads(model)], [len(layer.units) for layer in locate_units(model)]


HEADS = {0: 0.0, 1: 4.0, 2: 5.0, 3: 8.0, 4: 7.0}  # more heads may be faster
UNITS = {0: 0.0, 1: 0.5, 6: 1.0, 12: 3.0, 18: 4.5, 24: 8.0}


def additive(heads, units):
    return 10 + sum(HEADS[count] for count in heads) + sum(UNITS[count] for count in units)


def test_costs_of_blocks_are_those_that_whole_models_show(monkeypatch):
    Clock(monkeypatch, BertModel, additive)
    table = measured(bert(), points=5)
    assert (table.quantity, table.layers, table.phase) == ("seconds", {"encoder": 3}, "forward")
    assert table.rest == pytest.approx(10)
    assert table.dense == pytest.approx(additive([4] * 3, [24] * 3))
    assert dict(map(tuple, table.attention["encoder"])) == pytest.approx(HEADS)
    assert dict(map(tuple, table.feed_forward["encoder"])) == pytest.approx(UNITS)


def test_predicted_times_of_mixed_models_are_sums_of_their_blocks(monkeypatch):
    Clock(monkeypatch, BertModel, additive)
    table = measured(bert(), points=5)
    chosen = random.Random(0)
    for _ in range(6):
        heads, units = ([chosen.choice([*each]) for _ in range(3)] for each in (HEADS, UNITS))
        model = prune_heads(bert(), {layer: range(count, 4) for layer, count in enumerate(heads)})
        prune_units(model, {layer: range(count, 24) for layer, count in enumerate(units)})
        assert counts_of(model) == (heads, units)
        assert table.cost_of(model) == pytest.approx(additive(heads, units))
        assert table.speedup_of(model) == pytest.approx(additive([4] * 3, [24] * 3) / additive(heads, units))


def test_the_load_of_the_machine_does_not_change_ratios(monkeypatch):
    alone = Clock(monkeypatch, BertModel, additive)
    expected = measured(bert(), points=3)
    turns = len(alone.passes)
    monkeypatch.undo()
    # The machine becomes slower by and by: within a round, both models see nearly the same load.
    Clock(monkeypatch, BertModel, additive).load = lambda turn: 1.01 ** (turn // 2)
    table = measured(bert(), points=3)
    assert turns > 20
    assert table.dense > 1.05 * expected.dense
    for part in ("heads", "units", "blocks"):
        assert table.largest_speedup()[part] == pytest.approx(expected.largest_speedup()[part], rel=0.02)


def test_each_copy_alternates_with_the_dense_model(monkeypatch):
    clock = Clock(monkeypatch, BertModel, additive)
    measured(bert(), points=2, rounds=3)
    dense, empty = ([4] * 3, [24] * 3), ([0] * 3, [0] * 3)
    headless, unitless = ([0] * 3, [24] * 3), ([4] * 3, [0] * 3)
    # A model without heads is also one with nothing but its units: it is measured once.
    for start, pruned in ((0, headless), (10, unitless), (20, empty)):
        warm_up = [dense, pruned] * measuring.WARM_UP
        assert clock.passes[start : start + 10] == [*warm_up, dense, pruned, pruned, dense, dense, pruned]
    assert len(clock.passes) == 30


def test_both_ends_are_exact_where_times_do_not_add_up(monkeypatch):
    Clock(monkeypatch, BertModel, lambda heads, units: 10 + (sum(heads) + sum(units)) ** 0.9)
    table = measured(bert(), points=3)
    assert table.dense == pytest.approx(10 + 84**0.9)
    assert table.rest == pytest.approx(10)
    assert table.cost({}, {}) / table.rest == pytest.approx(table.largest_speedup()["blocks"])


def test_a_block_costs_the_mean_of_what_it_adds_to_the_other_blocks_and_to_none(monkeypatch):
    # Each head takes a second, and a 24th more for each unit of its layer.
    Clock(monkeypatch, BertModel, lambda heads, units: 10 + sum(h * (1 + u / 24) + u for h, u in zip(heads, units)))
    table = measured(bert(), points=3)
    # Beside all units 2 seconds a head, beside none 1 second; a unit adds 1 + 4/24 seconds or 1.
    assert table.attention["encoder"] == [[count, pytest.approx(1.5 * count)] for count in (0, 1, 2, 4)]
    for count, cost in table.feed_forward["encoder"]:
        assert cost == pytest.approx(count * (1 + 2 / 24))
    assert table.dense == pytest.approx(10 + 3 * (4 * 2 + 24))


def test_blocks_that_seem_to_save_time_cost_nothing(monkeypatch):
    Clock(monkeypatch, BertModel, lambda heads, units: 50 - sum(heads) + sum(units))
    table = measured(bert(), points=3)
    assert {cost for _, cost in table.attention["encoder"]} == {0}
    assert table.rest == pytest.approx(50)
    assert table.dense == pytest.approx(50 - 12 + 72)
    assert table.largest_speedup()["heads"] == 1


def test_shared_layers_cost_all_their_runs(monkeypatch):
    Clock(monkeypatch, AlbertModel, lambda heads, units: 6 * (1 + 2 * sum(heads) + 0.5 * sum(units)))
    model = AlbertModel(AlbertConfig(**{**SIZES, "num_hidden_layers": 6}, embedding_size=8))
    table = measured(model, points=2)
    assert table.layers == {"encoder": 1}
    assert table.attention["encoder"][-1] == [4, pytest.approx(48)]
    assert table.cost_of(prune_units(prune_heads(model, {0: [1]}), {0: range(12)})) == pytest.approx(6 * (1 + 6 + 6))


def test_a_warning_says_that_the_machine_is_too_noisy(monkeypatch, caplog):
    clock = Clock(monkeypatch, BertModel, additive)
    measured(bert(), points=2, rounds=9)
    assert not caplog.records
    draw = random.Random(0)
    clock.load = lambda turn: draw.uniform(1, 5)
    measured(bert(), points=2, rounds=9)
    assert "% of the dense model's time. Measure more than 9 rounds" in caplog.text


@pytest.mark.parametrize(("name", "kinds"), [("t5", ["encoder", "decoder", "cross"]), ("llama", ["decoder"])])
def test_kinds_of_sites_and_groups_of_heads_have_their_own_grids(name, kinds):
    model = build_stock(name)
    table = measured(model, points=3, rounds=1)
    assert [*table.attention] == kinds
    assert [*table.feed_forward] == [kind for kind in kinds if kind != "cross"]
    # Six query heads share three key/value heads.
    expected = [0, 2, 4, 6] if name == "llama" else [0, 1, 2, 4]
    assert [heads for heads, _ in table.attention["decoder"]] == expected
    assert [units for units, _ in table.feed_forward["decoder"]] == [0, 1, 12, 24]


def test_a_real_measurement_has_the_setting_of_the_machine():
    model = bert()
    table = measured(model, points=3, rounds=2, threads=1)
    assert table.dense >= table.rest > 0
    assert (table.threads, table.batch, table.length, table.dtype) == (1, 2, 8, "float32")
    assert table.kernel == model.config._attn_implementation
    table.check_fits(model, device="cpu", batch=2, length=8, phase="forward", dtype=torch.float32, threads=1)
    assert "BertModel, batch of 2 × 8 tokens, float32, sdpa, cpu (" in str(table)


def test_nothing_is_changed():
    model = prune_heads(bert(), {0: [1]}).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    measured(model, points=2, rounds=1, threads=threads + 1)
    count_flops_table(model)
    assert torch.get_num_threads() == threads
    assert torch.get_rng_state().equal(state)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert model.config.pruned_heads == {0: [1]}


def test_gated_and_pruned_models_have_the_table_of_the_dense_one(monkeypatch):
    gated = HeadwiseBertModel(HeadwiseBertConfig(**SIZES, gates={}, guidance={"heads": {"prev": [0]}}))
    pruned = prune_units(prune_heads(bert(), {0: [1], 2: [0, 1, 2, 3]}), {1: range(24)})
    assert count_flops_table(gated) == count_flops_table(pruned) == count_flops_table(bert())
    tables = []
    for model in (gated, pruned, bert()):
        with monkeypatch.context() as patch:
            Clock(patch, type(model), additive)
            tables.append(measured(model))
    assert tables[0] == tables[1] == tables[2]


def test_mixtures_of_experts_have_heads_only():
    table = count_flops_table(build_stock("mixtral"))
    assert table.feed_forward == {}
    assert table.largest_speedup(["heads"])["heads"] > 1
    assert "units" not in str(table)


def mixed(model, seed=0):
    """Removes a random number of heads and units from each layer, and one block of each kind as a whole."""
    chosen = random.Random(seed)
    heads, units = {}, {}
    for layer in locate_heads(model):
        gone = layer.groups() if layer.site.layer == 1 else chosen.sample(layer.groups(), chosen.randrange(3))
        heads.setdefault(layer.site.kind, {})[layer.site.layer] = sorted(sum(gone, []))
    prune_heads(model, heads)
    try:
        located = locate_units(model)
    except ValueError:
        return model
    for layer in located:
        number = layer.num_units if layer.site.layer == 0 else chosen.randrange(layer.num_units)
        units.setdefault(layer.site.kind, {})[layer.site.layer] = chosen.sample(layer.units, number)
    return prune_units(model, units)


@pytest.mark.parametrize("name", STOCK_MODELS)
def test_flops_of_mixed_models_are_exact(name):
    model = build_stock(name)
    length = None if name in IMAGES else 7
    table = count_flops_table(model, batch=2, length=length)
    assert table.length == length
    mixed(model)
    with torch.inference_mode():
        counted = measuring.count_flops(model, measuring.example_inputs(model, 2, length))
    assert table.cost_of(model) == counted < table.dense
    assert (table.feed_forward == {}) == (name in MIXTURES)


# SmolLM3, Gemma 2 and 3 and GPT-OSS have layers whose windows hold fewer tokens of the cache.
@pytest.mark.parametrize("name", sorted({*DECODERS} - {"gemma2", "gemma3", "gpt-oss", "smollm3"}))
def test_flops_of_a_decoded_token_are_exact(name):
    model = build_stock(name)
    table = count_flops_table(model, batch=2, length=9, phase="decode")
    assert (table.length, table.phase) == (9, "decode")
    assert table.dense < count_flops_table(model, batch=2, length=9).dense / 4
    assert table.attention.get("encoder", [[0, 0], [4, 0]]) == [[0, 0], [4, 0]]
    mixed(model)
    counted = latency._inputs(model, {"batch": 2, "length": 9, "phase": "decode"}, torch.device("cpu"))
    with torch.inference_mode():
        arguments = measuring.decoding_inputs(model, counted)()
        assert table.cost_of(model) == measuring.count_flops(model, arguments)


def test_flops_need_no_memory_unless_values_matter(monkeypatch):
    devices = []
    stock = latency._counted
    monkeypatch.setattr(
        latency, "_counted", lambda *arguments: devices.append(arguments[-1].type) or stock(*arguments)
    )
    large = {**SIZES, "hidden_size": 2**16, "intermediate_size": 2**18}
    with torch.device("meta"):
        model = bert(**large)
    assert count_flops_table(model).dense > 10**13
    assert devices == ["meta"]
    # Reads the last token, the end of the sentence.
    sides = {f"{side}_{name}": 4 for side in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim")}
    config = BartConfig(vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, **sides, eos_token_id=2)
    assert count_flops_table(BartForSequenceClassification(config), length=5).dense > 0
    assert devices[1:] == ["meta", "cpu"]


@pytest.fixture
def decoded(monkeypatch):
    """Records the tokens and the length of the cache of each pass of a class."""

    def record(model_class):
        stock, seen = model_class.forward, []

        @functools.wraps(stock)
        def forward(model, *args, **kwargs):
            bound = inspect.signature(stock).bind(model, *args, **kwargs).arguments
            ids = bound.get("decoder_input_ids", bound.get("input_ids"))
            cache = bound.get("cache")
            seen.append((tuple(ids.shape), 0 if cache is None else cache.get_seq_length()))
            return stock(model, *args, **kwargs)

        monkeypatch.setattr(model_class, "forward", forward)
        return seen

    return record


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "t5", "marian", "whisper"])
def test_the_cache_does_not_grow_while_tokens_are_decoded(name, decoded):
    model = build_stock(name)
    seen = decoded(type(model))
    table = measured(model, batch=3, length=12, phase="decode", points=2, rounds=3)
    assert (table.length, table.phase) == (12, "decode")
    filling = [one for one in seen if one[1] == 0]
    # One pass fills the cache of the dense model, and one that of each copy: of nothing, without a kind of block, and
    # with nothing but that kind. With two kinds, the copy without one of them is that with nothing but the other one.
    kinds = len([kind for kind in table.layers if kind != "encoder"]) + 1
    has_encoder = "encoder" in table.layers
    copies = 1 + kinds + (kinds if kinds > 2 or has_encoder else 0)
    assert filling == [((3, 12), 0)] * (1 + copies)
    assert len(seen) == len(filling) + 2 * copies * (3 + measuring.WARM_UP)
    assert {one for one in seen if one[1]} <= {((3, 1), 12)} | ({((3, 1), 7)} if name == "gemma3" else set())


def test_an_encoder_costs_nothing_while_tokens_are_decoded():
    table = measured(build_stock("marian"), phase="decode", points=2, rounds=1)
    assert table.attention["encoder"] == [[0, 0.0], [4, 0.0]]
    assert table.feed_forward["encoder"] == [[0, 0.0], [24, 0.0]]


@pytest.fixture
def measurements(monkeypatch):
    """Counts measurements."""
    done, stock = [], latency._measured
    monkeypatch.setattr(latency, "_measured", lambda *arguments: done.append(1) or stock(*arguments))
    return done


def test_a_measured_table_is_stored(measurements, tmp_path):
    settings = {"points": 2, "rounds": 1, "cache_dir": tmp_path, "threads": 1}
    first = measured(bert(), **settings)
    assert measured(prune_heads(bert(), {0: [1]}), **settings) == first
    assert len(measurements) == 1
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("BertModel-")
    stored = json.loads(file.read_text())
    assert CostTable.from_dict(stored["table"]) == first
    assert stored["key"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 3},
        {"length": 9},
        {"points": 3},
        {"rounds": 2},
        {"threads": 2},
        {"model": bert(hidden_size=32)},
        {"model": bert().bfloat16()},
        {"model": bert(attn_implementation="eager")},
    ],
    ids=["batch", "length", "points", "rounds", "threads", "sizes", "dtype", "kernel"],
)
def test_a_stored_table_of_another_setting_is_not_used(changes, measurements, tmp_path):
    settings = {"model": bert(), "points": 2, "rounds": 1, "cache_dir": tmp_path, "threads": 1}
    measured(**settings)
    measured(**{**settings, **changes})
    assert len(measurements) == 2
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("name", ["torch", "transformers", "package", "device"])
def test_a_stored_table_of_another_version_or_device_is_not_used(name, monkeypatch, measurements, tmp_path):
    settings = {"points": 2, "rounds": 1, "cache_dir": tmp_path}
    measured(bert(), **settings)
    if name == "package":
        monkeypatch.setattr(latency, "__version__", "0")
    elif name == "device":
        monkeypatch.setattr(latency, "device_name", lambda device: "cpu (another)")
    else:
        monkeypatch.setattr(getattr(latency, name), "__version__", "0")
    measured(bert(), **settings)
    assert len(measurements) == 2


def test_a_file_with_another_key_or_without_a_table_is_replaced(measurements, tmp_path):
    settings = {"points": 2, "rounds": 1, "cache_dir": tmp_path}
    measured(bert(), **settings)
    (file,) = tmp_path.iterdir()
    whole = json.loads(file.read_text())
    for text in ("{", "{}", "null", json.dumps({**whole, "key": {**whole["key"], "batch": 7}})):
        before = len(measurements)
        file.write_text(text)
        table = measured(bert(), **settings)
        assert len(measurements) == before + 1
        assert CostTable.from_dict(json.loads(file.read_text())["table"]) == table


def test_a_table_that_cannot_be_stored_is_returned_with_a_warning(measurements, tmp_path, caplog):
    (tmp_path / "file").touch()
    table = measured(bert(), points=2, rounds=1, cache_dir=tmp_path / "file")
    assert table.quantity == "seconds"
    assert "The table was not kept" in caplog.text
    assert "Choose a writable cache_dir, or False for none." in caplog.text


def test_tables_are_stored_in_the_cache_of_the_hub(monkeypatch, measurements, tmp_path):
    monkeypatch.setattr(latency, "HF_HOME", str(tmp_path))
    measured(bert(), points=2, rounds=1, cache_dir=None)
    assert len([*(tmp_path / "hf_attn_dynamics" / "latency").iterdir()]) == 1
    measured(bert(), points=2, rounds=1, cache_dir=False)
    assert len(measurements) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch must be an integer greater than 0, got 0"),
        ({"length": 1.5}, r"length must be an integer greater than 0, got 1\.5"),
        ({"rounds": True}, "rounds must be an integer greater than 0, got True"),
        ({"threads": 0}, "threads must be an integer greater than 0, got 0"),
        ({"points": 1}, "points must be at least 2, for none and all, got 1"),
        ({"phase": "train"}, "phase must be one of forward, decode, got 'train'"),
        ({"length": 49}, "length is 49, but BertModel has positions for 48 tokens"),
        (
            {"phase": "decode"},
            "phase='decode' needs a model that generates text with a cache, which BertModel does not",
        ),
        ({"cache_dir": True}, "cache_dir must be a folder, None for the default one, or False for none, got True"),
    ],
)
def test_impossible_arguments_are_refused_before_work_starts(arguments, message, measurements):
    with pytest.raises(ValueError, match=message):
        measured(bert(), **arguments)
    assert not measurements


def test_a_decoder_needs_a_position_for_the_next_token():
    assert count_flops_table(build_stock("gpt2", n_positions=16), phase="decode").length == 15
    with pytest.raises(ValueError, match="length is 17, but GPT2LMHeadModel has positions for 16 tokens"):
        measured(build_stock("gpt2", n_positions=16), length=16, phase="decode")


def test_images_have_no_length():
    assert count_flops_table(build_stock("vit")).length is None
    with pytest.raises(ValueError, match="length=8: ViTForImageClassification reads images of a fixed size"):
        measured(build_stock("vit"))


def test_models_that_cannot_be_measured_are_refused():
    quantized = bert()
    quantized.is_quantized = True
    with pytest.raises(ValueError, match="model is a quantized BertModel, whose parameters"):
        measured(quantized)
    with pytest.raises(ValueError, match="model is a quantized BertModel, whose parameters"):
        count_flops_table(quantized)
    dispatched = bert()
    dispatched.hf_device_map = {"": 0}
    with pytest.raises(ValueError, match="a model with a device map is on several devices, or offloaded"):
        measured(dispatched)
    with pytest.raises(ValueError, match="cannot make inputs for LlavaForConditionalGeneration"):
        measured(build_image_reader("llava")[0])
    with pytest.raises(ValueError, match="model is a Linear, which cannot be built"):
        measured(torch.nn.Linear(2, 2))
    uneven = bert()
    layer = uneven.encoder.layer[1]
    layer.intermediate.dense, layer.output.dense = torch.nn.Linear(16, 12), torch.nn.Linear(12, 16)
    with pytest.raises(ValueError, match="the encoder layers have 24 or 12 units; cost tables need the same number"):
        measured(uneven)
