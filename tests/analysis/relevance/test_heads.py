import json
import math

import pytest
import torch
from dense_relevance import dense_relevance
from stock_models import build_stock, stock_inputs
from tiny_models import ALL_GATES, KINDS, UNEVEN, batch_for, headwise_class, tiny_config
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertModel,
    RobertaForMaskedLM,
)

from hf_attn_dynamics import head_relevance, prune_heads, relevance_conservation
from hf_attn_dynamics.analysis.relevance.propagation import Propagation
from hf_attn_dynamics.analysis.relevance.rules import RULES, Rule
from hf_attn_dynamics.models.head_roles import locate_heads


HEADS = {
    "roberta": ["ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"],
    "bert": ["ForMaskedLM", "ForPreTraining"],
    "electra": ["ForPreTraining", "ForJointPreTraining", "ForSequenceClassification"],
    "marian": ["MTModel"],
}
CLASSES = [(kind, head) for kind in KINDS for head in HEADS[kind]]
SENTENCES = [[5, 9, 7, 12], [8], [4, 6, 11]]
CONSERVING = ("ratio", "alpha_beta")  # softmax keeps a part of the relevance by the other rule


@torch.no_grad()
def vivid(model):
    """In double precision, and with weights so large that heads differ; every bias is random."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.double().parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.requires_grad:
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model.eval()


def headwise(kind, head, **changes):
    torch.manual_seed(0)
    return vivid(headwise_class(kind, head)(tiny_config(kind, **changes)))


def without_biases(model):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    return model


def assert_same(scores, expected, rtol=1e-6, **options):
    assert list(scores) == list(expected)
    for kind in scores:
        torch.testing.assert_close(scores[kind], expected[kind], rtol=rtol, atol=1e-8, equal_nan=True, **options)


def hand_back(function, *neurons, relevance=1.0, rule="ratio", epsilon=1e-9):
    """Relevance of neurons, if each output of a function has the given relevance."""
    neurons = [torch.tensor(values, dtype=torch.float64).requires_grad_() for values in neurons]
    with Propagation(nn.Identity(), Rule(rule, epsilon)):
        outputs = function(*neurons)
    relevance = torch.as_tensor(relevance, dtype=torch.float64).expand_as(outputs)
    return [found.tolist() for found in torch.autograd.grad(outputs, neurons, relevance)]


# ---------------------------------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------------------------------


def test_summands_get_their_ratio_to_the_sum():
    # 1·2 − 3·1 + bias 3 = 2
    weight, bias = torch.tensor([[1.0, -3.0]]).double(), torch.tensor([3.0]).double()
    (found,) = hand_back(lambda x: nn.functional.linear(x, weight, bias), [[2.0, 1.0]])
    assert found[0] == pytest.approx([1.0, -1.5])
    first, second = hand_back(lambda x, y: x + y, [6.0, 6.0], [4.0, -4.0])
    assert (first, second) == (pytest.approx([0.6, 3.0]), pytest.approx([0.4, -2.0]))


def test_positive_summands_share_what_there_is_and_negative_ones_where_there_is_none():
    weight, bias = torch.tensor([[1.0, -3.0, -4.0]]).double(), torch.tensor([3.0]).double()
    (found,) = hand_back(lambda x: nn.functional.linear(x, weight, bias), [[2.0, 1.0, -5.0]], rule="alpha_beta")
    assert found[0] == pytest.approx([2 / 25, 0.0, 20 / 25])
    first, second = hand_back(lambda x, y: x + y, [6.0, 6.0, -6.0], [4.0, -4.0, -4.0], rule="alpha_beta")
    assert (first, second) == (pytest.approx([0.6, 1.0, 0.6]), pytest.approx([0.4, 0.0, 0.4]))


@pytest.mark.parametrize(
    ("rule", "second", "shares"),
    [("ratio", 1.0, (0.75, 0.25)), ("ratio", -1.0, (1.5, -0.5)), ("alpha_beta", -1.0, (0.75, 0.25))],
)
def test_factors_get_their_share_of_the_sum_of_factors(rule, second, shares):
    found = hand_back(lambda x, y: x * y, [3.0], [second], rule=rule)
    assert [share for (share,) in found] == pytest.approx(shares)


@pytest.mark.parametrize(
    "function",
    [lambda x: 5 * x, lambda x: x / 5, torch.tanh, nn.functional.gelu, lambda x: x.softmax(0)],
    ids=["times a constant", "over a constant", "tanh", "gelu", "softmax"],
)
def test_constant_factors_and_activations_leave_relevance_where_it_is(function):
    (found,) = hand_back(function, [0.5, -2.0], relevance=[0.25, 0.5])
    assert found == [0.25, 0.5]


def test_layer_norm_is_a_linear_map():
    # Mean 2.5, standard deviation 1.5: the first output is (4/2 − 1/2) / 1.5.
    norm = nn.LayerNorm(2, eps=0.0).double().requires_grad_(False)
    (found,) = hand_back(norm, [4.0, 1.0], relevance=[1.0, 0.0])
    assert found == pytest.approx([4 / 3, -1 / 3])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "function",
    [lambda x, y: x + y, lambda x, y: x * y, lambda x, y: x @ y],
    ids=["sum", "product", "matrix product"],
)
def test_nothing_is_lost_where_denominators_vanish(function, rule):
    first, second = [[1.0, -1.0], [0.0, 2.0]], [[-1.0, 1.0], [0.0, 1.0]]
    found = hand_back(function, first, second, rule=rule, epsilon=1e-3)
    assert math.fsum(torch.tensor(found, dtype=torch.float64).flatten().tolist()) == pytest.approx(4.0)


@pytest.mark.parametrize("rule", RULES)
def test_heads_have_the_relevance_of_explicit_weight_ratios(rule):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 6}
    model = vivid(BertForMaskedLM(BertConfig(vocab_size=11, **sizes, max_position_embeddings=8)))
    ids = torch.tensor([5, 7, 3])
    by_position = torch.stack([dense_relevance(model, ids, position, rule)[0] for position in range(3)])

    def relevance(**options):
        return head_relevance(model, {"input_ids": ids[None]}, rule, epsilon=1e-12, **options)["encoder"]

    def close(found, expected):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)

    close(relevance(normalize=None), by_position.mean(0))
    close(relevance(), (by_position / by_position.sum(-1, keepdim=True)).mean(0))
    close(relevance(normalize="absolute"), (by_position / by_position.abs().sum(-1, keepdim=True)).mean(0))


# ---------------------------------------------------------------------------------------------------------------------
# Conservation
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", CONSERVING)
@pytest.mark.parametrize(("kind", "head"), CLASSES)
def test_without_biases_all_relevance_arrives_at_the_inputs(kind, head, rule):
    found = relevance_conservation(without_biases(headwise(kind, head)), batch_for(kind, SENTENCES), rule)
    assert found.inputs == pytest.approx(1, abs=1e-6)
    assert found.biases == 0
    assert found.error < 1e-6


@pytest.mark.parametrize("rule", CONSERVING)
@pytest.mark.parametrize("name", ["bert", "roberta", "marian", "distilbert", "albert", "gpt2", "bart", "xlm-roberta"])
def test_inputs_and_biases_get_all_relevance(name, rule):
    model = build_stock(name).double()
    found = relevance_conservation(model, stock_inputs(model, 5), rule)
    # Shares may be millions, of either sign.
    assert found.error < 1e-12 * max(1e6, abs(found.inputs), abs(found.biases))
    assert found.biases != 0
    if rule == "alpha_beta":
        assert 0 < found.inputs < 1


LATER = ["llama", "mistral", "qwen3", "gemma2", "gpt-neox", "phi", "opt"]
# These compute softmax or rotations in single precision, where relevance that cancels is rounded.
ROUNDED = ["modernbert", "t5", "mt5"]


@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, rule) for name in LATER for rule in CONSERVING), *((name, "alpha_beta") for name in ROUNDED)],
)
def test_later_architectures_hand_on_all_relevance(name, rule):
    model = without_biases(build_stock(name).double())
    found = relevance_conservation(model, stock_inputs(model, 5), rule)
    assert found.inputs == pytest.approx(1, abs=1e-6)
    assert found.error < 1e-6
    assert found.biases == 0


class Scaled(nn.Module):
    """In the place of a norm by the root mean square: multiplies by the constants that it multiplied by."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.scales = norm, []

    def forward(self, inputs):
        if len(self.scales) < 2:  # the first pass notes, the second one checks
            self.scales.append(self.norm(inputs).detach() / inputs.detach())
        return inputs * self.scales[-1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "t5"])
