"""ELECTRA's discriminator and the generator beside it, as one model."""

import pytest
import torch
from tiny_models import (
    GUIDANCE,
    UNEVEN,
    assert_same_in_a_fresh_process,
    batch_for,
    no_dropout,
    ragged_sentences,
    stock_config,
    tiny_config,
    tiny_model,
    vivid,
)
from transformers import AutoModelForPreTraining, ElectraConfig, ElectraForPreTraining

import hf_attn_dynamics as had
from hf_attn_dynamics.models.configuration_headwise_electra import generator_config
from hf_attn_dynamics.models.head_roles import locate_heads


MASK = 3


def joint(**changes):
    return vivid(tiny_model("electra", "ForJointPreTraining", **changes))


def masked(sentences=None, seed=0, share=0.4):
    """A padded batch in which some tokens are masked, their originals as labels."""
    batch = batch_for("electra", sentences)
    drawn = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
    chosen = (drawn < share) & (batch["attention_mask"] == 1)
    labels = batch["input_ids"].where(chosen, -100)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(chosen, MASK), "labels": labels}


def replaced_ids(model, batch):
    with torch.no_grad():
        return model.replace_tokens(**batch)[0]


def predict_always(model, scores):
    """Has the generator predict the same for every token, whatever it sees."""
    with torch.no_grad():
        model.generator.generator_predictions.LayerNorm.weight.zero_()
        model.generator.generator_predictions.LayerNorm.bias.zero_()
        model.generator.generator_lm_head.bias.copy_(scores)
    return model


def test_both_losses_are_the_stock_ones_and_their_sum_is_weighted():
    model, batch = joint(discriminator_weight=7.0), masked()
    outputs = model(**batch)
    torch.testing.assert_close(outputs.generator_loss, model.generator(**batch).loss)
    ids = replaced_ids(model, batch)
    originals = batch["labels"].where(batch["labels"] != -100, batch["input_ids"])
    real = batch["attention_mask"] == 1
    expected = (ids != originals).long()
    assert torch.equal(outputs.replaced, expected.where(real, -100))
    stock = ElectraForPreTraining(stock_config("electra")).eval()
    stock.load_state_dict({name: p for name, p in model.state_dict().items() if not name.startswith("generator.")})
    found = stock(ids, attention_mask=batch["attention_mask"], labels=expected)
    torch.testing.assert_close(outputs.logits, found.logits)
    torch.testing.assert_close(outputs.discriminator_loss, found.loss)
    torch.testing.assert_close(outputs.loss, outputs.generator_loss + 7 * outputs.discriminator_loss)


def test_only_tokens_with_a_label_are_replaced_and_a_draw_that_is_the_original_counts_as_original():
    scores = torch.full((60,), -1e4)
    scores[9] = 0
    model = predict_always(joint(), scores)
    batch = {"input_ids": torch.tensor([[5, MASK, MASK, 8]]), "labels": torch.tensor([[-100, 9, 10, -100]])}
    assert replaced_ids(model, batch).tolist() == [[5, 9, 9, 8]]
    assert model(**batch).replaced.tolist() == [[0, 0, 1, 0]]


def test_draws_follow_the_predictions_of_the_generator():
    scores = torch.linspace(-3, 1, 60)
    model = predict_always(joint(), scores)
    sentences = torch.randint(4, 60, (1500, 20), generator=torch.Generator().manual_seed(0)).tolist()
    batch = masked(sentences)
    ids, chosen = replaced_ids(model, batch), batch["labels"] != -100
    draws = ids[chosen]
    shares = torch.bincount(draws, minlength=60) / len(draws)
    expected = scores.softmax(0)
    deviation = (expected * (1 - expected) / len(draws)).sqrt()
    assert ((shares - expected).abs() < 4 * deviation).all()
    # Neighbours are drawn independently of each other.
    both = chosen[:, 1:] & chosen[:, :-1]
    equal = (ids[:, 1:] == ids[:, :-1])[both].float().mean().item()
    assert equal == pytest.approx(expected.square().sum().item(), abs=0.01)


@pytest.mark.parametrize("training", [False, True])
def test_neither_padding_nor_other_sentences_change_draws_losses_or_labels(training):
    model = joint(**no_dropout("electra")).double().train(training)
    batch = masked()
    positions = torch.arange(batch["input_ids"].shape[1])
    together = model(**batch, output_guidance_loss=True)
    fill = {"labels": -100}
    left = {name: torch.nn.functional.pad(value, (6, 0), value=fill.get(name, 0)) for name, value in batch.items()}
    padded = model(**left, position_ids=torch.nn.functional.pad(positions, (6, 0))[None], output_guidance_loss=True)
    assert torch.equal(padded.replaced[:, 6:], together.replaced)
    for name in ("loss", "generator_loss", "discriminator_loss", "guidance_loss"):
        torch.testing.assert_close(padded[name], together[name], rtol=1e-9, atol=0)
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        alone = model(**{name: value[row : row + 1, :length] for name, value in batch.items()})
        assert torch.equal(alone.replaced[0], together.replaced[row, :length])


