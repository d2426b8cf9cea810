# Licensed under the Apache License, Version 2.0.
"""The small model of demonstrations: a guided RoBERTa, trained on embedded text for a minute."""

from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from transformers import set_seed

from .. import HeadwiseTrainer, HeadwiseTrainingArguments, MaskedLanguageModelCollator
from ..data import delimiter_token_ids, embedded_splits, pack_blocks, period_token_ids, train_byte_level_bpe
from ..models.headwise_classes import twin_class
from ..training import show_progress, train_from_newest
from .run import cpu_only
from .small_models import architecture_row, masked_settings, small_config


PRETRAINED = Path("runs/pretrain_ag/model")  # model of the pretraining demonstration
VOCABULARY, LENGTH, STEPS = 4000, 64, 200


def demonstration_model(folder: str | Path, seed: int, disable_tqdm: bool) -> Path:
    """Finds the model of the pretraining demonstration, or trains a small one.

    Args:
        folder (`str` or `Path`): Folder to train in; a stopped training continues.
        seed (`int`): Seed of the training.
        disable_tqdm (`bool`): Whether to hide the progress bar.

    Returns:
        `Path`: folder of the model and its tokenizer.
    """
    model = Path(folder) / "model"
    for found in (model, PRETRAINED):  # its own first, which a resumed run has used
        if (found / "config.json").is_file():
            return found
    trainer = _trainer(Path(folder) / "checkpoints", seed, disable_tqdm)
    show_progress(trainer, "demonstration model")
    train_from_newest(trainer)
    trainer.save_model(str(model))
    trainer.accelerator.wait_for_everyone()
    return model


def _trainer(folder: Path, seed: int, disable_tqdm: bool) -> HeadwiseTrainer:
    # The main process prepares the data, the others read its cache.
    with PartialState().main_process_first():
        documents, _ = embedded_splits()
        texts = Dataset.from_dict({"text": [text for document in documents for text in document.split("\n")]})
        tokenizer = train_byte_level_bpe(texts["text"], VOCABULARY)
        blocks = pack_blocks(texts, tokenizer, LENGTH)
    row = architecture_row("roberta")
    config = small_config(
        row,
        tokenizer,
        length=LENGTH,
        num_hidden_layers=8,
        hidden_size=128,
        num_attention_heads=4,
        dropout=0.1,
        guidance={
            "fraction": 0.5,
            "delimiter_token_ids": delimiter_token_ids(tokenizer),
            "period_token_ids": period_token_ids(tokenizer) or None,
        },
        **masked_settings(row),
    )
    training_args = HeadwiseTrainingArguments(
        str(folder),
        max_steps=STEPS,
        learning_rate=1e-3,
        adam_beta2=0.98,
        guidance_weight=0.1,
        per_device_train_batch_size=16,
        logging_steps=10,
        save_steps=100,
        save_total_limit=1,
        report_to="none",
        seed=seed,
        disable_tqdm=disable_tqdm,
        use_cpu=cpu_only(),
    )
    set_seed(seed)
    return HeadwiseTrainer(
        twin_class("RobertaForMaskedLM")(config),
        training_args,
        train_dataset=blocks,
        data_collator=MaskedLanguageModelCollator(tokenizer, seed=seed),
        processing_class=tokenizer,
    )