def test_norms_by_the_root_mean_square_are_constant_factors(name, rule):
    model = build_stock(name).double()
    inputs = stock_inputs(model, 5)
    expected = head_relevance(model, inputs, rule)
    for parent in list(model.modules()):
        for child_name, child in parent.named_children():
            if child_name.endswith("norm") and type(child).__name__.endswith(("RMSNorm", "T5LayerNorm")):
                setattr(parent, child_name, Scaled(child))
    with torch.no_grad():
        model(**inputs)
    assert_same(head_relevance(model, inputs, rule), expected, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Predictions and heads
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("kind", "head"), CLASSES)
def test_padding_batches_and_chunks_change_nothing(kind, head, rule):
    model = headwise(kind, head)
    together = head_relevance(model, batch_for(kind, SENTENCES), rule)
    for layer in locate_heads(model):
        assert together[layer.site.kind][layer.site.layer].sum().item() == pytest.approx(1)
    alone = [batch_for(kind, [sentence]) for sentence in SENTENCES]
    assert_same(head_relevance(model, iter(alone), rule), together, rtol=1e-5)
    assert_same(head_relevance(model, batch_for(kind, SENTENCES), rule, chunk_size=4), together, rtol=1e-5)


def test_shares_by_alpha_beta_lie_between_zero_and_one():
    scores = head_relevance(headwise("marian", "MTModel"), batch_for("marian", SENTENCES), "alpha_beta")
    for table in scores.values():
        assert table.min() > 0
        assert table.max() < 1


