# Licensed under the Apache License, Version 2.0.
"""`predict()` returns what the head of a model gives, and nothing that it used on the way."""

import pytest
import torch
from tiny_models import CLASSES, batch_for, headwise_class, tiny_model
from transformers import Trainer, TrainingArguments

import hf_attn_dynamics as had
from hf_attn_dynamics import HeadwiseTrainer


TOKENS, PAIRS = (8, 17, 60), (8, 2)
OUTPUTS = {
    **dict.fromkeys(("ForMaskedLM", "ForCausalLM", "LMHeadModel"), [TOKENS]),
    "ForSequenceClassification": [PAIRS],
    "ForNextSentencePrediction": [PAIRS],
    "ForTokenClassification": [(8, 17, 2)],
    "ForQuestionAnswering": [(8, 17), (8, 17)],
    "ForPreTraining": [TOKENS, PAIRS],
    "MTModel": [TOKENS],
    "ForJointPreTraining": [(8, 17), (8, 17)],  # what is replaced is drawn while the model runs
}
HEADS = [(kind, head) for kind, head in CLASSES if headwise_class(kind, head).loss_terms]
HEADS += [("electra", "ForJointPreTraining")]


def predictions(trainer_class, folder, model, batch):
    """Shapes of what is predicted for a batch, in two parts."""
    args = TrainingArguments(
        str(folder), per_device_eval_batch_size=4, report_to="none", use_cpu=True, disable_tqdm=True
    )
    rows = [{name: column[row] for name, column in batch.items()} for row in range(len(batch["input_ids"]))]
    made = trainer_class(
        model, args, data_collator=lambda rows: {n: torch.stack([r[n] for r in rows]) for n in rows[0]}
    )
    found = made.predict(rows).predictions
    return [part.shape for part in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize("trainer_class", [Trainer, HeadwiseTrainer])
@pytest.mark.parametrize(("kind", "head"), HEADS)
def test_predictions_of_headwise_models_are_what_their_heads_give(tmp_path, kind, head, trainer_class):
    model, batch = tiny_model(kind, head), batch_for(kind)
    expected = [(8, 17)] if (kind, head) == ("electra", "ForPreTraining") else OUTPUTS[head]
    labels = {term.labels: term for term in model.loss_terms if not term.made}
    for name, term in labels.items():
        of_sentence = term.kind in ("position", "problem") or term.name == "nsp"
        batch[name] = torch.zeros_like(batch["input_ids"][:, 0] if of_sentence else batch["input_ids"])
    assert predictions(trainer_class, tmp_path, model, batch) == expected
    unlabelled = {name: column for name, column in batch.items() if name not in labels}
    # Without labels, nothing is replaced.
    expected = expected[:1] if head == "ForJointPreTraining" else expected
    assert predictions(trainer_class, tmp_path, model, unlabelled) == expected


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize(
    ("name", "config", "shape"),
    [
        ("LstmForSequenceClassification", "LstmConfig", PAIRS),
        ("BowAttentionForSequenceClassification", "BowAttentionConfig", PAIRS),
        ("ProxyForSequenceClassification", "ProxyConfig", PAIRS),
        ("LstmSeq2SeqForConditionalGeneration", "LstmSeq2SeqConfig", (8, 17, 60)),
        ("ProxyForSeq2Seq", "ProxyConfig", (8, 17, 60)),
    ],
)
def test_predictions_of_small_models_are_logits(tmp_path, name, config, shape, labelled):
    model = getattr(had, name)(getattr(had, config)(vocab_size=60))
    batch = batch_for("bert")
    if len(shape) == 3:
        batch["decoder_input_ids"] = batch["input_ids"]
    if labelled:
        batch["labels"] = batch["input_ids"] if len(shape) == 3 else torch.zeros(8, dtype=torch.long)
    if name == "ProxyForSeq2Seq" and not labelled:
        shape = (8, 1, 60)  # it has no decoder: all positions are predicted alike
    assert predictions(Trainer, tmp_path, model, batch) == [shape]
