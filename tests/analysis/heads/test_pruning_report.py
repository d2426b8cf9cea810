import copy
import json
import platform
import struct
import textwrap
from collections import Counter

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from fresh_processes import python
from stock_models import STOCK_MODELS, build_image_reader, build_stock
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperModel,
)

from hf_attn_dynamics import (
    HeadwiseBertConfig,
    HeadwiseBertForMaskedLM,
    HeadwiseLlamaConfig,
    HeadwiseLlamaForCausalLM,
    prune_layers,
)
from hf_attn_dynamics.analysis.heads import measuring
from hf_attn_dynamics.analysis.heads.pruning_report import head_report
from hf_attn_dynamics.models.added_biases import add_output_biases
from hf_attn_dynamics.models.head_pruning import prune_heads
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.loaded_weights import stored_numbers
from hf_attn_dynamics.models.unit_pruning import prune_units


WIDTH, INNER, HEAD_DIM = 16, 24, 4
SIZES = {"vocab_size": 40, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
SIDES = {
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": INNER for side in ("encoder", "decoder")},
    "d_model": WIDTH,
    "vocab_size": 40,
    "pad_token_id": 1,
    "decoder_start_token_id": 1,
}


def bert(cls=BertModel):
    return cls(BertConfig(**SIZES, intermediate_size=INNER, max_position_embeddings=48))


def t5():
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=40, d_model=WIDTH, d_kv=HEAD_DIM, d_ff=INNER, num_layers=2, num_heads=4, **ids)
    )


def marian():
    return MarianMTModel(MarianConfig(**SIDES, max_position_embeddings=48))


def vit():
    return ViTModel(ViTConfig(**SIZES, intermediate_size=INNER, image_size=12, patch_size=4))


def whisper():
    special = {"bos_token_id": 2, "eos_token_id": 2}
    return WhisperModel(
        WhisperConfig(**SIDES, **special, num_mel_bins=6, max_source_positions=10, max_target_positions=20)
    )


def quick(model, **arguments):
    return head_report(model, **{"latency": False, **arguments})


def bert_flops(kept, batch, length, width=WIDTH, inner=INNER):
    """Two for each multiplication of queries, keys, values, outputs, scores, sums of values, and two feed-forwards."""
    tokens = batch * length
    total = 0
    for heads in kept:
        total += 4 * 2 * tokens * width * heads * HEAD_DIM
        total += 2 * 2 * tokens * length * heads * HEAD_DIM
        total += 2 * 2 * tokens * width * inner
    return total


def test_flops_are_those_of_the_matrix_products_of_all_layers():
    model = prune_heads(BertModel(bert().config, add_pooling_layer=False), {0: [1], 1: [0, 1, 2, 3]})
    whole = BertModel(bert().config, add_pooling_layer=False)
    report = quick(model, batch=3, length=11, dense=whole)
    assert report.flops_dense == bert_flops([4, 4], 3, 11)
    assert report.flops_pruned == bert_flops([3, 0], 3, 11)
    assert report.flops_ratio == bert_flops([3, 0], 3, 11) / bert_flops([4, 4], 3, 11)


def test_flops_do_not_depend_on_the_kernel():
    model = prune_heads(bert(), {0: [1, 2]})
    counts = set()
    for kernel in ("eager", "sdpa"):
        model.set_attn_implementation(kernel)
        counts.add(quick(model, batch=2, length=8).flops_pruned)
        assert model.config._attn_implementation == kernel
    assert len(counts) == 1


def test_what_a_head_holds_is_gone():
    report = quick(prune_heads(bert(), {0: [1], 1: [0, 2, 3]}))
    of_a_head = 3 * (WIDTH + 1) * HEAD_DIM + HEAD_DIM * WIDTH
    assert report.parameters_dense == bert().num_parameters()
    assert report.parameters_pruned == report.parameters_dense - 4 * of_a_head
    assert report.bytes_dense - report.bytes_pruned == 4 * 4 * of_a_head
    assert (report.heads_total, report.heads_kept, report.layers) == (8, 4, {"encoder": [3, 1]})
    assert report.layers_dense == {"encoder": [4, 4]}