def test_draws_leave_the_random_state_alone_and_change_with_the_mask():
    model = joint()
    state = torch.random.get_rng_state()
    batch = masked(seed=0)
    first = replaced_ids(model, batch)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(replaced_ids(model, batch), first)
    other = masked(seed=1)
    both = (batch["labels"] != -100) & (other["labels"] != -100)
    assert not torch.equal(replaced_ids(model, other)[both], first[both])


def test_no_gradient_passes_a_draw():
    model = joint()
    model(**masked()).discriminator_loss.backward()
    shared = set(model.electra.parameters())
    assert all(p.grad is not None for p in shared)
    assert all(p.grad is None for p in model.generator.parameters() if p not in shared)


@pytest.mark.parametrize("labels", ["some", "none"])
def test_every_parameter_gets_a_gradient(labels):
    model, batch = joint().train(), masked()
    if labels == "none":
        batch["labels"].fill_(-100)
    outputs = model(**batch, num_items_in_batch=model.count_labels(batch))
    outputs.loss.backward()
    assert outputs.loss.isfinite()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    model, batch = joint(**no_dropout("electra")).train(), masked()

    def gradients():
        model.zero_grad()
        model(**batch, guidance_weight=2.0).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_without_labels_the_discriminator_judges_the_tokens_as_they_are():
    model = joint()
    batch = batch_for("electra")
    outputs = model(**batch, output_guidance_loss=True)
    assert outputs.keys() == {"logits", "guidance_losses", "guidance_loss"}
    assert torch.equal(outputs.logits, model.get_discriminator()(**batch).logits)


def test_labels_without_tokens_are_refused():
    embeds = torch.zeros(1, 4, 12)
    with pytest.raises(ValueError, match="labels are given without input_ids"):
        joint()(inputs_embeds=embeds, labels=torch.full((1, 4), -100))


def test_guidance_is_that_of_the_discriminator_on_what_it_reads():
    model = joint(guidance={"heads": {"next": [0], "prev": [1], "first": [2, 3]}})
    batch = masked()
    inputs = {"input_ids": replaced_ids(model, batch), "attention_mask": batch["attention_mask"]}
    expected = model.get_discriminator()(**inputs, output_guidance_loss=True).guidance_loss
    torch.testing.assert_close(model(**batch, output_guidance_loss=True).guidance_loss, expected)


def test_periods_are_those_of_the_sentence_before_it_was_masked():
    scores = torch.full((60,), -1e4)
    scores[7] = 0  # the period
    model = predict_always(joint(guidance={**GUIDANCE, "heads": {"period": [0, 1]}}), scores)
    batch = {"input_ids": torch.tensor([[5, 8, MASK]]), "labels": torch.tensor([[-100, -100, 7]])}
    expected = model.get_discriminator()(torch.tensor([[5, 8, 7]]), output_guidance_loss=True).guidance_loss
    torch.testing.assert_close(model(**batch, output_guidance_loss=True).guidance_loss, expected)


def test_heads_are_those_of_the_discriminator_alone():
    model = joint(gates={})
    assert [layer.name.split(".")[0] for layer in locate_heads(model)] == ["electra", "electra"]
    assert {name for name, _ in model.named_parameters() if name.endswith("log_alpha")} == {
        f"electra.encoder.layer.{i}.attention.self.gate.log_alpha" for i in range(2)
    }
    before = {name: p.shape for name, p in model.generator.named_parameters()}
    had.prune_heads(model, UNEVEN["electra"])
    assert {name: p.shape for name, p in model.generator.named_parameters()} == before
    assert model.config.kept_heads()["encoder", 0] == [0, 3]
    model.set_attn_implementation("eager")
    assert model.generator.config._attn_implementation == "eager"


def test_embeddings_are_shared_also_after_loading(tmp_path):
    model = had.prune_heads(joint(gates={}), UNEVEN["electra"])
    model.save_pretrained(tmp_path)
    back, info = had.HeadwiseElectraForJointPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    embeddings, others = back.electra.embeddings, back.generator.electra.embeddings
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        assert getattr(others, name).weight is getattr(embeddings, name).weight, name
    assert back.generator.generator_lm_head.weight is embeddings.word_embeddings.weight
    batch = masked()
    assert torch.equal(back(**batch).loss, model(**batch).loss)
    untied = joint(tie_word_embeddings=False)
    assert untied.generator.generator_lm_head.weight is not untied.electra.embeddings.word_embeddings.weight


