# Licensed under the Apache License, Version 2.0.
"""What the recipes for translation share: arguments, text, the model and its training, and how it translates."""

import copy
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from sacrebleu.metrics import BLEU
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback

from .. import HeadwiseMarianConfig, HeadwiseSeq2SeqTrainer, HeadwiseSeq2SeqTrainingArguments
from ..data import embedded_translation, load_parallel, train_marian_tokenizer, warn_of_unknown
from ..data.tables import column_of_flag
from ..models.head_sites import SITE_KINDS
from ..models.ignored_labels import is_labelled
from ..training import check_trainer_arguments, show_progress, train_from_newest
from .arguments.base import refuse_flags
from .arguments.translation import TextArguments, TranslationArguments
from .run import cpu_only


logger = logging.getLogger(__name__)

EXAMPLES = 5  # translations that are shown


@dataclass
class TranslationTrainingArguments(HeadwiseSeq2SeqTrainingArguments):
    """[`HeadwiseSeq2SeqTrainingArguments`] with defaults for translation, beside those of a recipe and its preset.

    These defaults differ: `adam_beta2` 0.98, `adam_epsilon` 1e-9, `lr_scheduler_type` inverse_sqrt,
    `train_sampling_strategy` group_by_length, `per_device_eval_batch_size` 128, `save_total_limit` 1, `report_to`
    none, `include_num_input_tokens_seen` non_padding.
    """

    adam_beta2: float = field(default=0.98, metadata={"help": "Adam's β2."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "Adam's ε."})
    lr_scheduler_type: str = field(default="inverse_sqrt", metadata={"help": "How the learning rate falls."})
    train_sampling_strategy: str = field(default="group_by_length", metadata={"help": "Order of the pairs."})
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Pairs of an evaluation batch."})
    save_total_limit: int | None = field(default=1, metadata={"help": "Checkpoints to keep, for --resume."})
    report_to: str | None = field(default="none", metadata={"help": "Trackers to report to."})
    include_num_input_tokens_seen: str = field(default="non_padding", metadata={"help": "Tokens to count."})

    # Flags that a recipe does not read -> what to do, instead.
    without_effect: ClassVar[dict[str, str]] = {
        "num_train_epochs": "set max_steps",
        "predict_with_generate": "set num_beams",
        "generation_num_beams": "set num_beams",
        "layer_rate_decay": "rates fall through one stack of layers, and here are two",
    }

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        refuse_flags(self, self.without_effect)
        super().__post_init__()


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Corpus:
    """Tokenized pairs, and the words of those that are translated; evaluation sets are sorted by length."""

    train: Dataset
    validation: Dataset
    test: Dataset
    test_words: Dataset
    tokenizer: PreTrainedTokenizerBase
    positions: int  # of a model for it
    bleu: BLEU


