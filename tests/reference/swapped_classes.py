# Licensed under the Apache License, Version 2.0.
"""A classifier that has its classes in another order."""

from transformers import AutoModelForSequenceClassification, AutoTokenizer


def classes_swapped(source, target, names):
    """Saves the classifier of two classes in `source` with these swapped, named or (`None`) numbered; returns it."""
    model = AutoModelForSequenceClassification.from_pretrained(source)
    for parameter in model.classifier.parameters():
        parameter.data = parameter.data.flip(0)
    model.config.id2label = dict(enumerate(names or ["LABEL_0", "LABEL_1"]))
    model.config.label2id = {name: number for number, name in model.config.id2label.items()}
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return model