def test_checkpoints_open_as_discriminators_and_discriminators_as_joint_models(tmp_path):
    model, batch = joint(), batch_for("electra")
    model.save_pretrained(tmp_path / "joint")
    expected = model(**batch).logits
    discriminator, info = had.HeadwiseElectraForPreTraining.from_pretrained(
        tmp_path / "joint", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert all(name.startswith("generator.") for name in info["unexpected_keys"])
    assert torch.equal(discriminator(**batch).logits, expected)
    assert type(AutoModelForPreTraining.from_pretrained(tmp_path / "joint")) is had.HeadwiseElectraForPreTraining
    body = had.HeadwiseElectraModel.from_pretrained(tmp_path / "joint")
    assert torch.equal(body(**batch)[0], model.electra(**batch)[0])

    ElectraForPreTraining(stock_config("electra")).save_pretrained(tmp_path / "stock")
    back, info = had.HeadwiseElectraForJointPreTraining.from_pretrained(tmp_path / "stock", output_loading_info=True)
    assert all(name.startswith("generator.") for name in info["missing_keys"])
    assert back(**masked()).loss.isfinite()


def test_the_saved_code_opens_the_discriminator_where_the_package_is_not_installed(tmp_path):
    model = joint()
    model.save_pretrained(tmp_path)
    checkpoint = (
        model.get_discriminator(),
        tmp_path,
        "AutoModelForPreTraining",
        "electra",
        {"output_guidance_loss": True},
    )
    assert_same_in_a_fresh_process([checkpoint], package=False)


def test_the_discriminator_shares_weights_and_can_be_saved_alone(tmp_path):
    model, batch = joint(gates={}), batch_for("electra")
    discriminator = model.get_discriminator()
    assert type(discriminator) is had.HeadwiseElectraForPreTraining
    assert not discriminator.training
    owned = dict(model.named_parameters())
    assert all(p is owned[name] for name, p in discriminator.named_parameters())
    assert torch.equal(discriminator(**batch).logits, model(**batch).logits)
    had.prune_heads(discriminator, {0: [1]})
    discriminator.save_pretrained(tmp_path)
    back, info = type(discriminator).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(back(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize(
    ("discriminator", "generator", "expected"),
    [
        # hidden size, heads, intermediate size, layers
        ((768, 12, 3072, 12), None, (192, 3, 768, 12)),
        ((256, 4, 1024, 12), {}, (64, 1, 256, 12)),
        ((16, 2, 24, 2), {"num_hidden_layers": 1}, (4, 1, 6, 1)),
        # A quarter of the width is 17.5, which two heads do not divide.
        ((70, 10, 100, 2), {"attention_probs_dropout_prob": 0.0}, (18, 2, 25, 2)),
        ((64, 4, 128, 2), {"hidden_size": 32, "num_attention_heads": 2}, (32, 2, 32, 2)),
    ],
)
def test_the_generator_has_a_quarter_of_the_size_unless_told_otherwise(discriminator, generator, expected):
    hidden, heads, intermediate, layers = discriminator
    config = had.HeadwiseElectraConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        generator_settings=generator,
    )
    found = generator_config(config)
    sizes = (found.hidden_size, found.num_attention_heads, found.intermediate_size, found.num_hidden_layers)
    assert sizes == expected
    for name in ("vocab_size", "embedding_size", "max_position_embeddings", "type_vocab_size"):
        assert getattr(found, name) == getattr(config, name)
    assert found.attention_probs_dropout_prob == (generator or {}).get("attention_probs_dropout_prob", 0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 5}, "has no key 'vocab_size'; its keys are hidden_size"),
        ({"hidden_size": 0}, "hidden_size must be an integer from 1 to .*, got 0"),
        ({"num_attention_heads": 1.5}, "num_attention_heads must be an integer from 1 to .*, got 1.5"),
        (
            {"hidden_size": 9, "num_attention_heads": 2},
            "hidden_size 9 must be divisible by its num_attention_heads, 2",
        ),
    ],
)
def test_impossible_generators_are_named(settings, message):
    with pytest.raises(ValueError, match=f"generator_settings {message}"):
        tiny_config("electra", generator_settings=settings)


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan")])
def test_impossible_weights_are_named(weight):
    with pytest.raises(ValueError, match=f"discriminator_weight must be positive and finite, got {weight}"):
        tiny_config("electra", discriminator_weight=weight)


def test_a_stock_configuration_is_refused():
    with pytest.raises(TypeError, match="needs a HeadwiseElectraConfig, got ElectraConfig"):
        had.HeadwiseElectraForJointPreTraining(ElectraConfig(num_hidden_layers=1, vocab_size=50))


def test_sentences_of_a_batch_add_up_to_its_losses():
    model, batch = joint(), masked(ragged_sentences(5))
    outputs = model(**batch)
    losses = model.sentence_losses(outputs, batch)
    means = {term.name: sums.sum() / counts.sum() for term, (sums, counts) in losses.items()}
    torch.testing.assert_close(means["mlm"], outputs.generator_loss)
    torch.testing.assert_close(means["replaced"], outputs.discriminator_loss)
    counts = {name: count.item() for name, count in model.count_labels(batch).items()}
    assert counts == {"labels": (batch["labels"] != -100).sum(), "replaced": batch["attention_mask"].sum()}