def bytes_of_tensors(folder):
    """Size of a file without its header."""
    data = (folder / "model.safetensors").read_bytes()
    return len(data) - 8 - struct.unpack("<Q", data[:8])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "build", [lambda: bert(BertForMaskedLM), t5, marian, vit, whisper], ids=["bert", "t5", "marian", "vit", "whisper"]
)
def test_bytes_are_those_of_a_saved_file(build, dtype, tmp_path):
    torch.manual_seed(0)
    model = build().to(dtype)
    model.save_pretrained(tmp_path / "dense")
    several = "encoder" in quick(model).layers and len(quick(model).layers) > 1
    prune_heads(model, {"decoder": {0: [0, 1]}} if several else {0: [0, 1]})
    model.save_pretrained(tmp_path / "pruned")
    report = quick(model)
    assert report.bytes_dense == bytes_of_tensors(tmp_path / "dense")
    assert report.bytes_pruned == bytes_of_tensors(tmp_path / "pruned")
    assert report.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("build", "inputs", "layers"),
    [
        (marian, "input_ids 2 × 9, attention_mask 2 × 9, decoder_input_ids 2 × 9", ["encoder", "decoder", "cross"]),
        (t5, "input_ids 2 × 9, attention_mask 2 × 9, decoder_input_ids 2 × 9", ["encoder", "decoder", "cross"]),
        (lambda: BartForSequenceClassification(BartConfig(**SIDES, eos_token_id=2, forced_eos_token_id=None)),
         "input_ids 2 × 9, attention_mask 2 × 9, decoder_input_ids 2 × 9", ["encoder", "decoder", "cross"]),
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=WIDTH, n_layer=1, n_head=4, n_positions=16,
                                            bos_token_id=2, eos_token_id=2)),
         "input_ids 2 × 9, attention_mask 2 × 9", ["decoder"]),
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=INNER, num_key_value_heads=2)),
         "input_ids 2 × 9, attention_mask 2 × 9", ["decoder"]),
        (lambda: AlbertModel(AlbertConfig(**SIZES, embedding_size=8, intermediate_size=INNER)),
         "input_ids 2 × 9, attention_mask 2 × 9", ["encoder"]),
        (whisper, "input_features 2 × 6 × 20, decoder_input_ids 2 × 9", ["encoder", "decoder", "cross"]),
    ],
    ids=["marian", "t5", "bart", "gpt2", "llama", "albert", "whisper"],
)  # fmt: skip
def test_models_of_text_and_speech_get_inputs_for_both_sides(build, inputs, layers):
    report = quick(build(), batch=2, length=9)
    assert report.inputs == inputs
    assert list(report.layers) == layers
    assert (report.batch, report.length) == (2, 9)
    assert report.flops_dense == report.flops_pruned > 0


def test_images_have_a_size_of_their_own():
    report = quick(prune_heads(vit(), {0: [1]}), batch=2)
    assert (report.inputs, report.batch, report.length) == ("pixel_values 2 × 3 × 12 × 12", 2, None)
    assert report.flops_pruned < report.flops_dense
    with pytest.raises(ValueError, match="length=9: ViTModel reads images"):
        quick(vit(), length=9)


def test_inputs_can_be_given():
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    report = quick(prune_heads(bert(), {0: [1]}), inputs=inputs)
    assert (report.inputs, report.batch, report.length) == ("input_ids 1 × 3", 1, 3)
    with pytest.raises(ValueError, match="leave out batch and length, or inputs"):
        quick(bert(), inputs=inputs, batch=2)