def test_labels_say_which_positions_count():
    model, batch = headwise("bert", "ForMaskedLM"), batch_for("bert", SENTENCES[:2])
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, 1] = labels[1, 0] = 5
    one = {name: value[:1, : len(SENTENCES[0])] for name, value in {**batch, "labels": labels}.items()}
    other = {name: value[1:, : len(SENTENCES[1])] for name, value in {**batch, "labels": labels}.items()}
    halves = [head_relevance(model, part)["encoder"] for part in (one, other)]
    together = head_relevance(model, {**batch, "labels": labels})["encoder"]
    torch.testing.assert_close(together, (halves[0] + halves[1]) / 2, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(together, head_relevance(model, batch)["encoder"])


def test_a_decoder_reads_what_labels_say():
    model, batch = headwise("marian", "MTModel"), batch_for("marian", SENTENCES)
    real = batch.pop("decoder_attention_mask").bool()
    labels = batch.pop("decoder_input_ids").masked_fill(~real, -100)
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    expected = head_relevance(model, {**batch, "decoder_input_ids": shifted, "decoder_attention_mask": real})
    assert_same(head_relevance(model, {**batch, "labels": labels}), expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_removed_heads_have_no_score_and_those_with_a_closed_gate_none_to_share(kind, rule):
    model = headwise(kind, HEADS[kind][0], gates=ALL_GATES[kind])
    for site, gate in model.head_gates().items():
        gate.log_alpha.data.fill_(3.0)
        heads = UNEVEN[kind] if kind != "marian" else UNEVEN[kind][site.kind]
        gate.log_alpha.data[heads.get(site.layer, [])] = -3.0
    closed = head_relevance(model, batch_for(kind, SENTENCES), rule)
    prune_heads(model, UNEVEN[kind])
    pruned = head_relevance(model, batch_for(kind, SENTENCES), rule)
    for site in pruned:
        removed = pruned[site].isnan()
        assert removed.any()
        torch.testing.assert_close(closed[site][removed], torch.zeros_like(closed[site][removed]), rtol=0, atol=1e-9)
        torch.testing.assert_close(pruned[site][~removed], closed[site][~removed], rtol=1e-4, atol=1e-6)


def test_hard_coded_attention_hands_relevance_to_values():
    model = headwise("marian", "MTModel", guidance=None, hard_coded={"encoder": {}, "decoder": {}})
    batch = batch_for("marian", SENTENCES)
    assert relevance_conservation(without_biases(model), batch, "alpha_beta").inputs == pytest.approx(1)
    scores = head_relevance(model, batch, "alpha_beta")
    assert all(table.min() > 0 for table in scores.values())


def test_embeddings_may_be_given_in_place_of_tokens():
    model, batch = headwise("bert", "ForMaskedLM"), batch_for("bert", SENTENCES)
    embedded = model.get_input_embeddings()(batch["input_ids"])
    given = {"inputs_embeds": embedded, "attention_mask": batch["attention_mask"]}
    assert_same(head_relevance(model, given), head_relevance(model, batch))
    assert relevance_conservation(without_biases(model), given).inputs == pytest.approx(1)


@pytest.mark.parametrize("activation", ["gelu_new", "quick_gelu", "silu", "relu", "gelu_fast"])
def test_activations_are_passed_through_however_they_are_computed(activation):
    model = without_biases(headwise("bert", "ForMaskedLM", hidden_act=activation))
    found = relevance_conservation(model, batch_for("bert", SENTENCES))
    # Were they taken apart, constants in them would keep some.
    assert (found.inputs, found.biases) == (pytest.approx(1, abs=1e-6), 0)


# ---------------------------------------------------------------------------------------------------------------------
# What is left behind, and errors
# ---------------------------------------------------------------------------------------------------------------------


def state_of(model):
    return (
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [None if parameter.grad is None else parameter.grad.tolist() for parameter in model.parameters()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        [sorted(vars(module)) for module in model.modules()],
        model.config._attn_implementation,
        torch.overrides._get_current_function_mode(),
    )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_is_left_as_it_was(implementation):
    model, batch = headwise("roberta", "ForMaskedLM", attn_implementation=implementation), batch_for("roberta")
    expected = head_relevance(model, batch, "alpha_beta")
    model.train()
    model.roberta.embeddings.eval()
    model.roberta.encoder.layer[0].requires_grad_(False)
    model.lm_head.bias.grad = torch.full_like(model.lm_head.bias, 3.0)
    before = state_of(model)
    with torch.no_grad():
        assert_same(head_relevance(model, batch, "alpha_beta"), expected)
    assert state_of(model) == before
    for bad in ({**batch, "token_type_ids": "none"}, {"input_ids": batch["input_ids"], "labels": None, "unknown": 1}):
        with pytest.raises((TypeError, AttributeError, ValueError)):
            head_relevance(model, bad)
        assert state_of(model) == before


def test_two_hundred_calls_leave_no_hooks():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
    model = vivid(BertForMaskedLM(BertConfig(vocab_size=11, **sizes)))
    before = state_of(model)
    for _ in range(200):
        head_relevance(model, {"input_ids": torch.tensor([[5]])})
    assert state_of(model) == before


IDS = {"input_ids": torch.tensor([[5, 6, 7]])}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "gamma"}, "rule must be one of 'ratio', 'alpha_beta', 'attn_lrp', got 'gamma'"),
        ({"epsilon": 0}, "epsilon must be a number between 0 and 1, got 0"),
        ({"normalize": "l2"}, "normalize must be 'sum', 'absolute' or None, got 'l2'"),
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1, got 0"),
        ({"batch": []}, "batch is empty"),
        ({"batch": [IDS["input_ids"]]}, "batch 0 of batch must be a dictionary of tensors"),
        ({"batch": {**IDS, "attention_mask": torch.zeros(1, 3)}}, "batch has no prediction"),
        ({"batch": {**IDS, "labels": torch.full((1, 3), -100)}}, "batch has no prediction"),
    ],
)
def test_bad_input_is_named(options, message):
    model = headwise("bert", "ForMaskedLM")
    with pytest.raises(ValueError, match=message):
        head_relevance(model, **{"batch": IDS, **options})


