# Licensed under the Apache License, Version 2.0.
"""The LSTM encoder–decoder: values, padding, generation, what is trained, and what is refused."""

import itertools

import pytest
import torch
from slow_lstm import all_translations, slow_translation
from slow_score_norm import padded, ragged_words
from tiny_lstms import IDS, SOURCES, TARGETS, gradients, labels_of, tiny_lexical, translation_trainer
from transformers.modeling_outputs import BaseModelOutput

from hf_attn_dynamics import LstmSeq2SeqConfig, LstmSeq2SeqForConditionalGeneration
from hf_attn_dynamics.models import masked_lstm


LABELS = labels_of()
ATTENTIONS = [("learned", 1), ("learned", 3), ("frozen", 1), ("uniform", 1)]
TABLES = [{}, {"share_encoder_decoder_embeddings": False, "target_vocab_size": 9}]
READING = [{}, {"bidirectional": True}, {"bidirectional": True, "directions": "concatenated"}]
KINDS = [
    {"attention": attention, "num_attention_heads": heads, "readout": readout, **reading, **tables}
    for (attention, heads), readout, reading, tables in itertools.product(
        ATTENTIONS, ("mlp", "additive"), READING, TABLES
    )
]
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def model_of(**changes):
    return tiny_lexical("LstmSeq2SeqForConditionalGeneration", **changes)


def everything(model, ids, **arguments):
    return model(ids, output_attentions=True, output_hidden_states=True, **arguments)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_a_padded_batch_gives_what_the_equations_give_for_each_sentence(kind):
    model = model_of(**kind)
    output = everything(model, padded(SOURCES, extra=1), labels=LABELS)
    losses = []
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS)):
        expected = slow_translation(model, source, [1, *target[:-1]])
        own = slice(len(target))
        torch.testing.assert_close(output.logits[row, own], expected.logits, **EXACT)
        torch.testing.assert_close(output.decoder_hidden_states[0][row, own], expected.states, **EXACT)
        weights = output.cross_attentions[0][row, :, own]
        torch.testing.assert_close(weights[..., : len(source)], expected.weights, **EXACT)
        assert not weights[..., len(source) :].any()
        contexts = weights.sum(0) @ output.encoder_last_hidden_state[row]
        torch.testing.assert_close(contexts, expected.contexts, **EXACT)
        losses += [-expected.logits.log_softmax(-1)[place, word] for place, word in enumerate(target)]
    torch.testing.assert_close(output.loss, torch.stack(losses).mean(), **EXACT)


@pytest.mark.parametrize("kind", [{}, {"attention": "uniform", "bidirectional": True}, {"num_attention_heads": 3}])
def test_neither_padding_nor_the_rest_of_the_batch_change_anything(kind):
    model = model_of(**kind)
    together = everything(model, IDS, labels=LABELS)
    expected = gradients(model, together.loss)
    for side, extra in (("right", 3), ("left", 0), ("left", 2)):
        ids = padded(SOURCES, side, extra)
        other = everything(model, ids, labels=labels_of(extra=extra))
        torch.testing.assert_close(other.logits[:, : together.logits.shape[1]], together.logits, **EXACT)
        torch.testing.assert_close(gradients(model, other.loss), expected, **EXACT)
        for row, words in enumerate(SOURCES):
            torch.testing.assert_close(
                other.cross_attentions[0][row, :, : together.logits.shape[1], ids[row] != 0],
                together.cross_attentions[0][row, ..., : len(words)],
                **EXACT,
            )
    alone = [
        everything(model, padded([source]), labels=labels_of([target])) for source, target in zip(SOURCES, TARGETS)
    ]
    for row, one in enumerate(alone):
        torch.testing.assert_close(one.logits[0], together.logits[row, : len(TARGETS[row])], **EXACT)
    counts = torch.tensor([len(target) for target in TARGETS])
    total = sum(one.loss * count for one, count in zip(alone, counts)) / counts.sum()
    torch.testing.assert_close(gradients(model, total), expected, **EXACT)


