# Licensed under the Apache License, Version 2.0.
"""What the heads of Transformers' models compute their losses from; nothing here needs PyTorch."""

from typing import NamedTuple


# Column of labels that are shifted already, which the loss of kind `next` reads in place of `labels`. Trainers add it
# where sentences are divided over processes, each of which lacks the label after its last token.
SHIFTED_LABELS = "shift_labels"


class LossTerm(NamedTuple):
    """One term of a head's task loss.

    Args:
        name (`str`): Name in logs.
        labels (`str`): Column of its labels.
        logits (`str`): Output they are compared with.
        kind (`str`): What the labels are: `class`, -100 where there is none; `next`, as `class`, each compared with
            the output of the token before it, unless the batch has `shift_labels`, too; `binary`, 0 or 1 for each
            real token, -100 where there is none; `position` in the sentence, past its end for answers that were cut
            off; or `problem`, as the configuration's `problem_type` says. `token`: as `class`, and the output is each
            token's loss already.
        weight (`float`): Factor in the loss.
        made (`bool`): Whether the model makes the labels itself: they are a column of its output, not of the batch.
        classes (`str` or `int`, *optional*): Number of classes, or the value of the configuration that is it; labels
            that are none of them are refused.
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

# Terms of the loss by the end of a stock class's name; of several ends that fit, the longest counts.
HEAD_LOSSES: dict[str, tuple[LossTerm, ...]] = {
    "ForMaskedLM": (_MASKED_LM,),
    "ForCausalLM": (_NEXT_TOKEN,),
    "LMHeadModel": (_NEXT_TOKEN,),
    # Decoders taken out of an encoder–decoder: labels are not shifted.
    "BartForCausalLM": (_SAME_TOKEN,),
    "MarianForCausalLM": (_SAME_TOKEN,),
    "PegasusForCausalLM": (_SAME_TOKEN,),
    "WhisperForCausalLM": (_SAME_TOKEN,),
    # Of language models that read images; an encoder–decoder does not shift labels, see `loss_terms_of`.
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