def test_sentences_are_as_long_as_positions_allow():
    assert quick(bert()).length == 48
    config = RobertaConfig(**SIZES, intermediate_size=INNER, max_position_embeddings=34, pad_token_id=1)
    assert quick(RobertaModel(config), length=32).length == 32
    with pytest.raises(ValueError, match="length is 33, but RobertaModel has positions for 32 tokens"):
        quick(RobertaModel(config), length=33)
    with pytest.raises(ValueError, match="length is 49, but BertModel has positions for 48"):
        quick(bert(), length=49)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for what forward passes are said to take."""

    class Clock:
        now, calls = 0.0, []

        def slow(self, model, name, seconds):
            seconds = iter(seconds)

            def run(*_):
                self.calls.append(name)
                self.now += next(seconds, 100.0)

            model.register_forward_hook(run)

    clock = Clock()
    clock.calls = []
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock.now)
    return clock


def test_latencies_are_medians_of_turns_after_a_warm_up(clock):
    model, dense = prune_heads(bert(), {0: [1], 1: [0, 1, 2, 3]}), bert()
    # One pass is counted, two warm up, three are timed.
    clock.slow(dense, "dense", [50, 40, 30, 3, 9, 4])
    clock.slow(model, "pruned", [60, 45, 35, 1, 2, 7])
    report = head_report(model, batch=2, length=8, dense=dense, rounds=3)
    assert (report.latency_dense, report.latency_pruned, report.rounds) == (4, 2, 3)
    assert report.latency_ratio == 0.5
    assert report.latency_of_ideal == pytest.approx(2 / (report.flops_dense / report.flops_pruned))
    assert clock.calls[-6:] == ["dense", "pruned", "pruned", "dense", "dense", "pruned"]


def test_a_report_without_timing_says_so():
    report = quick(prune_heads(bert(), {0: [1]}))
    assert report.latency_dense is report.latency_pruned is report.latency_ratio is report.latency_of_ideal is None
    assert report.rounds == 0
    assert "ms" not in str(report)
    assert "Speed-up" not in str(report)


def test_everything_is_left_as_it_was():
    model = prune_heads(bert(BertForMaskedLM), {0: [1]}).train()
    model.bert.embeddings.eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    report = head_report(model, batch=2, length=8, rounds=1, threads=threads + 1)
    assert report.threads == threads + 1
    assert torch.get_num_threads() == threads
    assert torch.get_rng_state().equal(state)
    assert [module.training for module in model.modules()] == modes
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert model.config.pruned_heads == {0: [1]}
    model(torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()


def test_gates_are_in_both_models():
    config = HeadwiseBertConfig(**SIZES, intermediate_size=INNER, gates={}, pruned_heads={1: [0, 1]})
    report = quick(HeadwiseBertForMaskedLM(config), batch=2, length=8)
    assert report.layers == {"encoder": [4, 2]}
    of_a_head = 3 * (WIDTH + 1) * HEAD_DIM + HEAD_DIM * WIDTH
    # The gate of a head has one parameter.
    assert report.parameters_dense - report.parameters_pruned == 2 * (of_a_head + 1)


def test_a_summary_is_flat_and_json():
    report = head_report(prune_heads(bert(), {0: [1]}), batch=2, length=8, rounds=1)
    values = report.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert {
        "heads_total", "heads_kept", "parameters_dense", "parameters_pruned", "flops_dense", "flops_pruned",
        "bytes_dense", "bytes_pruned", "latency_dense", "latency_pruned", "latency_ratio", "flops_ratio",
        "latency_of_ideal", "device", "threads", "batch", "length", "layers",
    } <= set(values)  # fmt: skip
    assert values["device"].startswith("cpu (")


def test_a_table_shows_both_models_and_the_heads_of_each_layer():
    model = marian()
    prune_heads(model, {"encoder": {0: [0, 1, 2, 3]}, "cross": {0: [2]}})
    text = str(head_report(model, batch=2, length=8, rounds=1, threads=1))
    lines = text.splitlines()
    assert lines[0].split("|")[2].strip() == "dense"
    heads = next(line for line in lines if line.startswith("| heads"))
    assert [cell.strip() for cell in heads.split("|")[2:5]] == ["12", "7", "0.583"]
    assert "input_ids 2 × 8, attention_mask 2 × 8, decoder_input_ids 2 × 8, float32, cpu (" in text
    assert ", 1 thread, median of 1 interleaved rounds." in text
    assert [line.split() for line in lines[-3:]] == [
        ["encoder", "·", "=", "0", "of", "4"],
        ["decoder", "4", "=", "4", "of", "4"],
        ["cross", "3", "=", "3", "of", "4"],
    ]


def test_units_and_blocks_that_are_left_are_counted():
    model = prune_units(prune_heads(marian(), {"encoder": {0: [0, 1, 2, 3]}}), {"decoder": {0: range(20)}})
    report = head_report(model, batch=2, length=8, rounds=1)
    assert (report.units, report.units_dense) == (
        {"encoder": [24], "decoder": [4]},
        {"encoder": [24], "decoder": [24]},
    )
    assert (report.units_kept, report.units_total) == (28, 48)
    assert (report.blocks_kept, report.blocks_total) == (4, 5)
    lines = str(report).splitlines()
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:5]] for line in lines[:8]}
    assert cells["units"] == ["48", "28", "0.583"]
    assert cells["blocks"] == ["5", "4", "0.800"]
    assert lines[-3] == "Units kept in each layer:"
    assert [line.split() for line in lines[-2:]] == [
        ["encoder", "24", "=", "24", "of", "24"],
        ["decoder", "4", "=", "4", "of", "24"],
    ]
    html = report._repr_html_()
    assert "Heads kept in each layer" in html
    assert "Units kept in each layer" in html
    values = report.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert {"units_kept", "units_total", "blocks_kept", "blocks_total", "units", "units_dense"} <= set(values)


def test_what_a_unit_holds_is_gone():
    report = quick(prune_units(bert(), {0: [1, 2], 1: range(INNER)}), batch=3, length=11)
    of_a_unit = 2 * WIDTH + 1
    assert report.parameters_dense - report.parameters_pruned == (2 + INNER) * of_a_unit
    assert report.flops_dense - report.flops_pruned == (2 + INNER) * 4 * 33 * WIDTH


def test_a_report_of_heads_alone_has_no_rows_of_units():
    report = quick(prune_heads(bert(), {0: [1]}))
    assert (report.units_kept, report.units_total) == (2 * INNER, 2 * INNER)
    assert "units" not in str(report).lower()
    assert "blocks" not in str(report)
    mixture = build_stock("mixtral")
    assert quick(prune_heads(mixture, {0: [0, 1]})).units == {}


def test_a_dense_model_without_units_of_the_model_is_refused():
    with pytest.raises(
        ValueError, match=r"dense has the units {'encoder': \[23, 24\]}, which do not include all units"
    ):
        quick(bert(), dense=prune_units(bert(), {0: [5]}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch must be an integer greater than 0, got 0"),
        ({"length": 2.5}, "length must be an integer greater than 0, got 2.5"),
        ({"rounds": True}, "rounds must be an integer greater than 0, got True"),
        ({"threads": -1}, "threads must be an integer greater than 0, got -1"),
    ],
)
def test_impossible_numbers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        head_report(bert(), **arguments)


def test_a_dense_model_with_other_heads_is_refused():
    message = r"dense has the heads {'encoder': \[3, 4\]}, which do not include all heads of .*{'encoder': \[2, 4\]}"
    with pytest.raises(ValueError, match=message):
        head_report(prune_heads(bert(), {0: [0, 2]}), dense=prune_heads(bert(), {0: [1]}))


def test_a_model_is_compared_with_one_that_has_lost_heads_before():
    report = quick(prune_heads(bert(), {0: [1], 1: [0, 3]}), dense=prune_heads(bert(), {0: [1]}))
    assert (report.layers_dense, report.layers) == ({"encoder": [3, 4]}, {"encoder": [3, 2]})
    assert (report.heads_total, report.heads_kept) == (7, 5)


def test_a_model_that_reads_images_and_text_needs_inputs():
    model, inputs = build_image_reader("llava")
    with pytest.raises(ValueError, match="cannot make inputs for LlavaForConditionalGeneration"):
        head_report(model)
    prune_heads(model, {"encoder": {0: [1]}})
    assert head_report(model, inputs=inputs, latency=False).layers["encoder"] == [3, 4, 4]


def test_a_wrapped_model_cannot_be_built_with_all_its_heads():
    class Wrapper(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.config, self.device, self.main_input_name = model, model.config, model.device, "input_ids"

        def forward(self, input_ids):
            return self.model(input_ids)

    with pytest.raises(ValueError, match=r"Wrapper, which cannot be built .*merge_and_unload\(\)"):
        head_report(Wrapper(bert()), inputs={"input_ids": torch.tensor([[5, 6]])})


def test_a_model_of_other_inputs_needs_them():
    model = bert()
    model.main_input_name = "input_values"
    with pytest.raises(ValueError, match="cannot make inputs for BertModel, which reads 'input_values'; pass inputs="):
        head_report(model)


@pytest.mark.parametrize("name", STOCK_MODELS)
def test_numbers_and_bytes_are_those_of_the_file(name, tmp_path):
    model = build_stock(name)
    layer = locate_heads(model)[0]
    prune_heads(model, {layer.site.kind: {layer.site.layer: layer.heads[: layer.group_size]}})
    model.save_pretrained(tmp_path)
    stored = sum((stored_numbers(file) for file in tmp_path.glob("*.safetensors")), Counter())
    report = quick(model, batch=1)
    assert report.parameters_pruned == stored["F32"] == stored.total()
    assert report.bytes_pruned == 4 * stored.total()


@pytest.mark.parametrize("ids", [{"eos_token_id": 50256}, {"eos_token_id": [3, 4]}, {"eos_token_id": -1}, {}])
def test_the_end_of_a_sentence_may_be_outside_the_vocabulary(ids):
    config = GPT2Config(vocab_size=20, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=32, **ids)
    model = prune_heads(GPT2LMHeadModel(config), {0: [1]})
    assert quick(model, batch=2, length=8).heads_kept == 7


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_quantized_models_are_refused_by_name():
    # Deprecated, but people have such models.
    quantized = torch.ao.quantization.quantize_dynamic(bert(), {torch.nn.Linear})
    message = r"model is a quantized BertModel \(.+_packed_params.+\), whose parameters .* before quantization"
    with pytest.raises(ValueError, match=message):
        head_report(quantized)
    loaded = bert()
    loaded.is_quantized = True  # as Transformers marks what it loads in 4 or 8 bits
    with pytest.raises(ValueError, match="dense is a quantized BertModel, whose parameters"):
        head_report(bert(), dense=loaded)


@pytest.mark.parametrize(("name", "kind"), [("llama", "decoder"), ("marian", "decoder")])
def test_decoding_is_measured_with_a_cache(name, kind):
    dense = build_stock(name)
    layer = next(layer for layer in locate_heads(dense) if layer.site.kind == kind)
    heads = {layer.site.layer: layer.heads[: layer.group_size]}
    model = prune_heads(build_stock(name), heads if name == "llama" else {kind: heads})
    report = head_report(model, batch=2, length=9, rounds=1, dense=dense, phase="decode")
    assert (report.phase, report.batch, report.length) == ("decode", 2, 9)
    groups = layer.num_heads // layer.group_size
    layers = sum(one.site.kind == kind for one in locate_heads(dense))
    # Keys and values in float32.
    assert report.cache_bytes_dense == layers * groups * layer.head_dim * 2 * 4
    assert report.cache_bytes_pruned == report.cache_bytes_dense - layer.head_dim * 2 * 4
    assert report.flops_pruned < report.flops_dense
    assert report.flops_dense < head_report(model, batch=2, length=9, latency=False, dense=dense).flops_dense
    assert "cache per token" in str(report)
    assert "one token after 9 in the cache, batch of 2" in str(report)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase": "prefill"}, "phase must be one of forward, decode, got 'prefill'"),
        ({"phase": "decode", "inputs": {}}, "phase='decode' makes its own inputs; leave inputs out"),
        ({"phase": "decode"}, "phase='decode' needs a model that generates text with a cache"),
    ],
)
def test_phases_that_a_model_does_not_have_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        head_report(build_stock("bert"), **changes)


def test_a_model_that_was_trained_in_mixed_precision_is_measured_in_that_of_its_weights():
    dense = build_stock("bert")
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(build_stock("bert"))
    AcceleratorState._reset_state()  # later trainings have another precision
    seen = []
    for each in (dense, model):
        each.get_submodule("bert.encoder.layer.0.intermediate.dense").register_forward_hook(
            lambda module, inputs, output: seen.append(output.dtype)
        )
    head_report(model, batch=2, length=8, rounds=2, dense=dense)
    assert set(seen) == {torch.float32}
    # The model itself still computes in mixed precision.
    seen.clear()
    model(torch.tensor([[5, 6, 7]]))
    assert seen == [torch.bfloat16]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep freed memory by other rules")
def test_page_faults_of_large_tensors_are_not_measured():
    # In a new process, glibc returns such tensors to the system after each pass.
    code = """
        import resource, torch
        from hf_attn_dynamics.analysis.heads.measuring import alternating_times

        def model():
            large = [torch.ones(2 * 2**20) for _ in range(3)]
            seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

        seen = []
        alternating_times([model], [dict], 8, torch.device("cpu"))
        print(seen[-1] - seen[1])
    """
    # Each pass would touch 24 MB, which are 6,144 pages.
    [process] = python(["-c", textwrap.dedent(code)])
    assert int(process.stdout) < 6144, process.stderr


def test_a_dense_model_of_another_data_type_is_refused():
    model = build_stock("bert")
    with pytest.raises(ValueError, match=r"dense is torch.float32 and model is torch.bfloat16"):
        head_report(copy.deepcopy(model).bfloat16(), dense=model, latency=False)


def test_a_model_without_anything_left_is_reported():
    model = prune_layers(GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=4)).transformer, [0])
    report = head_report(model, batch=1, length=4, rounds=1)
    assert report.flops_pruned == 0
    assert "the removed FLOPs allow inf ×" in str(report)


def test_added_biases_are_not_those_of_the_dense_model():
    _, _, settings = STOCK_MODELS["llama"]
    model = HeadwiseLlamaForCausalLM(HeadwiseLlamaConfig(**settings))
    parameters = head_report(model, latency=False).parameters_dense
    add_output_biases(model)
    report = head_report(model, latency=False)
    assert report.parameters_dense == parameters < report.parameters_pruned
