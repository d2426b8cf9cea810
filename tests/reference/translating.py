"""Small parallel text and a small model, for tests of the recipes that translate."""

from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer


SMALL = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 36,
    "max_length": 24,
    "max_steps": 4,
    "warmup_steps": 2,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 8,
    "save_steps": 2,
}
NOUNS = {"Katze": "cat", "Kuh": "cow", "Maus": "mouse", "Ente": "duck"}
VERBS = {"sieht": "sees", "hört": "hears", "sucht": "seeks"}
PAIRS = [
    (f"die {noun} {verb} die {other}", f"the {NOUNS[noun]} {VERBS[verb]} the {NOUNS[other]}")
    for noun in NOUNS
    for verb in VERBS
    for other in NOUNS
]


def write_pairs(folder, name, pairs):
    """Two files aligned by line, `name.de` and `name.en`."""
    for side, language in ((0, "de"), (1, "en")):
        Path(folder, f"{name}.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs))


def files(folder):
    """Flags that name the training and validation text in a folder."""
    names = {"": "train", "validation_": "valid"}
    sides = {"source": "de", "target": "en"}
    return {f"{key}{side}_file": folder / f"{names[key]}.{end}" for key in names for side, end in sides.items()}


def loaded(folder):
    """A saved model, and its tokenizer."""
    return (auto.from_pretrained(folder) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))


def lines(folder, name):
    """A text in German and English, a list of lines each."""
    return [Path(folder, f"{name}.{language}").read_text().splitlines() for language in ("de", "en")]


def likelihood(folder, pairs):
    """Negative log-likelihood of a token, and share of tokens that are the likeliest: one by one, without batches."""
    model, tokenizer = loaded(folder)
    total = right = count = 0
    for source, target in pairs:
        labels = tokenizer(text_target=target, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(**tokenizer(source, return_tensors="pt"), labels=labels).logits
        total -= logits.log_softmax(-1)[0, range(labels.shape[1]), labels[0]].sum().item()
        right += int((logits.argmax(-1) == labels).sum())
        count += labels.shape[1]
    return total / count, right / count


def translations(folder, sources, **settings):
    """Of each line alone."""
    model, tokenizer = loaded(folder)
    tokens = [model.generate(**tokenizer(source, return_tensors="pt"), **settings)[0] for source in sources]
    return [tokenizer.decode(one, skip_special_tokens=True).strip() for one in tokens]
