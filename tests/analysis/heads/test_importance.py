import copy
import json
import math
import statistics

import pytest
import torch
from stock_models import build_image_reader
from torch.nn import functional
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    ElectraConfig,
    ElectraForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_attn_dynamics import (
    HeadwiseBertConfig,
    HeadwiseBertForMaskedLM,
    HeadwiseBertForPreTraining,
    HeadwiseMarianConfig,
    HeadwiseMarianMTModel,
)
from hf_attn_dynamics.analysis.heads.importance import HeadScores, gate_importance, head_importance, random_importance
from hf_attn_dynamics.models.head_pruning import prune_heads, retain_heads
from hf_attn_dynamics.models.head_roles import locate_heads


SIZES = {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
HEADS, HEAD_DIM = 4, 4
PADDING = {"input_ids": 0, "attention_mask": 0, "labels": -100}
TWO_SIDED = {"vocab_size": 40, "pad_token_id": 1, "decoder_start_token_id": 1}
MARIAN = {
    **TWO_SIDED,
    "d_model": 16,
    "max_position_embeddings": 30,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")},
}


def seeded(build):
    torch.manual_seed(0)
    model = build().double().eval()
    # Larger weights than those of initialisation, so that heads differ.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def bert(cls=BertForMaskedLM, **changes):
    return seeded(lambda: cls(BertConfig(**SIZES, hidden_size=16, intermediate_size=24, **changes)))


def gpt2():
    return seeded(lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=30)))


def llama():
    config = LlamaConfig(**SIZES, hidden_size=16, intermediate_size=24, num_key_value_heads=2)
    return seeded(lambda: LlamaForCausalLM(config))


def marian():
    return seeded(lambda: MarianMTModel(MarianConfig(**MARIAN)))


