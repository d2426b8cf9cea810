# Licensed under the Apache License, Version 2.0.
"""Training arguments, text, model, training and evaluation of the recipes for translation."""

import copy
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from sacrebleu.metrics import BLEU
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from .. import HeadwiseMarianConfig, HeadwiseSeq2SeqTrainer, HeadwiseSeq2SeqTrainingArguments
from ..data import embedded_translation, load_parallel, train_marian_tokenizer, warn_of_unknown
from ..data.tables import column_of_flag
from ..hub.card import Metric, write_model_card
from ..models.head_sites import SITE_KINDS
from ..models.ignored_labels import is_labelled
from ..training import GuidanceCollator, check_trainer_arguments, show_progress, train_from_newest
from .arguments.base import OF_A_TEACHER, flag, refuse_flags
from .arguments.translation import TextArguments, TransformerArguments
from .run import cpu_only, named_files
from .summaries.base import Summary
from .summaries.translation import CorpusFacts


logger = logging.getLogger(__name__)

NUM_EXAMPLES = 5  # number of translations in a summary


@dataclass
class TranslationTrainingArguments(HeadwiseSeq2SeqTrainingArguments):
    """[`HeadwiseSeq2SeqTrainingArguments`] with defaults for translation, beside those of a recipe and its preset."""

    adam_beta2: float = flag(0.98, "β2 of Adam.")
    adam_epsilon: float = flag(1e-9, "ε of Adam.")
    lr_scheduler_type: str = flag("inverse_sqrt", "Learning rate schedule.")
    train_sampling_strategy: str = flag("group_by_length", "Order of the training pairs.")
    per_device_eval_batch_size: int = flag(128, "Sentence pairs per evaluation batch.")
    save_total_limit: int | None = flag(1, "Number of checkpoints to keep for --resume.")
    report_to: str | None = flag("none", "Trackers to report to.")
    include_num_input_tokens_seen: str = flag("non_padding", "Which input tokens to count.")

    # Flags that the recipes ignore, and what to do instead.
    without_effect: ClassVar[dict[str, str]] = {
        **OF_A_TEACHER,
        "num_train_epochs": "set max_steps",
        "predict_with_generate": "set num_beams",
        "generation_num_beams": "set num_beams",
        "layer_rate_decay": "it needs a single stack of layers, but the model has an encoder and a decoder",
    }

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        refuse_flags(self, self.without_effect)
        super().__post_init__()


@dataclass
class TranslationCorpus:
    """Tokenized sentence pairs, and the text of those to translate; evaluation sets are sorted by length."""

    train: Dataset
    validation: Dataset
    test: Dataset
    test_text: Dataset
    tokenizer: PreTrainedTokenizerBase
    positions: int  # number of positions that a model needs for these texts
    bleu: BLEU
    target_rows: dict[str, str] = field(default_factory=dict)  # of the targets, for [`GuidanceCollator`]


def load_pairs(args: TextArguments) -> tuple[dict[str, Dataset], str]:
    """Sentence pairs by split (train, validation and, if there is one, test), and the name of the data."""
    columns = {name: column_of_flag(getattr(args, name)) for name in ("source_column", "target_column")}
    files = {
        "train": (args.source_file, args.target_file),
        "validation": (args.validation_source_file, args.validation_target_file),
        "test": (args.test_source_file, args.test_target_file),
    }
    for name, (source, target) in files.items():
        if target and not source:
            prefix = "" if name == "train" else f"{name}_"
            raise ValueError(f"{prefix}target_file {target} needs --{prefix}source_file.")
    for first, second in (("source_file", "dataset_name"), ("test_source_file", "test_split")):
        values = getattr(args, first), getattr(args, second)
        if all(values):
            raise ValueError(f"{first} {values[0]} and {second} {values[1]!r} exclude each other; give one of them.")
    of_hub = ("dataset_config", "dataset_split", "validation_split", "test_split")
    given = [name for name in of_hub if getattr(args, name) != type(args).__dataclass_fields__[name].default]
    if given and not args.dataset_name:
        raise ValueError(f"{given[0]} {getattr(args, given[0])!r} needs --dataset_name.")
    are_lines = not args.dataset_name and all(target or not source for source, target in files.values())
    if are_lines and any(column is not None for column in columns.values()):
        raise ValueError(
            f"source_column {args.source_column!r} and target_column {args.target_column!r} need tables, but all "
            "files are plain text."
        )
    if not args.source_file and not args.dataset_name:
        for name in ("validation", "test"):
            if files[name][0]:
                raise ValueError(f"{name}_source_file {files[name][0]} needs --source_file or --dataset_name.")
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
    pairs = {name: load(name, split) for name, split in splits.items()}
    if pairs["validation"] is None:
        raise ValueError("no text to evaluate on; give validation_source_file.")
    name = args.dataset_name or named_files([*args.source_file, *(args.target_file or [])])
    return {name: one for name, one in pairs.items() if one is not None}, name