def test_a_model_without_a_head_is_told_which_classes_have_one():
    with pytest.raises(ValueError, match="BertModel returns no logits.*AutoModelForMaskedLM"):
        head_relevance(BertModel(tiny_stock_bert()), IDS)


def test_answers_are_no_single_prediction():
    with pytest.raises(
        ValueError, match="BertForQuestionAnswering returns start_logits and end_logits, but relevance"
    ):
        head_relevance(BertForQuestionAnswering(tiny_stock_bert()), IDS)


def test_a_prediction_from_several_texts_is_refused():
    batch = {"input_ids": torch.arange(5, 13).view(2, 2, 2)}
    with pytest.raises(ValueError, match="BertForMultipleChoice has logits for 2 sentences, but the .* 0 reads 4"):
        head_relevance(BertForMultipleChoice(tiny_stock_bert()), batch)


def tiny_stock_bert():
    return BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixtral", r"operation 'topk' in MixtralTopKRouter \(at model.layers.0.mlp.gate\)"),
        ("mpnet", r"operation 'add_' in MPNetSelfAttention \(at .*\)"),
    ],
)
def test_modules_without_a_rule_are_named(name, message):
    model = build_stock(name)
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        head_relevance(model, stock_inputs(model, 5))
    assert state_of(model) == before


