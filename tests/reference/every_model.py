# Licensed under the Apache License, Version 2.0.
"""A small model of every class of the package, and a batch with labels for it."""

import torch
from tiny_lstms import IDS, LEXICAL_MODELS, labelled, tiny_lexical
from tiny_models import CLASSES, batch_for, headwise_class, tiny_config

import hf_attn_dynamics as had


LEXICAL = [*LEXICAL_MODELS, "BowAttentionForSequenceClassification"]
MODELS = [*CLASSES, ("electra", "ForJointPreTraining"), *(("lexical", name) for name in LEXICAL)]


def model_of(kind, name):
    if kind != "lexical":
        torch.manual_seed(0)
        return headwise_class(kind, name)(tiny_config(kind)).eval()
    if name in LEXICAL_MODELS:
        return tiny_lexical(name)
    return had.BowAttentionForSequenceClassification(had.BowAttentionConfig(vocab_size=11)).eval()


def inputs_of(kind, name):
    """A batch that the model reads, with labels if it learns."""
    if kind == "lexical":
        labels = labelled(name) if name in LEXICAL_MODELS else labelled("LstmForSequenceClassification")
        return {"input_ids": IDS, "attention_mask": (IDS != 0).long(), "labels": labels}
    batch = {name: value for name, value in batch_for(kind).items() if not name.startswith("decoder_")}
    if kind == "marian":
        batch["decoder_input_ids"] = batch["input_ids"]
    shape = batch["input_ids"].shape
    for term in model_of(kind, name).loss_terms:
        if not term.made:
            per_sentence = term.kind in ("problem", "position") or term.name == "nsp"
            batch[term.labels] = torch.ones(shape[:1] if per_sentence else shape, dtype=torch.long)
    return batch