def test_a_mask_says_what_is_padding_whatever_stands_there():
    model, ids = model_of(), IDS
    mask = (ids != 0).long()
    expected = model(ids, labels=LABELS).loss
    torch.testing.assert_close(model(ids.masked_fill(ids == 0, 7), mask, labels=LABELS).loss, expected)
    embedded = model.get_input_embeddings()(ids).masked_fill(ids[..., None] == 0, torch.nan)
    torch.testing.assert_close(model(None, mask, inputs_embeds=embedded, labels=LABELS).loss, expected)
    assert not torch.allclose(model(ids, torch.ones_like(ids), labels=LABELS).loss, expected)


def test_the_loss_is_the_mean_over_labels_or_over_those_of_the_whole_batch():
    model, ids, labels = model_of(), IDS, LABELS
    count = (labels >= 0).sum()
    mean = model(ids, labels=labels).loss
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=24).loss, mean * count / 24)
    # The decoder reads labels, from the start on, if it is given nothing else.
    read = model.prepare_decoder_input_ids_from_labels(labels)
    assert read[:, 0].eq(1).all()
    assert read[:, 1:].equal(labels[:, :-1].masked_fill(labels[:, :-1] < 0, 0))
    torch.testing.assert_close(model(ids, decoder_input_ids=read, labels=labels).loss, mean)


@pytest.mark.parametrize("parts", [[1] * 6, [2, 1, 3], [4, 2]], ids=str)
# Without gradients, single words have a kernel of their own.
@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("times", [1, 20])
def test_the_decoder_goes_on_where_it_stopped(parts, differentiable, times):
    model, ids = model_of(), IDS.repeat(times, 1)
    read = padded([[1, *target] for target in TARGETS]).repeat(times, 1)
    with torch.set_grad_enabled(differentiable):
        whole = model(ids, decoder_input_ids=read)
        encoded, cache, logits = model.get_encoder()(ids), None, []
        for words in read.split([*parts, read.shape[1] - 6], 1):
            output = model(encoder_outputs=encoded, decoder_input_ids=words, cache=cache)
            cache = output.cache
            logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, **EXACT)
    torch.testing.assert_close((cache.hidden, cache.cell), (whole.cache.hidden, whole.cache.cell), **EXACT)
    assert cache.get_seq_length() == read.shape[1]


def test_the_decoder_returns_its_state_where_it_is_asked_to():
    model = model_of()
    assert model(IDS, decoder_input_ids=IDS).cache.get_seq_length() == IDS.shape[1]
    assert model(IDS, decoder_input_ids=IDS, use_cache=False).cache is None
    assert model(IDS, labels=LABELS).cache is None
    assert model(IDS, labels=LABELS, use_cache=True).cache.get_seq_length() == LABELS.shape[1]


def test_encoder_outputs_know_their_padding():
    model, ids = model_of(bidirectional=True), padded(SOURCES, "left")
    encoded = model.get_encoder()(ids)
    expected = model(ids, labels=LABELS).logits
    for given in (encoded, encoded.to_tuple()):
        torch.testing.assert_close(model(encoder_outputs=given, labels=LABELS).logits, expected, **EXACT)


def test_a_reordered_state_belongs_to_other_sentences():
    model, read = model_of(), padded([[1, *target] for target in TARGETS])
    cache = model(IDS, decoder_input_ids=read).cache
    hidden, cell = cache.hidden.clone(), cache.cell.clone()
    cache.reorder_cache(torch.tensor([3, 3, 0]))
    assert cache.hidden.equal(hidden[:, [3, 3, 0]])
    assert cache.cell.equal(cell[:, [3, 3, 0]])


def until_the_end(words):
    """A translation, start and end included; what comes after the end is padding."""
    return words[: words.index(2) + 1] if 2 in words else words


# What beam search must find among all translations of up to three of five words.
TINY = {"vocab_size": 5, "num_hidden_layers": 1}
# Its translations differ, and end at different places.
TRANSLATOR = {"num_hidden_layers": 1, "bidirectional": True}
TINY_SOURCES = ragged_words(4, 5, seed=3, longest=4)


