# Licensed under the Apache License, Version 2.0.
"""The catalogue of models that extend no stock one. It is apart from `architectures`, with which all headwise code is
saved beside a checkpoint."""

from typing import NamedTuple


class OwnArchitecture(NamedTuple):
    """A model that extends no stock one: it has files of its own, and no tokenizer.

    Attributes:
        model_type (`str`): `model_type` of its configuration.
        file (`str`): End of the names of its files, `configuration_…` and `modeling_…`.
        prefix (`str`): Start of the names of its classes.
        heads (`dict[str, str]`): Ends of their names, by Auto class.
    """

    model_type: str
    file: str
    prefix: str
    heads: dict[str, str]

    def code_map(self) -> dict[str, str]:
        """File and class for each Auto class."""
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