def t5():
    config = T5Config(**TWO_SIDED, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
    return seeded(lambda: T5ForConditionalGeneration(config))


def albert():
    config = AlbertConfig(**SIZES, hidden_size=16, embedding_size=8, intermediate_size=24)
    return seeded(lambda: AlbertForSequenceClassification(config))


# Output projections of each kind of site, layer by layer, found without the table that the package uses.
OUTPUTS = {
    bert: lambda m: {"encoder": [layer.attention.output.dense for layer in m.bert.encoder.layer]},
    gpt2: lambda m: {"decoder": [block.attn.c_proj for block in m.transformer.h]},
    llama: lambda m: {"decoder": [layer.self_attn.o_proj for layer in m.model.layers]},
    marian: lambda m: {
        "encoder": [layer.self_attn.out_proj for layer in m.model.encoder.layers],
        "decoder": [layer.self_attn.out_proj for layer in m.model.decoder.layers],
        "cross": [layer.encoder_attn.out_proj for layer in m.model.decoder.layers],
    },
    t5: lambda m: {
        "encoder": [block.layer[0].SelfAttention.o for block in m.encoder.block],
        "decoder": [block.layer[0].SelfAttention.o for block in m.decoder.block],
        "cross": [block.layer[1].EncDecAttention.o for block in m.decoder.block],
    },
    albert: lambda m: {"encoder": [m.albert.encoder.albert_layer_groups[0].albert_layers[0].attention.dense]},
}


def sentences(build, count=5):
    """Sentences of 1 to 9 tokens with their labels, each as a batch of one."""
    generator = torch.Generator().manual_seed(1)

    def draw(length, high=40):
        return torch.randint(4, high, (1, int(length)), generator=generator)

    lengths = torch.randint(2, 10, (count, 2), generator=generator)
    lengths[1, 0] = 1
    alone = []
    for source, target in lengths:
        sentence = {"input_ids": draw(source), "attention_mask": torch.ones(1, source, dtype=torch.long)}
        if build in (marian, t5):
            sentence["labels"] = draw(target)
        elif build is albert:
            sentence["labels"] = draw(1)[0] % 2
        else:
            sentence["labels"] = sentence["input_ids"].clone()
            if build is bert:
                sentence["labels"][:, 1::2] = -100
        alone.append(sentence)
    return alone


def together(alone, length=0):
    """One batch of several sentences, padded on the right to `length` or more."""
    fill = {"input_ids": 1, "attention_mask": 0, "labels": -100}
    batch = {}
    for name in alone[0]:
        rows = [sentence[name][0] for sentence in alone]
        if rows[0].dim():
            longest = max(length, *map(len, rows))
            rows = [torch.nn.functional.pad(row, (0, longest - len(row)), value=fill[name]) for row in rows]
        batch[name] = torch.stack(rows)
    return batch


def dense_importance(model, outputs, alone):
    """Michel et al.'s equation 2, sentence by sentence: derivatives with respect to a mask of each head and token."""
    totals = {kind: torch.zeros(len(modules), HEADS, dtype=torch.float64) for kind, modules in outputs.items()}
    tokens = dict.fromkeys(totals, 0)
    for sentence in alone:
        masks = []

        def mask_heads(module, inputs, where, masks=masks):
            (context,) = inputs
            mask = torch.ones(context.shape[1], HEADS, dtype=torch.float64, requires_grad=True)
            masks.append((where, mask))
            return ((context.unflatten(-1, (HEADS, HEAD_DIM)) * mask[..., None]).flatten(-2),)

        hooks = [
            module.register_forward_pre_hook(lambda m, i, where=(kind, layer): mask_heads(m, i, where))
            for kind, modules in outputs.items()
            for layer, module in enumerate(modules)
        ]
        log_probabilities = model(**sentence).logits[0].log_softmax(-1)
        for hook in hooks:
            hook.remove()
        labels = sentence["labels"][0]
        loss = 0 * log_probabilities.sum()
        if labels.dim() == 0:
            loss = loss - log_probabilities[labels]
        elif isinstance(model, GPT2LMHeadModel | LlamaForCausalLM):
            for token in range(1, len(labels)):
                loss = loss - log_probabilities[token - 1, labels[token]]
        else:
            for token in labels.ne(-100).nonzero().flatten():
                loss = loss - log_probabilities[token, labels[token]]
        gradients = torch.autograd.grad(loss, [mask for _, mask in masks])
        for ((kind, layer), mask), gradient in zip(masks, gradients):
            for token in range(len(mask)):
                for head in range(HEADS):
                    totals[kind][layer, head] += abs(float(gradient[token, head]))
        for kind in totals:
            tokens[kind] += sentence["input_ids"].shape[1] if kind == "encoder" else len(labels)
    return {kind: total / tokens[kind] for kind, total in totals.items()}


def assert_same(scores, expected):
    assert list(scores) == list(expected)
    for kind in scores:
        torch.testing.assert_close(scores[kind], expected[kind], rtol=1e-8, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("build", OUTPUTS)
def test_importance_is_the_mean_sensitivity_to_masks_of_heads(build):
    model, alone = build(), sentences(build)
    expected = dense_importance(model, OUTPUTS[build](model), alone)
    assert all(table.min() > 0 for table in expected.values())
    assert_same(head_importance(model, alone), expected)


@pytest.mark.parametrize("build", OUTPUTS)
def test_padding_and_the_split_into_batches_change_nothing(build):
    model, alone = build(), sentences(build)
    expected = head_importance(model, alone)
    assert_same(head_importance(model, [together(alone, length=12)]), expected)
    assert_same(head_importance(model, (together(part) for part in (alone[:2], alone[2:]))), expected)


def test_a_decoder_mask_says_what_labels_would():
    alone = sentences(marian)
    batch = together(alone)
    ids = torch.full_like(batch["labels"], 1)
    ids[:, 1:] = batch["labels"][:, :-1].clamp(min=1)
    expected = head_importance(marian(), [batch])
    mask = batch["labels"].ne(-100).long()
    assert_same(head_importance(marian(), [{**batch, "decoder_attention_mask": mask}]), expected)


def test_values_of_a_layer_worked_by_hand():
    model = GPT2Model(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=2, n_positions=8)).double()
    block = model.h[0]
    with torch.no_grad():
        for module in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            module.weight.zero_()
            module.bias.zero_()
        # Every value is (1, 2, 3, 4), so every context is, too, whatever the attention; it is projected as it is.
        block.attn.c_attn.bias[-4:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
        block.attn.c_proj.weight.copy_(torch.eye(4))
    model.ln_f = torch.nn.Identity()
    weights = torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=torch.float64)

    def loss(outputs, batch):
        return ((outputs.last_hidden_state @ weights) * batch["attention_mask"]).sum()

    batch = {"input_ids": torch.tensor([[3, 4, 5], [6, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}

    def importance(**options):
        return head_importance(model, [batch], loss=loss, **options)["decoder"]

    # |1·1 − 2·1| and |3·2 + 4·0.5|
    torch.testing.assert_close(importance(), torch.tensor([[1.0, 8.0]], dtype=torch.float64))
    norm = math.sqrt(65)
    torch.testing.assert_close(importance(normalize="l2"), torch.tensor([[1 / norm, 8 / norm]], dtype=torch.float64))


def test_normalised_layers_have_norm_one_at_each_site():
    scores = head_importance(marian(), sentences(marian), normalize="l2")
    for kind in ("encoder", "decoder", "cross"):
        torch.testing.assert_close(scores[kind].norm(dim=1), torch.ones(2, dtype=torch.float64))
    assert_same(head_importance(marian(), sentences(marian)).normalized(), scores)


def test_exchanged_heads_have_exchanged_importance():
    model, alone = bert(), sentences(bert)
    before = head_importance(model, alone)["encoder"]
    attention = model.bert.encoder.layer[1].attention
    order = [2, 0, 3, 1]
    rows = torch.tensor([head * HEAD_DIM + i for head in order for i in range(HEAD_DIM)])
    with torch.no_grad():
        for projection in (attention.self.query, attention.self.key, attention.self.value):
            projection.weight.copy_(projection.weight[rows])
            projection.bias.copy_(projection.bias[rows])
        attention.output.dense.weight.copy_(attention.output.dense.weight[:, rows])
    after = head_importance(model, alone)["encoder"]
    torch.testing.assert_close(after[0], before[0])
    torch.testing.assert_close(after[1], before[1, order])


def test_removed_heads_have_no_score_and_leave_the_numbers_of_the_others_in_place():
    model, alone = bert(), sentences(bert)
    with torch.no_grad():
        # Without a projection heads have no effect, so that removing them changes no other score.
        model.bert.encoder.layer[0].attention.output.dense.weight[:, [0, 1, 2, 3, 8, 9, 10, 11]] = 0
        model.bert.encoder.layer[1].attention.output.dense.weight.zero_()
    before = head_importance(model, alone)["encoder"]
    prune_heads(model, {0: [0, 2], 1: [0, 1, 2, 3]})
    after = head_importance(model, alone)["encoder"]
    assert after.isnan().tolist() == [[True, False, True, False], [True] * 4]
    torch.testing.assert_close(after[0, [1, 3]], before[0, [1, 3]])
    assert before[0, 1] > 0


def test_a_model_without_any_head_has_no_scores():
    model = prune_heads(bert(), {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]})
    assert head_importance(model, sentences(bert))["encoder"].isnan().all()


@pytest.mark.parametrize("taken", [lambda scores: scores, lambda scores: scores.plain])
def test_scores_choose_the_heads_that_stay(taken):
    model, alone = marian(), sentences(marian)
    scores = head_importance(model, alone)
    best = scores["cross"].flatten().topk(3).indices.tolist()
    retain_heads(model, {"cross": 3}, taken(scores))
    kept = {
        (layer.site.layer, head) for layer in locate_heads(model) if layer.site.kind == "cross" for head in layer.heads
    }
    assert kept == {divmod(index, HEADS) for index in best}


@pytest.mark.parametrize("frozen", [True, False])
def test_the_model_is_left_as_it_was(frozen):
    model, alone = bert(), sentences(bert)
    expected = head_importance(model, alone)
    model.train().requires_grad_(not frozen)
    model.bert.embeddings.eval()
    model.cls.predictions.bias.grad = torch.full_like(model.cls.predictions.bias, 3.0)
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        assert_same(head_importance(model, alone), expected)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.requires_grad is not frozen for parameter in model.parameters())
    (kept,) = [parameter for parameter in model.parameters() if parameter.grad is not None]
    assert kept is model.cls.predictions.bias
    assert kept.grad.eq(3).all()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_is_left_as_it_was_when_a_batch_is_wrong():
    model = bert().train()
    with pytest.raises(ValueError, match="each batch needs 'labels'"):
        head_importance(model, [{"input_ids": torch.tensor([[5, 6]])}])
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_batch_without_labels_that_count_adds_its_tokens_only():
    model, alone = bert(), sentences(bert)
    silent = {**alone[0], "labels": torch.full_like(alone[0]["labels"], -100)}
    before = head_importance(model, alone)["encoder"]
    tokens = sum(sentence["input_ids"].shape[1] for sentence in alone)
    after = head_importance(model, [silent, *alone])["encoder"]
    torch.testing.assert_close(after, before * tokens / (tokens + silent["input_ids"].shape[1]))


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification", "single_label_classification"])
def test_losses_of_classifiers_are_summed_over_sentences(problem):
    model = bert(BertForSequenceClassification, problem_type=problem, num_labels=1 if problem == "regression" else 3)
    alone = sentences(albert)
    for sentence in alone:
        if problem == "regression":
            sentence["labels"] = sentence["labels"] * 0.7
        elif problem == "multi_label_classification":
            sentence["labels"] = torch.tensor([[1.0, 0.0, float(sentence["labels"])]])
    expected = head_importance(model, alone)
    labels = torch.cat([sentence.pop("labels") for sentence in alone])
    batch = {**together(alone), "labels": labels}
    assert_same(head_importance(model, [batch]), expected)


def test_the_loss_of_answers_is_summed_over_sentences():
    model = bert(BertForQuestionAnswering)
    ids = torch.randint(4, 40, (3, 6), generator=torch.Generator().manual_seed(0))
    # The last answer is cut off.
    batch = {"input_ids": ids, "start_positions": torch.tensor([0, 2, 9]), "end_positions": torch.tensor([1, 5, 9])}
    alone = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(3)]
    assert_same(head_importance(model, [batch]), head_importance(model, alone))


def test_the_loss_of_replaced_tokens_is_summed_over_them():
    config = ElectraConfig(**SIZES, hidden_size=16, embedding_size=8, intermediate_size=24)
    model = seeded(lambda: ElectraForPreTraining(config))
    alone = sentences(bert)
    for sentence in alone:
        sentence["labels"] = sentence["input_ids"] % 2
    assert_same(head_importance(model, [together(alone)]), head_importance(model, alone))


def test_choices_are_sentences_however_they_are_padded():
    model = bert(BertForMultipleChoice)
    ids = torch.randint(4, 40, (2, 3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 2])}
    short = {"input_ids": ids[:1, :, :4], "labels": batch["labels"][:1]}
    alone = [short, {name: value[1:] for name, value in batch.items()}]
    assert_same(head_importance(model, [batch]), head_importance(model, alone))