class GatedSum(nn.Module):
    """A layer whose operation has no rule."""

    def forward(self, hidden_states):
        return hidden_states.cumsum(1)


def test_a_layer_that_someone_added_is_named():
    model = headwise("bert", "ForMaskedLM")
    model.bert.encoder.layer[1].output.dropout = GatedSum()
    with pytest.raises(ValueError, match=r"'cumsum' in GatedSum \(at bert.encoder.layer.1.output.dropout\)"):
        head_relevance(model, IDS)


def test_numbers_that_are_not_finite_are_an_error():
    model = headwise("bert", "ForMaskedLM")
    model.bert.encoder.layer[0].output.dense.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="logits of batch 0 are not finite"):
        head_relevance(model, IDS)


def test_an_encoder_that_does_not_run_is_an_error():
    model, batch = headwise("marian", "MTModel"), batch_for("marian", SENTENCES)
    encoded = model.get_encoder()(batch.pop("input_ids"), attention_mask=batch["attention_mask"])
    with pytest.raises(ValueError, match="batch 0 does not run the encoder layer 0; pass input_ids"):
        head_relevance(model, {**batch, "encoder_outputs": encoded})


# ---------------------------------------------------------------------------------------------------------------------
# A trained model
# ---------------------------------------------------------------------------------------------------------------------


def test_relevance_of_a_trained_model_is_conserved(real_models):
    folder = real_models / "sapiens-vh"
    vocabulary = json.loads((folder / "vocab.json").read_text())
    model = RobertaForMaskedLM.from_pretrained(folder)
    ids = torch.tensor([[vocabulary[token] for token in ["<s>", *"QVQLVESGGGVVQPGRSLRLSCAAS", "</s>"]]])
    batch = {"input_ids": ids, "labels": torch.where(torch.arange(ids.shape[1]) % 9 == 4, ids, -100)}
    single = relevance_conservation(model, batch, "alpha_beta")
    assert single.error < 1e-5
    assert 0.2 < single.inputs < 0.8
    model = model.double()
    assert relevance_conservation(model, batch, "ratio").error < 1e-8
    scores = head_relevance(model, batch, "alpha_beta")["encoder"]
    torch.testing.assert_close(scores.sum(1), torch.ones(4, dtype=torch.float64))
    # Heads differ, above all those of the last layer.
    assert scores[-1].max() > 1.5 * scores[-1].min()


def test_progress_is_shown_within_a_batch(capsys):
    config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    head_relevance(BertForMaskedLM(config), {"input_ids": torch.randint(5, 30, (2, 7))}, progress=True)
    assert "7/7" in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["ratio", "alpha_beta", "attn_lrp"])
@pytest.mark.parametrize("normalize", ["sum", None])
def test_padding_on_the_left_of_rotary_embeddings_changes_no_relevance(rule, normalize):
    model = vivid(build_stock("llama"))
    ids = torch.tensor([[5, 9, 7, 12], [4, 6, 11, 8]])
    expected = head_relevance(model, {"input_ids": ids}, rule, normalize=normalize)["decoder"]
    left = torch.nn.functional.pad(ids, (3, 0), value=1)
    batch = {"input_ids": left, "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), (3, 0))}
    found = head_relevance(model, batch, rule, normalize=normalize)["decoder"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