def tokenize_pairs(pairs: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    return pairs.map(
        lambda batch: tokenizer(batch["source"], text_target=batch["target"]),
        batched=True,
        remove_columns=["source", "target"],
        desc="Tokenizing",
    )


def pair_lengths(pairs: Dataset) -> np.ndarray:
    """Number of tokens of the longer side of each pair."""
    return np.array([max(len(ids), len(labels)) for ids, labels in zip(pairs["input_ids"], pairs["labels"])])


def train_shared_tokenizer(pairs: Dataset, vocab_size: int) -> PreTrainedTokenizerBase:
    """Trains a tokenizer with one vocabulary for both languages."""
    with tempfile.TemporaryDirectory() as folder:
        # A loaded tokenizer does not need its files.
        return train_marian_tokenizer(pairs["source"], pairs["target"], vocab_size, folder)


def drop_long_pairs(pairs: Dataset, max_length: int) -> Dataset:
    """Training pairs with at most `max_length` tokens per side."""
    short = np.flatnonzero(pair_lengths(pairs) <= max_length)
    if not len(short):
        raise ValueError(f"max_length={max_length}, but every pair of the training text is longer; raise it.")
    if len(short) == len(pairs):
        return pairs
    logger.warning("%d of %d pairs have more than max_length=%d tokens on one side and are not trained on.",
                   len(pairs) - len(short), len(pairs), max_length)  # fmt: skip
    return pairs.select(short)


def load_translation_corpus(
    args: TextArguments, tokenize: Callable[[Dataset, PreTrainedTokenizerBase], Dataset] = tokenize_pairs
) -> tuple[TranslationCorpus, CorpusFacts]:
    """Loads and tokenizes all text."""
    texts, name = load_pairs(args)
    tokenizer = train_shared_tokenizer(texts["train"], args.vocab_size)
    for side in ("source", "target"):
        warn_of_unknown(texts["validation"][side], tokenizer, f"the validation {side}")
    train = drop_long_pairs(tokenize(texts["train"], tokenizer), args.max_length)
    # Without this column, `group_by_length` loads every pair.
    train = train.add_column("length", list(map(len, train["input_ids"])))
    evaluation = {}
    for key in ("validation", "test"):
        words = texts.get(key, texts["validation"])
        words = words.take(min(args.max_eval_examples or len(words), len(words)))
        pairs = tokenize(words, tokenizer)
        # Sentences of a batch end at about the same step of the search.
        order = np.argsort(-pair_lengths(pairs), kind="stable")
        evaluation[key] = words.select(order), pairs.select(order)
    longest = max(args.max_length, *(int(pair_lengths(pairs).max()) for _, pairs in evaluation.values()))
    corpus = TranslationCorpus(
        train=train,
        validation=evaluation["validation"][1],
        test=evaluation["test"][1],
        test_text=evaluation["test"][0],
        tokenizer=tokenizer,
        positions=2 * longest,  # a translation may be longer than all texts
        bleu=bleu_for(args.languages),
    )
    facts = CorpusFacts(
        bleu_text="test" if "test" in texts else "validation",
        **bleu_facts(corpus.bleu),
        vocab_size=len(tokenizer),
        train_examples=len(train),
        eval_examples=len(corpus.validation),
        bleu_examples=len(corpus.test),
        text=name,
    )
    return corpus, facts


def prepare_translation_corpus(
    args: TextArguments,
    training_args: TranslationTrainingArguments,
    tokenize: Callable[[Dataset, PreTrainedTokenizerBase], Dataset] = tokenize_pairs,
) -> tuple[TranslationCorpus, CorpusFacts]:
    """Calls [`load_translation_corpus`] in each process, after checks of the arguments."""
    check_trainer_arguments(training_args)
    if training_args.max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {training_args.max_steps}.")
    # The main process fills the cache that the others read.
    with PartialState().main_process_first():
        corpus, facts = load_translation_corpus(args, tokenize)
    longest = training_args.generation_max_length
    if longest is not None and not 1 < longest <= corpus.positions:
        raise ValueError(
            f"generation_max_length={longest}, but it must be from 2 to the {corpus.positions} positions of the model."
        )
    return corpus, facts


def parse_sites(name: str, text: str | None, default: dict | None = None) -> dict | None:
    """The JSON of a flag as a dictionary by kind of site; JSON without kinds of sites is for the encoder."""
    if text is None:
        return default
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} {text!r} is not valid JSON: {error}.") from error
    return value if isinstance(value, dict) and set(value) & set(SITE_KINDS) else {"encoder": value}


