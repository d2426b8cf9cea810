# Licensed under the Apache License, Version 2.0.
"""Loss terms of the task heads of Transformers. This file does not import PyTorch."""

from typing import NamedTuple


# Column of shifted labels, which the loss of kind `next` reads instead of `labels`. Trainers add it where processes
# share sentences (sequence parallelism), since each process lacks the label after its last token.
SHIFTED_LABELS = "shift_labels"


class LossTerm(NamedTuple):
    """One term of a head's task loss.

    Args:
        name (`str`): Name in logs.
        labels (`str`): Label column.
        logits (`str`): Output that is compared with the labels.
        kind (`str`): Kind of labels: `class`; `next`, classes of the next token, shifted unless the batch also has
            `shift_labels`; `binary`, 0 or 1 for each non-padding token; `position` in the sentence, past its end for
            truncated answers; `problem`, given by `config.problem_type`; or `token`, classes for which the output
            contains the loss of each token. -100 is ignored.
        weight (`float`): Factor in the loss.
        made (`bool`): Whether the model returns the labels in its output, instead of reading them from the batch.
        classes (`str` or `int`, *optional*): Number of classes, or its name in the configuration, for checks.
    """

    name: str
    labels: str
    logits: str
    kind: str = "class"
    weight: float = 1.0
    made: bool = False
    classes: str | int | None = None


_MASKED_LM = LossTerm("mlm", "labels", "logits", classes="vocab_size")
_NEXT_TOKEN = LossTerm("clm", "labels", "logits", kind="next", classes="vocab_size")
_SAME_TOKEN = LossTerm("clm", "labels", "logits", classes="vocab_size")
_PROBLEM = LossTerm("classification", "labels", "logits", kind="problem", classes="num_labels")

# Loss terms by the suffix of a stock class name; the longest matching suffix applies.
HEAD_LOSSES: dict[str, tuple[LossTerm, ...]] = {
    "ForMaskedLM": (_MASKED_LM,),
    "ForCausalLM": (_NEXT_TOKEN,),
    "LMHeadModel": (_NEXT_TOKEN,),
    # Decoders of an encoder–decoder: labels are not shifted.
    "BartForCausalLM": (_SAME_TOKEN,),
    "MarianForCausalLM": (_SAME_TOKEN,),
    "PegasusForCausalLM": (_SAME_TOKEN,),
    "WhisperForCausalLM": (_SAME_TOKEN,),
    # Language models that read images; for encoder–decoders, which do not shift labels, see `loss_terms_of`.
    "ForConditionalGeneration": (_NEXT_TOKEN,),
    "MTModel": (LossTerm("translation", "labels", "logits", classes="decoder_vocab_size"),),
    "ForSequenceClassification": (_PROBLEM,),
    "ForImageClassification": (_PROBLEM,),
    "ForTokenClassification": (LossTerm("classification", "labels", "logits", classes="num_labels"),),
    "ForMultipleChoice": (LossTerm("classification", "labels", "logits"),),
    "ForNextSentencePrediction": (LossTerm("nsp", "labels", "logits", classes=2),),
    "ForQuestionAnswering": (
        LossTerm("start", "start_positions", "start_logits", kind="position", weight=0.5),
        LossTerm("end", "end_positions", "end_logits", kind="position", weight=0.5),
    ),
    "BertForPreTraining": (
        LossTerm("mlm", "labels", "prediction_logits", classes="vocab_size"),
        LossTerm("nsp", "next_sentence_label", "seq_relationship_logits", classes=2),
    ),
    "ElectraForPreTraining": (LossTerm("replaced", "labels", "logits", kind="binary"),),
}
