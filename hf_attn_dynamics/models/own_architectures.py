# Licensed under the Apache License, Version 2.0.
"""Table of the models without a stock parent, separate from `architectures`, so that checkpoints of these models are
saved without all headwise code."""

from typing import NamedTuple


class OwnArchitecture(NamedTuple):
    """A model without a stock parent; it has its own files, and no tokenizer.

    Attributes:
        model_type (`str`): `model_type` of its configuration.
        file (`str`): Suffix of its file names, `configuration_…` and `modeling_…`.
        prefix (`str`): Prefix of its class names.
        heads (`dict[str, str]`): Suffixes of its class names, by Auto class.
    """

    model_type: str
    file: str
    prefix: str
    heads: dict[str, str]

    def code_map(self) -> dict[str, str]:
        """The `auto_map`: file and class for each Auto class."""
        return {
            "AutoConfig": f"configuration_{self.file}.{self.prefix}Config",
            **{auto: f"modeling_{self.file}.{self.prefix}{head}" for auto, head in self.heads.items()},
        }


_CLASSIFIER = {"AutoModelForSequenceClassification": "ForSequenceClassification"}
_TRANSLATOR = {"AutoModelForSeq2SeqLM": "ForConditionalGeneration"}
OWN_ARCHITECTURES: dict[str, OwnArchitecture] = {
    row.model_type: row
    for row in (
        OwnArchitecture(
            "bag-of-words-proxy", "proxy", "Proxy", {"AutoModelForSeq2SeqLM": "ForSeq2Seq", **_CLASSIFIER}
        ),
        OwnArchitecture("bow-attention", "bow_attention", "BowAttention", _CLASSIFIER),
        OwnArchitecture("lstm-attention", "lstm", "Lstm", _CLASSIFIER),
        OwnArchitecture("lstm-attention-seq2seq", "lstm_seq2seq", "LstmSeq2Seq", _TRANSLATOR),
    )
}