def translation_config(args: TransformerArguments, corpus: TranslationCorpus, **heads: Any) -> HeadwiseMarianConfig:
    """Configuration of a Transformer for a corpus; `heads` are settings of its attention heads."""
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
        # Embeddings times √d_model are as large as the position embeddings that are added.
        init_std=args.hidden_size**-0.5,
        scale_embedding=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        **heads,
    )


def translation_trainer(
    name: str,
    model: PreTrainedModel,
    steps: int,
    training_args: TranslationTrainingArguments,
    corpus: TranslationCorpus,
    callbacks: Sequence[TrainerCallback] | None,
    metrics: Mapping[str, Callable] | None = None,
    trainer_class: type[HeadwiseSeq2SeqTrainer] = HeadwiseSeq2SeqTrainer,
    **settings: Any,
) -> HeadwiseSeq2SeqTrainer:
    """Trainer of one phase; `metrics` are arguments of the trainer, and `settings` replace training arguments."""
    run_args = copy.copy(training_args)
    for key, value in {"max_steps": steps, "gate_penalty": 0.0, **settings}.items():
        setattr(run_args, key, value)
    run_args.output_dir = str(Path(training_args.output_dir) / "checkpoints" / name)
    collator = DataCollatorForSeq2Seq(corpus.tokenizer, model=model)
    trainer = trainer_class(
        model,
        run_args,
        data_collator=GuidanceCollator(collator, rows=corpus.target_rows) if corpus.target_rows else collator,
        train_dataset=corpus.train,
        eval_dataset=corpus.validation,
        processing_class=corpus.tokenizer,
        callbacks=callbacks,
        **(metrics or {}),
    )
    show_progress(trainer, name)
    return trainer


def train_translator(
    name: str,
    model: PreTrainedModel,
    steps: int,
    training_args: TranslationTrainingArguments,
    corpus: TranslationCorpus,
    callbacks: Sequence[TrainerCallback] | None = None,
    **settings: Any,
) -> HeadwiseSeq2SeqTrainer:
    """Trains a model for some steps, from its last checkpoint if there is one; see [`translation_trainer`]."""
    trainer = translation_trainer(name, model, steps, training_args, corpus, callbacks, **settings)
    if steps:
        train_from_newest(trainer)
    return trainer


