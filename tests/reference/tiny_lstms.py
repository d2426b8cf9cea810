# Licensed under the Apache License, Version 2.0.
"""LSTMs with attention and their proxies, small enough for every test, and what their tests share."""

import torch
from datasets import Dataset
from fresh_processes import python
from slow_score_norm import padded, ragged_words
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Seq2SeqTrainer, Seq2SeqTrainingArguments

import hf_attn_dynamics as had


SOURCES = ragged_words(6, 11)
TARGETS = [[*words, 2] for words in ragged_words(6, 9, seed=1, longest=5)]
IDS = padded(SOURCES)
CLASSES = torch.tensor([0, 1, 1, 0, 1, 0])
SIZES = {"vocab_size": 11, "embedding_size": 5}
LSTM_SIZES = {**SIZES, "hidden_size": 4, "num_hidden_layers": 2}

# Of each class with a lexical probe: its configuration, and the settings of a small one.
LEXICAL_MODELS = {
    "LstmSeq2SeqForConditionalGeneration": ("LstmSeq2SeqConfig", {**LSTM_SIZES, "readout_size": 6}),
    "LstmForSequenceClassification": ("LstmConfig", {**LSTM_SIZES, "attention_size": 6}),
    "ProxyForSeq2Seq": ("ProxyConfig", {**SIZES, "target_vocab_size": 9}),
    "ProxyForSequenceClassification": ("ProxyConfig", SIZES),
}


def tiny_lexical(name, **changes):
    """A model for evaluation, in float64; its weights are so large that all matter."""
    config, settings = LEXICAL_MODELS[name]
    torch.manual_seed(0)
    model = getattr(had, name)(getattr(had, config)(**{**settings, **changes})).double().eval()
    for key, parameter in model.named_parameters():
        if "embeddings" not in key:
            parameter.data.normal_(std=0.8 if parameter.dim() > 1 else 0.2)
    return model


def labels_of(targets=TARGETS, extra=0):
    """Target words, padded with -100."""
    labels = padded(targets, extra=extra)
    return labels.masked_fill(labels == 0, -100)


def labelled(name):
    """Labels for `IDS`."""
    return labels_of() if "Seq2Seq" in name else CLASSES


def gradients(model, loss):
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values()))))


def word_tokenizer():
    """Its words are numbers; a sentence ends as it is."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{str(number): number for number in range(3, 11)}}
    tokenizer = Tokenizer(models.WordLevel(words, "<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<s>"
    )


def translation_trainer(model, folder, **settings):
    """By default it makes one step along the gradient, with learning rate 0.1."""
    data = Dataset.from_dict({"input_ids": SOURCES, "labels": TARGETS})
    defaults = {
        "max_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "predict_with_generate": True,
        "generation_num_beams": 2,
        "generation_max_length": 7,
    }
    args = Seq2SeqTrainingArguments(folder, **{**defaults, **settings})
    collator = DataCollatorForSeq2Seq(word_tokenizer(), model)
    return Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data, data_collator=collator)


# Loads checkpoints where importing the package fails, as if it were not installed.
_FRESH = """
import sys
sys.modules["hf_attn_dynamics"] = None
import torch, transformers
for folder, auto_class, ids, labels, expected in torch.load(sys.argv[1]):
    auto = getattr(transformers, auto_class)
    model = auto.from_pretrained(folder, dtype="auto", trust_remote_code=True).eval()
    with torch.no_grad():
        found = model(ids, labels=labels)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    torch.testing.assert_close((found.loss, found.logits), expected[:2], rtol=0, atol=1e-12)
    if expected[2] is not None:
        assert model.generate(ids, num_beams=3, max_new_tokens=5).equal(expected[2])
"""


def assert_saved_code_suffices(checkpoints, folder):
    """Checks that checkpoints give, by the code saved beside them alone, what they give here.

    Args:
        checkpoints (list of `(model, folder, auto_class)`): Models, and where they were saved.
        folder (`Path`): For what they give here.
    """
    rows = []
    for model, saved, auto_class in checkpoints:
        labels = labelled(type(model).__name__)
        with torch.no_grad():
            output = model(IDS, labels=labels)
        beams = model.generate(IDS, num_beams=3, max_new_tokens=5) if model.can_generate() else None
        rows.append((str(saved), auto_class, IDS, labels, (output.loss, output.logits, beams)))
    torch.save(rows, folder / "expected.pt")
    (result,) = python(["-c", _FRESH, folder / "expected.pt"])
    assert result.returncode == 0, result.stderr