def load_texts(args: TextArguments) -> tuple[dict[str, Dataset], str]:
    """Training, validation and, if there is one, test text, and what to call the first."""
    columns = {name: column_of_flag(getattr(args, name)) for name in ("source_column", "target_column")}
    files = {
        "train": (args.source_file, args.target_file),
        "validation": (args.validation_source_file, args.validation_target_file),
        "test": (args.test_source_file, args.test_target_file),
    }
    for name, (source, target) in files.items():
        if target and not source:
            prefix = "" if name == "train" else f"{name}_"
            raise ValueError(f"{prefix}target_file {target} needs a {prefix}source_file beside it.")
    for first, second in (("source_file", "dataset_name"), ("test_source_file", "test_split")):
        values = getattr(args, first), getattr(args, second)
        if all(values):
            raise ValueError(f"{first} {values[0]} and {second} {values[1]!r} both name a text; give one of them.")
    of_hub = ("dataset_config", "dataset_split", "validation_split", "test_split")
    given = [name for name in of_hub if getattr(args, name) != type(args).__dataclass_fields__[name].default]
    if given and not args.dataset_name:
        raise ValueError(f"{given[0]} {getattr(args, given[0])!r} is of a dataset_name, but there is none.")
    of_lines = not args.dataset_name and all(target or not source for source, target in files.values())
    if of_lines and any(column is not None for column in columns.values()):
        raise ValueError(
            f"source_column {args.source_column!r} and target_column {args.target_column!r} are of tables, but no "
            "text is one."
        )
    if not args.source_file and not args.dataset_name:
        for name in ("validation", "test"):
            if files[name][0]:
                raise ValueError(f"{name}_source_file {files[name][0]} needs a source_file or dataset_name beside it.")
        return dict(zip(("train", "validation"), embedded_translation(seed=0))), "German number words to English"

    def load(name: str, split: str | None) -> Dataset | None:
        source, target = files[name]
        if source:
            return load_parallel(source, target, **({} if target else columns))
        if split is None or not args.dataset_name:
            return None
        hub = {"dataset_name": args.dataset_name, "dataset_config": args.dataset_config, "split": split}
        return load_parallel(None, None, **columns, **hub)

    splits = {"train": args.dataset_split, "validation": args.validation_split, "test": args.test_split}
    texts = {name: load(name, split) for name, split in splits.items()}
    if texts["validation"] is None:
        raise ValueError("no text to evaluate on: name a validation_source_file.")
    name = args.dataset_name or ", ".join(Path(file).name for file in [*args.source_file, *(args.target_file or [])])
    return {name: text for name, text in texts.items() if text is not None}, name


def encode(texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    return texts.map(
        lambda batch: tokenizer(batch["source"], text_target=batch["target"]),
        batched=True,
        remove_columns=["source", "target"],
        desc="Tokenizing",
    )


def lengths(pairs: Dataset) -> np.ndarray:
    """Tokens of the longer side of each pair."""
    return np.array([max(len(ids), len(labels)) for ids, labels in zip(pairs["input_ids"], pairs["labels"])])


def train_tokenizer(pairs: Dataset, vocab_size: int) -> PreTrainedTokenizerBase:
    """One vocabulary for both sides of a text."""
    with tempfile.TemporaryDirectory() as folder:
        # Once loaded, it does not need its files any more.
        return train_marian_tokenizer(pairs["source"], pairs["target"], vocab_size, folder)


def without_long(pairs: Dataset, max_length: int) -> Dataset:
    """Those pairs of a training text that have at most so many tokens on each side."""
    short = np.flatnonzero(lengths(pairs) <= max_length)
    if not len(short):
        raise ValueError(f"max_length={max_length}, but every pair of the training text is longer; raise it.")
    if len(short) == len(pairs):
        return pairs
    logger.warning("%d of %d pairs have more than max_length=%d tokens on a side, and are not trained on.",
                   len(pairs) - len(short), len(pairs), max_length)  # fmt: skip
    return pairs.select(short)


def load_corpus(args: TextArguments) -> tuple[Corpus, dict]:
    """All text as the model takes it, and what the summary says of it."""
    texts, name = load_texts(args)
    tokenizer = train_tokenizer(texts["train"], args.vocab_size)
    for side in ("source", "target"):
        warn_of_unknown(texts["validation"][side], tokenizer, f"the validation {side}")
    train = without_long(encode(texts["train"], tokenizer), args.max_length)
    # For `group_by_length`, which looks at every single pair otherwise.
    train = train.add_column("length", list(map(len, train["input_ids"])))
    evaluated = {}
    for key in ("validation", "test"):
        words = texts.get(key, texts["validation"])
        words = words.take(min(args.max_eval_examples or len(words), len(words)))
        pairs = encode(words, tokenizer)
        # Sentences of a batch end together, so that hardly any step of the search is for padding.
        order = np.argsort(-lengths(pairs), kind="stable")
        evaluated[key] = words.select(order), pairs.select(order)
    longest = max(args.max_length, *(int(lengths(pairs).max()) for _, pairs in evaluated.values()))
    # A translation may be longer than anything that was read.
    positions = 2 * longest
    bleu = bleu_for(args.languages)
    corpus = Corpus(
        train, evaluated["validation"][1], evaluated["test"][1], evaluated["test"][0], tokenizer, positions, bleu
    )
    facts = {
        "bleu_text": "test" if "test" in texts else "validation",
        **bleu_facts(bleu),
        "vocab_size": len(tokenizer),
        "train_examples": len(train),
        "eval_examples": len(corpus.validation),
        "bleu_examples": len(corpus.test),
        "text": name,
    }
    return corpus, facts


def prepare_corpus(args: TextArguments, training_args: TranslationTrainingArguments) -> tuple[Corpus, dict]:
    """[`load_corpus`] in each process; refuses what cannot be trained or translated."""
    check_trainer_arguments(training_args)
    if training_args.max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {training_args.max_steps}.")
    # One process prepares, the others read what it left in the cache.
    with PartialState().main_process_first():
        corpus, facts = load_corpus(args)
    asked = training_args.generation_max_length
    if asked is not None and not 1 < asked <= corpus.positions:
        raise ValueError(
            f"generation_max_length={asked}, but it must be from 2 to the {corpus.positions} positions of the model."
        )
    return corpus, facts


# ---------------------------------------------------------------------------------------------------------------------
# Model and training
# ---------------------------------------------------------------------------------------------------------------------


def parse_sites(name: str, text: str | None, default: dict | None = None) -> dict | None:
    """JSON of a flag as a configuration takes it, by kind of site; the encoder's, if it names none."""
    if text is None:
        return default
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} {text!r} is not valid JSON: {error}.") from error
    return value if isinstance(value, dict) and set(value) & set(SITE_KINDS) else {"encoder": value}