def test_a_single_batch_is_taken_as_a_list_of_one():
    model, (batch, *_) = bert(), sentences(bert)
    assert_same(head_importance(model, batch), head_importance(model, [batch]))


def test_images_have_no_padding():
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24, image_size=8, patch_size=4
    )
    model = seeded(lambda: ViTForImageClassification(config))
    pixels = torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = {"pixel_values": pixels, "labels": torch.tensor([0, 1, 1])}
    alone = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(3)]
    assert_same(head_importance(model, [batch]), head_importance(model, alone))


def test_an_image_beside_a_text_is_not_padded_with_it():
    model, inputs = build_image_reader("llava")
    model = model.double()
    inputs |= {"labels": inputs["input_ids"].where(inputs["input_ids"] < 10, -100)}
    inputs["pixel_values"] = inputs["pixel_values"].double()
    padded = {name: functional.pad(inputs[name], (0, 3), value=value) for name, value in PADDING.items()}
    found = head_importance(model, [{**inputs, **padded}])
    assert list(found) == ["encoder", "decoder"]
    assert_same(found, head_importance(model, [inputs]))


def test_half_precision_is_close_to_double():
    model, alone = bert(), sentences(bert)
    expected = head_importance(model, alone)["encoder"]
    torch.testing.assert_close(head_importance(model.float(), alone)["encoder"], expected, rtol=1e-4, atol=1e-5)
    rough = head_importance(model.bfloat16(), alone)["encoder"]
    torch.testing.assert_close(rough, expected, rtol=0.2, atol=0.05)