@pytest.mark.parametrize(
    "kind", [{}, {"num_attention_heads": 2, "bidirectional": True}, {"attention": "uniform", "readout": "additive"}]
)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_wide_beam_finds_the_best_of_all_translations(kind, use_cache):
    model = model_of(**TINY, **kind)
    found = model.generate(
        padded(TINY_SOURCES),
        max_new_tokens=3,
        num_beams=30,
        num_return_sequences=5,
        early_stopping="never",
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = []
    for row, source in enumerate(TINY_SOURCES):
        best = all_translations(model, source, 3)[:5]
        own = slice(5 * row, 5 * row + 5)
        sequences = [until_the_end(words) for words in found.sequences[own].tolist()]
        assert sequences == [[1, *words] for words, _ in best]
        scores = torch.tensor([score for _, score in best])
        torch.testing.assert_close(found.sequences_scores[own], scores, rtol=1e-5, atol=1e-6)
        lengths += [len(words) for words, _ in best]
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_search_takes_the_most_probable_word_at_each_step(use_cache):
    model = model_of(**TRANSLATOR)
    found = model.generate(IDS, max_new_tokens=6, use_cache=use_cache)
    assert found.shape == (6, 7)
    for row, source in zip(found.tolist(), SOURCES):
        words = [1]
        while len(words) < 7 and words[-1] != 2:
            words.append(slow_translation(model, source, words).logits[-1].argmax().item())
        assert row == words + [0] * (7 - len(words))


@pytest.mark.parametrize("unread", [1, 2])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_translation_goes_on_from_a_state(unread, use_cache):
    model, settings = model_of(**TRANSLATOR), {"max_length": 8, "min_length": 8, "use_cache": use_cache}
    whole = model.generate(IDS, **settings)
    cache = model(IDS, decoder_input_ids=whole[:, :3]).cache
    found = model.generate(IDS, decoder_input_ids=whole[:, : 3 + unread], cache=cache, **settings)
    assert found.equal(whole)
    assert len(found.unique(dim=0)) == 6
    with pytest.raises(ValueError, match="have 3 words, but cache has read 3: pass all words, .* at least one more"):
        model.generate(IDS, decoder_input_ids=whole[:, :3], cache=cache, **settings)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
def test_beams_go_on_from_the_state_of_their_sentence(settings, use_cache):
    model, settings = model_of(**TRANSLATOR), {"max_length": 8, "min_length": 8, "use_cache": use_cache, **settings}
    read = model.generate(IDS, max_length=4, min_length=4)
    whole = model.generate(IDS, decoder_input_ids=read, **settings)
    cache = model(IDS, decoder_input_ids=read[:, :3]).cache
    hidden = cache.hidden.clone()
    assert model.generate(IDS, decoder_input_ids=read, cache=cache, **settings).equal(whole)
    assert cache.hidden.equal(hidden)
    cache.reorder_cache(torch.arange(6).repeat_interleave(settings["num_beams"]))
    assert model.generate(IDS, decoder_input_ids=read, cache=cache, **settings).equal(whole)
    cache.reorder_cache(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=f"state of 2 sentences, but {6 * settings['num_beams']} are generated, .* a"):
        model.generate(IDS, decoder_input_ids=read, cache=cache, **settings)


@pytest.mark.parametrize("settings", [{"num_beams": 1}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
def test_translations_depend_on_no_other_sentence_and_no_padding(settings):
    model = model_of(**TRANSLATOR)

    def translations(ids, **arguments):
        found = model.generate(ids, max_new_tokens=6, **settings, **arguments)
        return [until_the_end(words) for words in found.tolist()]

    alone = list(itertools.chain.from_iterable(translations(torch.tensor([source])) for source in SOURCES))
    assert len({tuple(words) for words in alone}) > 4
    assert len({len(words) for words in alone}) > 2
    for side, extra in (("right", 0), ("right", 3), ("left", 2)):
        assert translations(padded(SOURCES, side, extra)) == alone
    ids = padded(SOURCES)
    assert translations(ids.masked_fill(ids == 0, 5), attention_mask=(ids != 0).long()) == alone
    assert translations(padded(SOURCES[::-1])[[5, 4, 3, 2, 1, 0]]) == alone


@pytest.mark.parametrize("num_beams", [1, 3])
def test_attention_of_every_step_is_that_of_the_sentence_it_ends_in(num_beams):
    model, ids = model_of(num_attention_heads=2, **TRANSLATOR), IDS
    found = model.generate(
        ids, max_new_tokens=5, num_beams=num_beams, return_dict_in_generate=True, output_attentions=True
    )
    sequences = found.sequences
    forced = model(ids, decoder_input_ids=sequences[:, :-1], output_attentions=True).cross_attentions[0]
    for step, (weights,) in enumerate(found.cross_attentions):
        if num_beams > 1:
            weights = weights[found.beam_indices[:, step].clamp(min=0)]
        unfinished = [step + 1 < len(until_the_end(words)) for words in sequences.tolist()]
        torch.testing.assert_close(weights[unfinished][:, :, 0], forced[unfinished, :, step], **EXACT)


def test_samples_have_the_probabilities_of_the_model():
    model, count = model_of(**TINY), 4000
    torch.manual_seed(0)
    found = model.generate(
        torch.tensor([TINY_SOURCES[2]]), max_new_tokens=2, do_sample=True, top_k=0, num_return_sequences=count
    )
    expected = {tuple(words): score * len(words) for words, score in all_translations(model, TINY_SOURCES[2], 2)}
    found = [tuple(until_the_end(words)) for words in found[:, 1:].tolist()]
    for words, score in expected.items():
        probability = torch.tensor(score).exp().item()
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert found.count(words) / count == pytest.approx(probability, abs=4 * deviation + 1e-3), words


def test_embeddings_translate_as_their_words_do():
    model, settings = model_of(**TRANSLATOR), {"num_beams": 2, "max_new_tokens": 6}
    embedded = model.get_input_embeddings()(IDS).masked_fill(IDS[..., None] == 0, torch.nan)
    found = model.generate(inputs_embeds=embedded, attention_mask=(IDS != 0).long(), **settings)
    assert found.equal(model.generate(IDS, **settings))


def test_autocast_is_near_and_translates_where_cpus_have_no_kernels_for_it(monkeypatch):
    monkeypatch.setattr(masked_lstm, "_has_half_kernels", lambda: False)
    model = model_of(**TRANSLATOR).float()
    exact = model(IDS, labels=LABELS)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(IDS, labels=LABELS)
        translations = model.generate(IDS, num_beams=2, max_new_tokens=6)
    torch.testing.assert_close(output.loss.float(), exact.loss, rtol=0.05, atol=0.05)
    assert all(gradient.isfinite().all() for gradient in gradients(model, output.loss).values())
    assert translations.shape[0] == len(IDS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("training", [False, True])
def test_a_gpu_gives_the_same_gradients_and_translations(training):
    model = model_of(**TRANSLATOR)
    expected = gradients(model, model(IDS, labels=LABELS).loss)
    translations = model.generate(IDS, num_beams=3, max_new_tokens=6)
    model.cuda()
    assert model.generate(IDS.cuda(), num_beams=3, max_new_tokens=6).cpu().equal(translations)
    found = gradients(model, model.train(training)(IDS.cuda(), labels=LABELS.cuda()).loss)
    torch.testing.assert_close(found, expected, check_device=False, rtol=1e-8, atol=1e-10)


def test_the_paper_counts_other_parameters_than_its_equations_have():
    config = LstmSeq2SeqConfig(vocab_size=8000, num_hidden_layers=2, bidirectional=True, dropout=0.5)
    model = LstmSeq2SeqForConditionalGeneration(config)
    embeddings = 8000 * 256
    assert model.num_parameters() - embeddings == 5_935_168
    assert 6_132_544 - 5_935_168 == 197_376 == 3 * (256 * 256 + 256)
    assert model.get_input_embeddings().weight.numel() == embeddings


def test_new_weights_are_those_of_pytorch():
    model = LstmSeq2SeqForConditionalGeneration(LstmSeq2SeqConfig(vocab_size=900, embedding_std=0.3))
    embeddings = model.encoder.embeddings.weight
    assert not embeddings[0].any()
    assert embeddings[1:].std().item() == pytest.approx(0.3, rel=0.02)
    for name, parameter in model.named_parameters():
        if "embeddings" not in name:
            # Uniform between ±1/√256.
            assert parameter.abs().max().item() == pytest.approx(1 / 16, rel=0.02), name
            assert parameter.std().item() == pytest.approx(1 / 16 / 3**0.5, rel=0.2), name


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({}, {"encoder", "decoder", "attention", "readout"}),
        ({"attention": "uniform"}, {"encoder", "decoder", "readout"}),
        ({"attention": "frozen"}, {"encoder", "decoder", "readout"}),
        ({"train_attention_only": True}, {"attention"}),
    ],
)
def test_training_moves_all_that_is_not_frozen(settings, trained):
    model = model_of(**settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.1)
    model.train()(IDS, labels=LABELS).loss.backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert moved == {name for name in before if name.split(".")[0] in trained}


def test_resized_embeddings_keep_what_the_words_had(tmp_path):
    model, ids = model_of(target_vocab_size=11), IDS
    before = model(ids, labels=LABELS).logits
    model.resize_token_embeddings(14)
    after = model(ids, labels=LABELS).logits
    assert after.shape[-1] == model.config.num_target_words == 14
    torch.testing.assert_close(after[..., :11], before, **EXACT)
    model.save_pretrained(tmp_path)
    back = LstmSeq2SeqForConditionalGeneration.from_pretrained(tmp_path, dtype="auto").eval()
    assert back(ids, labels=LABELS).logits.equal(after)
    frozen = model_of(train_attention_only=True)
    frozen.resize_token_embeddings(14)
    assert {name for name, p in frozen.named_parameters() if p.requires_grad} == {"attention.query.weight"}


def test_a_trainer_makes_the_same_step_with_and_without_accumulation(tmp_path):
    trained = []
    for batch_size, accumulated in ((6, 1), (2, 3), (1, 6)):
        model = model_of()
        translation_trainer(
            model, tmp_path, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulated
        ).train()
        trained.append(model.state_dict())
    before = model_of()
    expected = gradients(before, before(IDS, labels=LABELS).loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(trained[0][name], before.state_dict()[name] - 0.1 * gradient)
        for other in trained[1:]:
            torch.testing.assert_close(other[name], trained[0][name])


def test_a_trainer_evaluates_loss_and_translations(tmp_path):
    model = model_of(**TRANSLATOR)
    trainer = translation_trainer(model, tmp_path, per_device_eval_batch_size=6)
    prediction = trainer.predict(trainer.eval_dataset)
    expected = model.generate(IDS, num_beams=2, max_length=7)
    assert prediction.predictions[:, :7].tolist() == expected.tolist()
    assert not prediction.predictions[:, 7:].any()
    assert prediction.metrics["test_loss"] == pytest.approx(model(IDS, labels=LABELS).loss.item())


def test_a_trainer_smooths_labels(tmp_path):
    model = model_of()
    trainer = translation_trainer(model, tmp_path, label_smoothing_factor=0.2)
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(6)])
    assert batch["labels"].equal(LABELS)
    log_probabilities = model(IDS, labels=LABELS).logits.log_softmax(-1)[LABELS >= 0]
    correct = log_probabilities[range(len(log_probabilities)), LABELS[LABELS >= 0]]
    expected = -(0.8 * correct + 0.2 * log_probabilities.mean(-1)).mean()
    torch.testing.assert_close(trainer.compute_loss(model, batch), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be an integer from 1 to .* got 0"),
        ({"target_vocab_size": 0}, "target_vocab_size must be an integer from 1 to .* got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1 to .* got 0"),
        ({"attention": "none"}, "attention must be one of learned, uniform, frozen, got 'none'"),
        ({"readout": "linear"}, "readout must be one of mlp, additive, got 'linear'"),
        ({"directions": "mean"}, "directions must be one of added, concatenated, got 'mean'"),
        ({"directions": "concatenated"}, "needs bidirectional=True and an even hidden_size, got .*=False and 256"),
        (
            {"directions": "concatenated", "bidirectional": True, "hidden_size": 5},
            "an even hidden_size, got bidirectional=True and 5",
        ),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": 0.5}, "dropout=0.5 is applied between LSTM layers, but num_hidden_layers is 1; set dropout=0"),
        ({"embedding_std": -1.0}, "embedding_std must not be negative, got -1.0"),
        ({"attention": "uniform", "num_attention_heads": 2}, "needs num_attention_heads=1, got 2"),
        ({"target_vocab_size": 9}, "target_vocab_size=9; set share_encoder_decoder_embeddings=False"),
        ({"tie_word_embeddings": True}, "the output layer has separate weights"),
        ({"attention": "frozen", "train_attention_only": True}, "needs attention='learned', got 'frozen'"),
        ({"pad_token_id": -1}, "pad_token_id must be None or from 0 to 63 .vocab_size is 64., got -1"),
        (
            {"pad_token_id": 50, "target_vocab_size": 9, "share_encoder_decoder_embeddings": False},
            "from 0 to 8 .num_target_words is 9., got 50",
        ),
        ({"decoder_start_token_id": 64}, "decoder_start_token_id must be from 0 to 63 .*, got 64"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id must be from 0 to 63 .*, got None"),
        ({"eos_token_id": [2, 99]}, "eos_token_id must be None or from 0 to 63 .num_target_words is 64., got 99"),
        ({"bos_token_id": -4}, "bos_token_id must be None or from 0 to 63 .num_target_words is 64., got -4"),
    ],
)
def test_impossible_configurations_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LstmSeq2SeqConfig(**settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": LABELS}, "pass either input_ids or inputs_embeds"),
        ({"input_ids": IDS, "inputs_embeds": torch.ones(6, 7, 5), "labels": LABELS}, "pass either input_ids or"),
        ({"input_ids": IDS}, "give decoder_input_ids or labels"),
        ({"input_ids": IDS, "labels": LABELS[:, :0]}, "the target is empty; pass at least one word"),
        ({"input_ids": IDS, "decoder_input_ids": IDS[:, :0]}, "the target is empty"),
        ({"input_ids": IDS * (torch.arange(6) != 4)[:, None], "labels": LABELS}, "sentence 4 of the batch is empty"),
        ({"input_ids": IDS[:, :0], "labels": LABELS}, "sentence 0 of the batch is empty; leave it out"),
        ({"inputs_embeds": torch.ones(6, 7, 9), "labels": LABELS}, r"must have shape \(batch, length, 5\), got"),
        (
            {"encoder_outputs": BaseModelOutput(torch.ones(6, 7, 4)), "labels": LABELS},
            r"LstmEncoderOutput that get_encoder\(\) returns, got BaseModelOutput without final_hidden",
        ),
        ({"encoder_outputs": (torch.ones(6, 7, 4),), "labels": LABELS}, "LstmEncoderOutput without final_hidden"),
        (
            {"input_ids": IDS, "attention_mask": torch.zeros_like(IDS), "labels": LABELS},
            "sentence 0 of the batch is empty",
        ),
    ],
)
def test_what_cannot_be_translated_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        model_of()(**arguments)


def test_labels_without_gaps_need_no_padding():
    model, full = model_of(), torch.tensor([[7, 8, 2]])
    expected = model(IDS[:1], IDS[:1] != 0, labels=full).loss
    model.config.pad_token_id = None
    assert model(IDS[:1], IDS[:1] != 0, labels=full).loss == expected
    with pytest.raises(ValueError, match="labels contain -100, .* but pad_token_id is None; set it"):
        model(IDS[:1], IDS[:1] != 0, labels=torch.tensor([[7, -100, 2]]))


def test_what_would_be_ignored_is_refused():
    with pytest.raises(TypeError, match="decoder_attention_mask"):
        model_of()(IDS, labels=LABELS, decoder_attention_mask=IDS)
    with pytest.raises(ValueError, match="sentence 1 of the batch is empty"):
        model_of().generate(torch.tensor([[4, 5], [0, 0]]))