def generating_trainer(
    model: PreTrainedModel, args: TextArguments, training_args: TranslationTrainingArguments, corpus: TranslationCorpus
) -> HeadwiseSeq2SeqTrainer:
    """A trainer that evaluates and translates."""
    eval_args = copy.copy(training_args)
    settings = {
        # Label smoothing would change the likelihood.
        "label_smoothing_factor": 0.0,
        "predict_with_generate": True,
        "generation_num_beams": args.num_beams,
        "generation_max_length": training_args.generation_max_length or corpus.positions,
        "use_cache": True,
        # Keeps the translations in the order of the sentences.
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


def translate_and_score(trainer: HeadwiseSeq2SeqTrainer, corpus: TranslationCorpus) -> dict[str, Any]:
    """BLEU, exact match and some translations of the model of a [`generating_trainer`]."""
    tokenizer = corpus.tokenizer
    # With several processes, sentences that fill up the last batch come last.
    tokens = trainer.predict(corpus.test).predictions[: len(corpus.test)]
    tokens = np.where(is_labelled(tokens), tokens, tokenizer.pad_token_id)
    hypotheses = [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    references = corpus.test_text["target"]
    # Sentences are sorted by length: these have different lengths.
    shown = np.linspace(0, len(hypotheses) - 1, min(NUM_EXAMPLES, len(hypotheses)), dtype=int)
    return {
        "bleu": corpus.bleu.corpus_score(hypotheses, [list(references)]).score,
        "exact_match": float(np.mean([one == other for one, other in zip(hypotheses, references)])),
        "examples": [{**corpus.test_text[int(i)], "translation": hypotheses[i]} for i in shown],
    }


def evaluate_translator(
    model: PreTrainedModel, args: TextArguments, training_args: TranslationTrainingArguments, corpus: TranslationCorpus
) -> dict[str, Any]:
    """Likelihood, number of parameters, and [`translate_and_score`] of a model."""
    trainer = generating_trainer(model, args, training_args, corpus)
    return {
        "nll": trainer.evaluate(corpus.validation)["eval_loss"],
        "parameters": sum(p.numel() for p in model.parameters()),
        **translate_and_score(trainer, corpus),
    }


def bleu_for(languages: list[str] | None) -> BLEU:
    """BLEU with sacreBLEU's tokenization of the target language.

    Raises:
        ValueError: if this tokenization needs a package that is not installed.
    """
    try:
        return BLEU(trg_lang=languages[1] if languages else "")
    except RuntimeError as error:
        raise ValueError(f"languages {' '.join(languages)}: {' '.join(str(error).split())}") from error


def bleu_facts(metric: BLEU) -> dict[str, str]:
    """Signature and version of sacreBLEU."""
    metric.corpus_score(["a"], [["a"]])
    return {"bleu_signature": str(metric.get_signature()), "sacrebleu_version": version("sacrebleu")}


def write_translation_card(
    folder: Path, args: TextArguments, summary: Summary, figures: Mapping[str, Any], **others: Any
) -> None:
    """Writes the card of a translator.

    Args:
        folder (`Path`): Folder of the model.
        args ([`TextArguments`]): Flags.
        summary ([`Summary`]): Results of the recipe, with `corpus`.
        figures (`dict`): Metrics of the model; the metadata have `bleu` and, if there is one, `nll`.
        others: Other arguments of [`write_model_card`].
    """
    corpus = summary.corpus
    metrics = [Metric("bleu", f"sacreBLEU ({corpus.bleu_signature})", figures["bleu"], corpus.bleu_text)]
    if "nll" in figures:
        metrics.append(Metric("loss", "negative log-likelihood (nats)", figures["nll"]))
    write_model_card(
        folder,
        task="translation",
        figures=figures,
        metric=metrics,
        dataset=corpus.text,
        provenance={"sacrebleu_version": corpus.sacrebleu_version, **summary.provenance},
        language=args.languages,
        license=args.license,
        hub_dataset=args.dataset_name,
        **others,
    )


def side_by_side(rows: Mapping[str, dict]) -> list[dict[str, str]]:
    """Example sentences with the translations of several models, by the names of the models."""
    return [
        {"source": same[0]["source"], "target": same[0]["target"],
         **{name: one["translation"] for name, one in zip(rows, same)}}
        for same in zip(*(row["examples"] for row in rows.values()))
    ]  # fmt: skip


def print_examples(examples: Iterable[dict[str, str]], longest: int = 300) -> None:
    """Prints sentences and their translations; longer translations, such as endless repetitions, are cut."""
    for example in examples:
        source, target, *translations = example.items()
        width = 1 + max(len("reference"), *(len(name) for name, _ in translations))
        print(f"\n{'source':<{width}} {source[1]}\n{'reference':<{width}} {target[1]}")
        for name, text in translations:
            shown = text if len(text) <= longest else f"{text[:longest]}…"
            print(f"{name:<{width}} {'✓' if text == target[1] else '✗'} {shown}")