@pytest.mark.parametrize("build", [bert, gpt2, t5])
def test_half_precision_is_close_to_double_where_a_model_knows_next_to_nothing(build):
    # Its loss is about the same, whichever labels it is of; here rounding brings it closer to that of other ones.
    model, alone = build(), sentences(build, 8)
    generator = torch.Generator().manual_seed(3)
    model.get_output_embeddings().weight.data.normal_(std=0.002, generator=generator)
    expected = head_importance(model, together(alone))
    rough = head_importance(model.bfloat16(), together(alone))
    for kind, scores in expected.items():
        torch.testing.assert_close(rough[kind] / scores.max(), scores / scores.max(), rtol=0.2, atol=0.05)


def test_a_loss_that_only_looks_like_one_that_is_known_needs_a_loss():
    class Backward(BertForMaskedLM):
        """Predicts the token before each."""

        def forward(self, labels=None, **inputs):
            outputs = super().forward(**inputs)
            outputs.loss = functional.cross_entropy(outputs.logits[:, 1:].flatten(0, 1), labels[:, :-1].flatten())
            return outputs

    model = bert(Backward).bfloat16()
    model.get_output_embeddings().weight.data.zero_()
    with pytest.raises(ValueError, match="reduction of the loss of Backward is unknown; pass loss="):
        head_importance(model, {"input_ids": torch.arange(5, 25)[None], "labels": torch.arange(5, 25)[None]})