def build_config(args: TranslationArguments, corpus: Corpus, **heads: Any) -> HeadwiseMarianConfig:
    """Configuration of a model for some text; `heads` is what it says of attention heads."""
    tokenizer = corpus.tokenizer
    return HeadwiseMarianConfig(
        vocab_size=len(tokenizer),
        d_model=args.hidden_size,
        encoder_layers=args.encoder_layers,
        decoder_layers=args.decoder_layers,
        encoder_attention_heads=args.num_attention_heads,
        decoder_attention_heads=args.num_attention_heads,
        encoder_ffn_dim=4 * args.hidden_size,
        decoder_ffn_dim=4 * args.hidden_size,
        max_position_embeddings=corpus.positions,
        activation_function="relu",
        dropout=args.dropout,
        attention_dropout=args.attention_dropout,
        # So that embeddings, multiplied by √d_model, are as large as the positions that are added.
        init_std=args.hidden_size**-0.5,
        scale_embedding=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        **heads,
    )


def make_trainer(
    name: str,
    model: PreTrainedModel,
    steps: int,
    training_args,
    corpus: Corpus,
    callbacks,
    metrics: Mapping[str, Callable] | None = None,
    trainer_class: type[HeadwiseSeq2SeqTrainer] = HeadwiseSeq2SeqTrainer,
    **settings,
) -> HeadwiseSeq2SeqTrainer:
    """Trainer of one phase; `metrics` are what evaluation measures, `settings` replace training arguments."""
    run_args = copy.copy(training_args)
    for key, value in {"max_steps": steps, "gate_penalty": 0.0, **settings}.items():
        setattr(run_args, key, value)
    run_args.output_dir = str(Path(training_args.output_dir) / "checkpoints" / name)
    trainer = trainer_class(
        model,
        run_args,
        data_collator=DataCollatorForSeq2Seq(corpus.tokenizer, model=model),
        train_dataset=corpus.train,
        eval_dataset=corpus.validation,
        processing_class=corpus.tokenizer,
        callbacks=callbacks,
        **(metrics or {}),
    )
    show_progress(trainer, name)
    return trainer


def train(
    name: str, model: PreTrainedModel, steps: int, training_args, corpus: Corpus, callbacks=None, **settings
) -> HeadwiseSeq2SeqTrainer:
    """Trains a model for some steps, from the last checkpoint on if there is one."""
    trainer = make_trainer(name, model, steps, training_args, corpus, callbacks, **settings)
    if steps:
        train_from_newest(trainer)
    return trainer


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------


