# Licensed under the Apache License, Version 2.0.
"""Results of every recipe for translation."""

from dataclasses import dataclass

from .base import Record, result


BLEU = "Corpus BLEU on the test text, or on the validation text if there is no test text."
EXACT_MATCH = "Fraction of these sentences whose translation equals the reference."
EXAMPLES = "Some of these sentences, of different lengths"


@dataclass(kw_only=True)
class CorpusFacts(Record):
    """The parallel text of a run."""

    bleu_text: str = result("Text that BLEU is computed on: test or validation.")
    bleu_signature: str = result("Signature of sacreBLEU.")
    sacrebleu_version: str = result("Version of sacreBLEU.")
    vocab_size: int = result("Number of tokens in the vocabulary that both languages share.")
    train_examples: int = result("Number of sentence pairs to train on.")
    eval_examples: int = result("Number of sentence pairs of the validation text.")
    bleu_examples: int = result("Number of sentences that are translated.")
    text: str = result("Name of the data.")