def test_a_model_whose_loss_is_not_understood_needs_a_loss():
    class Squared(BertForMaskedLM):
        def forward(self, labels=None, **inputs):
            outputs = super().forward(**inputs)
            outputs.loss = outputs.logits.square().mean()
            return outputs

    model = bert(Squared)
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, -100, 7]])}
    with pytest.raises(ValueError, match="reduction of the loss of Squared is unknown; pass loss="):
        head_importance(model, [batch])
    assert head_importance(model, [batch], loss=lambda outputs, batch: outputs.loss)["encoder"].min() > 0


def test_a_loss_other_than_that_of_the_class_needs_a_loss():
    model = bert(BertForSequenceClassification)
    stock = model.forward

    def forward(**inputs):
        outputs = stock(**inputs)
        return type(outputs)(**{**outputs, "loss": outputs.loss * 2})

    model.forward = forward
    with pytest.raises(ValueError, match="reduction of the loss of BertForSequenceClassification is unknown"):
        head_importance(model, {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([1])})


def test_a_loss_of_several_terms_is_summed_over_all_of_their_labels():
    model = bert(BertForPreTraining)
    ids = torch.randint(4, 40, (3, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone(), "next_sentence_label": torch.tensor([0, 1, 1])}
    batch["labels"][:, ::2] = -100

    def by_hand(outputs, batch):
        words = functional.cross_entropy(
            outputs.prediction_logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )
        follows = functional.cross_entropy(
            outputs.seq_relationship_logits, batch["next_sentence_label"], reduction="sum"
        )
        return words + follows

    assert_same(head_importance(model, [batch]), head_importance(model, [batch], loss=by_hand))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"normalize": "l1"}, "normalize must be 'l2' or None, got 'l1'"),
        ({"data": []}, "data is empty"),
        ({"data": [[1, 2]]}, "batch 0 of data must be a dictionary"),
        ({"loss": lambda outputs, batch: outputs.logits}, "loss must return a scalar"),
        ({"loss": lambda outputs, batch: outputs.loss.detach()}, "loss must return a scalar that can be differ"),
        ({"loss": lambda outputs, batch: outputs.loss / 0}, "the loss of batch 0 is inf"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        head_importance(bert(), **{"data": sentences(bert), **arguments})


def test_masks_that_do_not_fit_or_leave_nothing_are_refused():
    batch = together(sentences(bert))
    with pytest.raises(ValueError, match="no token for the encoder layer 0"):
        head_importance(bert(), [{**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}])
    whole = torch.ones(*batch["input_ids"].shape, batch["input_ids"].shape[1])
    with pytest.raises(ValueError, match="attention_mask has the shape"):
        head_importance(bert(), [{**batch, "attention_mask": whole}])


def test_random_importance_depends_on_the_seed_alone():
    whole = random_importance(marian(), seed=3)
    assert whole == random_importance(marian(), seed=3)
    assert whole != random_importance(marian(), seed=4)
    assert whole["cross"].unique().numel() == 8
    state = torch.get_rng_state()
    model = prune_heads(bert(), {1: [0, 3]})
    torch.set_rng_state(state)
    pruned = random_importance(model, seed=3)["encoder"]
    torch.testing.assert_close(torch.get_rng_state(), state)
    full = random_importance(bert(), seed=3)["encoder"]
    assert pruned.isnan().nonzero().tolist() == [[1, 0], [1, 3]]
    assert pruned[~pruned.isnan()].equal(full[~pruned.isnan()])


def test_gates_are_read_in_the_original_numbering():
    model = HeadwiseBertForMaskedLM(HeadwiseBertConfig(**SIZES, hidden_size=16, intermediate_size=24, gates={}))
    with torch.no_grad():
        for layer in locate_heads(model):
            layer.module.gate.log_alpha.copy_(torch.arange(4) + 10.0 * layer.site.layer)
    prune_heads(model, {0: [1], 1: [0, 1, 2, 3]})
    nan = math.nan
    expected = torch.tensor([[0, nan, 2, 3], [nan] * 4], dtype=torch.float64)
    torch.testing.assert_close(gate_importance(model)["encoder"], expected, equal_nan=True)


def test_only_sites_with_gates_are_read():
    config = HeadwiseMarianConfig(**MARIAN, gates={"cross": {}})
    assert list(gate_importance(HeadwiseMarianMTModel(config))) == ["cross"]


def test_a_model_without_gates_has_no_gate_importance():
    with pytest.raises(ValueError, match="BertModel has no gates: .*gates={}.*head_importance"):
        gate_importance(bert(BertModel))


def test_headwise_models_sum_their_own_losses_and_close_gates_have_importance_zero():
    config = HeadwiseBertConfig(**SIZES, hidden_size=16, intermediate_size=24, gates={})
    model = seeded(lambda: HeadwiseBertForPreTraining(config))
    with torch.no_grad():
        for layer in locate_heads(model):
            layer.module.gate.log_alpha.copy_(torch.tensor([-1.0, 2.0, 2.0, 2.0]))
    alone = [{**s, "next_sentence_label": torch.tensor([i % 2])} for i, s in enumerate(sentences(bert))]
    scores = head_importance(model, alone)
    assert scores["encoder"][:, 0].eq(0).all()
    assert scores["encoder"][:, 1:].gt(0).all()
    batch = {**together(alone), "next_sentence_label": torch.tensor([i % 2 for i in range(len(alone))])}
    assert_same(head_importance(model, [batch]), scores)


def test_scores_survive_a_file(tmp_path):
    scores = HeadScores({"cross": torch.rand(2, 3), "encoder": [[0.1, math.nan], [1 / 3, 4.0]]})
    scores.save(tmp_path / "folder" / "scores.json")
    assert HeadScores.load(tmp_path / "folder" / "scores.json") == scores
    # Any reader of JSON takes it: NaN is not JSON.
    saved = json.loads((tmp_path / "folder" / "scores.json").read_text(), parse_constant=pytest.fail)
    assert saved["encoder"] == [[0.1, None], [1 / 3, 4.0]]
    assert list(scores) == ["encoder", "cross"]
    assert scores["cross"].dtype == torch.float64


@pytest.mark.parametrize("text", ["[1, 2]", '{"encoder": 3}', "{", '{"encoder": [["a"]]}', "{}", '{"head": [[1]]}'])
def test_a_file_without_scores_is_refused(tmp_path, text):
    (tmp_path / "scores.json").write_text(text)
    with pytest.raises(ValueError, match="scores"):
        HeadScores.load(tmp_path / "scores.json")


def test_one_kind_of_site_is_a_bare_tensor_and_several_are_a_dictionary():
    table = torch.rand(2, 3, dtype=torch.float64)
    assert HeadScores({"decoder": table}).plain.equal(table)
    assert set(HeadScores({"decoder": table, "cross": table}).plain) == {"decoder", "cross"}
    with pytest.raises(ValueError, match=r"scores of the decoder must have shape \(layers, heads\), got \(3,\)"):
        HeadScores({"decoder": table[0]})


def test_a_data_frame_has_a_row_for_each_head():
    pytest.importorskip("pandas")
    frame = HeadScores({"encoder": [[1.0, 2.0]], "cross": [[math.nan, 4.0]]}).to_pandas()
    assert list(frame.columns) == ["site", "layer", "head", "score"]
    assert frame[frame.site == "encoder"].score.tolist() == [1.0, 2.0]
    assert frame.dropna().iloc[-1].tolist() == ["cross", 0, 1, 4.0]


# Variable domains of two human antibodies, for a language model of such sequences.
ANTIBODIES = [
    "QVQLVESGGGVVQPGRSLRLSCAASGFTFSSYAMHWVRQAPGKGLEWVAVISYDGSNKYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCAK",
    "EVQLLESGGGLVQPGGSLRLSCAASGFTFSSYAMSWVRQAPGKGLEWVSAISGSGGSTYYADSVKGRFTISRDNSKNTLYLQMNSLRAEDTAVYYCARDLL",
]


def test_a_trained_model_loses_less_without_unimportant_heads_than_without_random_ones(real_models):
    folder = real_models / "sapiens-vh"
    vocabulary = json.loads((folder / "vocab.json").read_text())
    model = RobertaForMaskedLM.from_pretrained(folder).eval()
    sequences = [["<s>", *sequence, "</s>"] for sequence in ANTIBODIES]
    longest = max(map(len, sequences))
    ids = torch.tensor(
        [[vocabulary[t] for t in tokens] + [vocabulary["<pad>"]] * (longest - len(tokens)) for tokens in sequences]
    )
    chosen = (torch.arange(longest) % 5 == 3) & ids.ne(vocabulary["<pad>"])
    batch = {
        "input_ids": ids.masked_fill(chosen, vocabulary["<mask>"]),
        "attention_mask": ids.ne(vocabulary["<pad>"]).long(),
        "labels": ids.masked_fill(~chosen, -100),
    }

    def loss_with_half_of_the_heads(scores):
        pruned = retain_heads(copy.deepcopy(model), 16, scores)
        with torch.no_grad():
            return pruned(**batch).loss.item()

    importance = head_importance(model, [batch])["encoder"]
    chance = [loss_with_half_of_the_heads(random_importance(model, seed)) for seed in range(10)]
    best, worst = loss_with_half_of_the_heads(importance), loss_with_half_of_the_heads(-importance)
    # A first-order estimate of one head at a time: better than chance on the whole, not than every draw.
    assert best < 0.8 * statistics.fmean(chance)
    assert max(chance) < worst