def evaluator(model: PreTrainedModel, args: TextArguments, training_args, corpus: Corpus) -> HeadwiseSeq2SeqTrainer:
    """A trainer that translates."""
    eval_args = copy.copy(training_args)
    settings = {
        # Smoothing belongs to training: the likelihood is that of the model.
        "label_smoothing_factor": 0.0,
        "predict_with_generate": True,
        "generation_num_beams": args.num_beams,
        "generation_max_length": training_args.generation_max_length or corpus.positions,
        "use_cache": True,
        # Translations are to come in the order of the sentences.
        "train_sampling_strategy": "sequential",
        "gate_penalty": 0.0,
        "guidance_weight": 0.0,
        "eval_strategy": "no",
        "report_to": [],
    }
    for key, value in settings.items():
        setattr(eval_args, key, value)
    collator = DataCollatorForSeq2Seq(corpus.tokenizer, model=model)
    trainer = HeadwiseSeq2SeqTrainer(model, eval_args, data_collator=collator, processing_class=corpus.tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def translated(trainer: HeadwiseSeq2SeqTrainer, corpus: Corpus) -> dict:
    """Figures of the translations of a model, and some of these, from its [`evaluator`]."""
    tokenizer = corpus.tokenizer
    # On several processes, sentences that fill up the last batch come after all others.
    tokens = trainer.predict(corpus.test).predictions[: len(corpus.test)]
    tokens = np.where(is_labelled(tokens), tokens, tokenizer.pad_token_id)
    hypotheses = [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    references = corpus.test_words["target"]
    # Some of each length.
    shown = np.linspace(0, len(hypotheses) - 1, min(EXAMPLES, len(hypotheses)), dtype=int)
    return {
        "bleu": corpus.bleu.corpus_score(hypotheses, [list(references)]).score,
        "exact_match": float(np.mean([one == other for one, other in zip(hypotheses, references)])),
        "examples": [{**corpus.test_words[int(i)], "translation": hypotheses[i]} for i in shown],
    }


def evaluated(model: PreTrainedModel, args: TextArguments, training_args, corpus: Corpus) -> dict:
    """Figures of one model, and some translations."""
    trainer = evaluator(model, args, training_args, corpus)
    return {
        "nll": trainer.evaluate(corpus.validation)["eval_loss"],
        "parameters": sum(p.numel() for p in model.parameters()),
        **translated(trainer, corpus),
    }


def bleu_for(languages: list[str] | None) -> BLEU:
    """BLEU with the words that sacreBLEU finds in the target language, which not every one has spaces between.

    Raises:
        ValueError: if it needs another package for them.
    """
    try:
        return BLEU(trg_lang=languages[1] if languages else "")
    except RuntimeError as error:
        raise ValueError(f"languages {' '.join(languages)}: {' '.join(str(error).split())}") from error


def bleu_facts(metric: BLEU) -> dict[str, str]:
    """How BLEU is counted, for a summary."""
    metric.corpus_score(["a"], [["a"]])
    return {"bleu_signature": str(metric.get_signature()), "sacrebleu_version": version("sacrebleu")}


def side_by_side(rows: Mapping[str, dict]) -> list[dict[str, str]]:
    """Examples with the translations of several models, by their names."""
    return [
        {"source": same[0]["source"], "target": same[0]["target"],
         **{name: one["translation"] for name, one in zip(rows, same)}}
        for same in zip(*(row["examples"] for row in rows.values()))
    ]  # fmt: skip


def print_examples(examples: Iterable[dict[str, str]], longest: int = 300) -> None:
    """Prints sentences and their translations; models that have learnt little repeat themselves, and are cut short."""
    for example in examples:
        source, target, *translations = example.items()
        width = 1 + max(len("reference"), *(len(name) for name, _ in translations))
        print(f"\n{'source':<{width}} {source[1]}\n{'reference':<{width}} {target[1]}")
        for name, text in translations:
            shown = text if len(text) <= longest else f"{text[:longest]}…"
            print(f"{name:<{width}} {'✓' if text == target[1] else '✗'} {shown}")
