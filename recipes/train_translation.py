# Licensed under the Apache License, Version 2.0.
"""Train a Transformer to translate, remove attention heads of encoder and decoder, and train what is left anew.

    accelerate launch recipes/train_translation.py                                          # embedded number words
    accelerate launch recipes/train_translation.py recipes/configs/train_translation.yaml   # the same, explained
    accelerate launch recipes/train_translation.py --preset small --source_file train.de --target_file train.en \\
        --validation_source_file val.de --validation_target_file val.en --keep 54 36 18 --from_scratch true

After Voita et al. (2019), section 6. A model with all heads is trained (`dense`). For each number of heads in
`--keep`, or each λ in `--gate_penalty`, a copy gets gates at `--gate_sites`, is trained for `--gate_steps`, loses the
heads whose gates are closed, and is trained for `--finetune_steps` more (`pruned`). With `--from_scratch`, the same
heads are also trained from random weights, for as many steps in all. With gates in the encoder alone, the decoder is
not trained any more once there are gates.

Writes to `--output_dir`: `summary.json`, `table.csv` (as table 2 of the paper), `curve.png`, `heads.png`, `gates.png`,
`gate_history.png` and `.svg` of each, `config.yaml` (the values of the run), and models with tokenizer, code and card:
`dense/`, and `model-K/` with K heads or `model-penalty-λ/`.

Keys of `summary.json`, of the first K or λ that was named unless they say otherwise:
    bleu_dense, bleu_pruned, bleu_from_scratch    corpus BLEU, on the test text if there is one, else on the validation
    exact_match_dense, exact_match_pruned, exact_match_from_scratch    share of its sentences that are exactly right
    nll_dense, nll_pruned, nll_from_scratch       nats for a target token of the validation text, without smoothing
    heads_total, heads_kept                       heads of the gated sites, before and after
    heads_encoder, heads_decoder, heads_cross     heads after, at each kind of site
    parameters_dense, parameters_pruned           all that a model consists of, its fixed positions included
    steps_dense, steps_pruned, steps_from_scratch    optimizer steps of each in all
    seconds_per_step_dense                        wall time of a step; evaluation and fetching apart
    rows                                          all models: method (dense, pruned, from scratch), gate_penalty, heads
                                                  in all and of each kind, bleu, exact_match, nll, parameters
    bleu_text, bleu_signature, num_beams          what BLEU is of, how sacreBLEU counts it, width of the search
    examples                                      some of the sentences: source, target, and translations of both
    vocab_size, train_examples, eval_examples, bleu_examples, text, and seed, device, command and versions
Keys of models from scratch are null without --from_scratch.
"""

import copy
import csv
import io
import json
import logging
import tempfile
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from sacrebleu.metrics import BLEU
from transformers import (
    AutoConfig,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hf_attn_dynamics import (
    GateHistory,
    HeadwiseMarianConfig,
    HeadwiseMarianMTModel,
    HeadwiseSeq2SeqTrainer,
    HeadwiseSeq2SeqTrainingArguments,
    headwise_model,
    prune_closed_gates,
)
from hf_attn_dynamics._files import write_text
from hf_attn_dynamics.analysis.plots import (
    plot_gate_history,
    plot_gates,
    plot_heads_per_layer,
    plot_pruning_curve,
)
from hf_attn_dynamics.data import embedded_translation, load_parallel, train_marian_tokenizer
from hf_attn_dynamics.hub import Metric, write_model_card
from hf_attn_dynamics.models.head_gates import VARIANTS
from hf_attn_dynamics.models.head_sites import SITE_KINDS
from hf_attn_dynamics.runs import (
    CONFIG,
    SUMMARY,
    RunArguments,
    check_output_dir,
    cpu_only,
    device_name,
    format_table,
    provenance,
    refuse_bad_input,
    run_or_read,
    run_recipe,
    values_of_run,
    write_json,
    write_yaml,
)
from hf_attn_dynamics.training import ProgressWithLosses, StepTimer, check_trainer_arguments


logger = logging.getLogger(__name__)

AUTO_CLASS = "AutoModelForSeq2SeqLM"
ROW_KEYS = ("method", "gate_penalty", "heads", *(f"heads_{kind}" for kind in SITE_KINDS), "bleu", "exact_match", "nll",
            "parameters")  # fmt: skip
EXAMPLES = 5  # translations that are shown
UNDEFINED_TIMESCALE = 10_000  # of Transformers' inverse_sqrt without warm-up

# Defaults of flags, by name; the first is used without --preset.
PRESETS = {
    "numerals": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 250,
        "dropout": 0.0,
        "max_length": 64,
        "max_steps": 1800,
        "gate_steps": 500,
        "finetune_steps": 300,
        "warmup_steps": 200,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 64,
        "num_beams": 1,
    },
    "small": {
        "encoder_layers": 3,
        "decoder_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "vocab_size": 4000,
        "dropout": 0.1,
        "max_length": 32,
        "max_steps": 3000,
        "gate_steps": 1000,
        "finetune_steps": 500,
        "warmup_steps": 500,
        "learning_rate": 2e-3,
        "per_device_train_batch_size": 64,
        "num_beams": 1,
    },
    # The paper's, with the factor hidden_size^-0.5 of Vaswani et al. (2017): 4 · 512^-0.5 · 16000^-0.5.
    "base": {
        "encoder_layers": 6,
        "decoder_layers": 6,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 32000,
        "dropout": 0.1,
        "max_length": 128,
        "max_steps": 200_000,
        "gate_steps": 50_000,
        "finetune_steps": 10_000,
        "warmup_steps": 16_000,
        "learning_rate": 1.4e-3,
        "per_device_train_batch_size": 640,
        "num_beams": 4,
    },
}


@dataclass
class TranslationArguments(RunArguments):
    """Model, text and heads of the run; how to train is in [`TranslationTrainingArguments`]."""

    preset: str = field(default="numerals", metadata={"help": f"Sizes and training settings: {', '.join(PRESETS)}."})
    gate_sites: list[str] = field(
        default_factory=lambda: list(SITE_KINDS),
        metadata={"help": f"Attention that may lose heads: {', '.join(SITE_KINDS)}."},
    )
    keep: list[int] | None = field(
        default=None,
        metadata={
            "help": "Numbers of heads to keep over these sites, each from the dense model; half and a quarter of them "
            "if gate_penalty is not given either."
        },
    )
    gate_variant: str = field(default="paper", metadata={"help": "Gates: paper or paper_code."})
    gate_steps: int = field(default=400, metadata={"help": "Steps for which gates are trained."})
    finetune_steps: int = field(default=200, metadata={"help": "Steps after heads are removed."})
    from_scratch: bool = field(
        default=False, metadata={"help": "Also train the same heads from random weights, for comparison."}
    )
    guidance: str | None = field(
        default=None,
        metadata={"help": 'Guide heads of the encoder while it learns, as JSON: {"fraction": 0.5}; {} for defaults.'},
    )
    num_beams: int = field(default=1, metadata={"help": "Width of the beam search; 1 is greedy."})

    encoder_layers: int = field(default=2, metadata={"help": "Layers of the encoder."})
    decoder_layers: int = field(default=2, metadata={"help": "Layers of the decoder."})
    hidden_size: int = field(default=128, metadata={"help": "Width; the feed-forward layers are 4 times as wide."})
    num_attention_heads: int = field(default=4, metadata={"help": "Heads of a layer, at each site."})
    vocab_size: int = field(default=150, metadata={"help": "Size of the SentencePiece vocabulary of both languages."})
    dropout: float = field(default=0.1, metadata={"help": "Dropout of hidden states."})
    attention_dropout: float = field(default=0.0, metadata={"help": "Dropout of attention weights."})

    source_file: list[str] | None = field(
        default=None,
        metadata={"help": "Text to translate from, a sentence a line; or tables of both sides, without target_file."},
    )
    target_file: list[str] | None = field(default=None, metadata={"help": "Its translations, line by line."})
    validation_source_file: list[str] | None = field(default=None, metadata={"help": "The same, to evaluate on."})
    validation_target_file: list[str] | None = field(default=None, metadata={"help": "Its translations."})
    test_source_file: list[str] | None = field(
        default=None, metadata={"help": "The same, to measure BLEU on; the validation text by default."}
    )
    test_target_file: list[str] | None = field(default=None, metadata={"help": "Its translations."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub, instead of source_file."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration."})
    dataset_split: str = field(default="train", metadata={"help": "Its split to train on."})
    validation_split: str = field(default="validation", metadata={"help": "Its split to evaluate on."})
    test_split: str | None = field(default=None, metadata={"help": "Its split to measure BLEU on."})
    source_column: str | None = field(
        default=None, metadata={"help": "Column to translate from in tables and data sets; source or src by default."}
    )
    target_column: str | None = field(default=None, metadata={"help": "Column of the translations; target or tgt."})
    languages: list[str] | None = field(
        default=None, metadata={"help": "Codes of both languages, source first, for the model cards."}
    )
    max_length: int = field(default=64, metadata={"help": "Pairs with more tokens on a side are not trained on."})
    max_eval_examples: int | None = field(
        default=None, metadata={"help": "At most so many pairs of the validation text and of the test text."}
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.gate_sites:
            raise ValueError(f"gate_sites names no site; name some of {', '.join(SITE_KINDS)}.")
        for kind in self.gate_sites:
            if kind not in SITE_KINDS:
                raise ValueError(f"gate_sites must be among {', '.join(SITE_KINDS)}, got {kind!r}.")
        if self.gate_variant not in VARIANTS:
            raise ValueError(f"gate_variant must be {' or '.join(VARIANTS)}, got {self.gate_variant!r}.")
        if self.languages is not None and len(self.languages) != 2:
            raise ValueError(f"languages must be two, source and target, got {self.languages}.")
        for name, values in (("gate_sites", self.gate_sites), ("keep", self.keep or [])):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must name nothing twice, got {values}.")
        least = {"max_eval_examples": 1, "num_beams": 1, "gate_steps": 1, "finetune_steps": 0, "encoder_layers": 1,
                 "decoder_layers": 1, "num_attention_heads": 1, "max_length": 1}  # fmt: skip
        values = [(name, getattr(self, name), least) for name, least in least.items()]
        for name, value, smallest in [*values, *(("keep", keep, 1) for keep in self.keep or [])]:
            if value is not None and value < smallest:
                raise ValueError(f"{name} must be at least {smallest}, got {value}.")
        if self.hidden_size < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is no multiple of {self.num_attention_heads} heads.")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}.")


@dataclass
class TranslationTrainingArguments(HeadwiseSeq2SeqTrainingArguments):
    """[`HeadwiseSeq2SeqTrainingArguments`] with defaults for translation, beside those of the preset.

    `max_steps` are those of the model with all heads. `gate_penalty` is a list: each λ gives a model of its own. With
    `lr_scheduler_type` inverse_sqrt, the rate goes on falling when gates come in; any other runs anew for each of
    `max_steps`, `gate_steps` and `finetune_steps`.

    These defaults differ: `output_dir` runs/train_translation, `adam_beta2` 0.98, `adam_epsilon` 1e-9,
    `lr_scheduler_type` inverse_sqrt, `label_smoothing_factor` 0.1, `train_sampling_strategy` group_by_length,
    `per_device_eval_batch_size` 128, `save_total_limit` 1, `report_to` none, `include_num_input_tokens_seen`
    non_padding.
    """

    output_dir: str = field(
        default="runs/train_translation", metadata={"help": "Where to write; may not hold another run."}
    )
    gate_penalty: list[float] | None = field(
        default=None, metadata={"help": "Instead of keep: prices λ of an open head, each from the dense model."}
    )
    adam_beta2: float = field(default=0.98, metadata={"help": "Adam's β2."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "Adam's ε."})
    lr_scheduler_type: str = field(default="inverse_sqrt", metadata={"help": "How the learning rate falls."})
    label_smoothing_factor: float = field(
        default=0.1, metadata={"help": "Share of the probability that is spread over all tokens, in training."}
    )
    train_sampling_strategy: str = field(default="group_by_length", metadata={"help": "Order of the pairs."})
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Pairs of an evaluation batch."})
    save_total_limit: int | None = field(default=1, metadata={"help": "Checkpoints to keep, for --resume."})
    report_to: str | None = field(default="none", metadata={"help": "Trackers to report to."})
    include_num_input_tokens_seen: str = field(default="non_padding", metadata={"help": "Tokens to count."})

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        without_effect = {
            "target_heads": (None, "keep"),
            "num_train_epochs": (3.0, "max_steps"),
            "predict_with_generate": (False, "num_beams"),
            "generation_num_beams": (None, "num_beams"),
        }
        for name, (default, instead) in without_effect.items():
            value = getattr(self, name)
            if value != default:
                raise ValueError(f"{name}={value} has no effect here; set {instead}.")
        penalties = self.gate_penalty or []
        if len(set(penalties)) < len(penalties):
            raise ValueError(f"gate_penalty must name nothing twice, got {penalties}.")
        for penalty in penalties:
            if not 0 < penalty < float("inf"):
                raise ValueError(f"gate_penalty must be above 0 and finite, got {penalty}.")
        # What the parent class checks is the λ of one model.
        self.gate_penalty = 0.0
        super().__post_init__()
        self.gate_penalty = penalties or None


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
    longest: int


def load_texts(args: TranslationArguments) -> tuple[dict[str, Dataset], str]:
    """Training, validation and, if there is one, test text, and what to call the first."""
    columns = {"source_column": args.source_column, "target_column": args.target_column}
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
    if of_lines and any(columns.values()):
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


def load_corpus(args: TranslationArguments) -> tuple[Corpus, dict]:
    """All text as the model takes it, and what the summary says of it."""
    texts, name = load_texts(args)
    with tempfile.TemporaryDirectory() as folder:
        # Once loaded, it does not need its files any more.
        tokenizer = train_marian_tokenizer(texts["train"]["source"], texts["train"]["target"], args.vocab_size, folder)
    train = encode(texts["train"], tokenizer)
    short = np.flatnonzero(lengths(train) <= args.max_length)
    if not len(short):
        raise ValueError(f"max_length={args.max_length}, but every pair of the training text is longer; raise it.")
    if len(short) < len(train):
        logger.warning("%d of %d pairs have more than %d tokens on a side, and are not trained on.",
                       len(train) - len(short), len(train), args.max_length)  # fmt: skip
        train = train.select(short)
    evaluated = {}
    for key in ("validation", "test"):
        words = texts.get(key, texts["validation"])
        words = words.take(min(args.max_eval_examples or len(words), len(words)))
        pairs = encode(words, tokenizer)
        # Sentences of a batch end together, so that hardly any step of the search is for padding.
        order = np.argsort(-lengths(pairs), kind="stable")
        evaluated[key] = words.select(order), pairs.select(order)
    longest = max(args.max_length, *(int(lengths(pairs).max()) for _, pairs in evaluated.values()))
    corpus = Corpus(train, evaluated["validation"][1], evaluated["test"][1], evaluated["test"][0], tokenizer, longest)
    facts = {
        "bleu_text": "test" if "test" in texts else "validation",
        "vocab_size": len(tokenizer),
        "train_examples": len(train),
        "eval_examples": len(corpus.validation),
        "bleu_examples": len(corpus.test),
        "text": name,
    }
    return corpus, facts


# ---------------------------------------------------------------------------------------------------------------------
# Model and training
# ---------------------------------------------------------------------------------------------------------------------


def parse_guidance(guidance: str | None) -> dict | None:
    """Guidance of the encoder as a configuration takes it."""
    if guidance is None:
        return None
    try:
        value = json.loads(guidance)
    except json.JSONDecodeError as error:
        raise ValueError(f"guidance {guidance!r} is not valid JSON: {error}.") from error
    return {"encoder": value}


def build_config(args: TranslationArguments, corpus: Corpus) -> HeadwiseMarianConfig:
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
        # A translation may be longer than anything that was read.
        max_position_embeddings=2 * corpus.longest,
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
        guidance=parse_guidance(args.guidance),
    )


def schedule_after(steps: int, training_args: TranslationTrainingArguments) -> dict:
    """Training arguments with which the learning rate goes on as if `steps` had been taken."""
    if training_args.lr_scheduler_type != "inverse_sqrt":
        return {}
    # lr · √(T / (t + T − warm-up)) at step t; a schedule without warm-up that starts later is of the same form.
    warmup = training_args.get_warmup_steps(training_args.max_steps)
    timescale = (training_args.lr_scheduler_kwargs or {}).get("timescale") or warmup or UNDEFINED_TIMESCALE
    later = max(steps - warmup, 0) + timescale
    return {
        "learning_rate": training_args.learning_rate * (timescale / later) ** 0.5,
        "lr_scheduler_kwargs": {"timescale": later},
        "warmup_steps": 0,
    }


def make_trainer(name: str, model: PreTrainedModel, steps: int, training_args, corpus: Corpus, callbacks, **settings):
    """Trainer of one phase; `settings` replace training arguments."""
    run_args = copy.copy(training_args)
    for key, value in {"max_steps": steps, "gate_penalty": 0.0, **settings}.items():
        setattr(run_args, key, value)
    run_args.output_dir = str(Path(training_args.output_dir) / "checkpoints" / name)
    trainer = HeadwiseSeq2SeqTrainer(
        model,
        run_args,
        data_collator=DataCollatorForSeq2Seq(corpus.tokenizer, model=model),
        train_dataset=corpus.train,
        eval_dataset=corpus.validation,
        processing_class=corpus.tokenizer,
        callbacks=callbacks,
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if not training_args.disable_tqdm:
        trainer.add_callback(ProgressWithLosses(name))
    return trainer


def train(
    name: str, model: PreTrainedModel, steps: int, training_args, corpus: Corpus, callbacks=None, **settings
) -> HeadwiseSeq2SeqTrainer:
    """Trains a model for some steps, from the last checkpoint on if there is one."""
    trainer = make_trainer(name, model, steps, training_args, corpus, callbacks, **settings)
    states = Path(trainer.args.output_dir).glob("checkpoint-*/trainer_state.json")
    last = max(states, key=lambda path: int(path.parent.name.rpartition("-")[2]), default=None)
    if steps:
        trainer.train(resume_from_checkpoint=None if last is None else str(last.parent))
    return trainer


def prune(
    name: str, penalty: float | None, keep: int | None, args: TranslationArguments, training_args, corpus: Corpus
) -> HeadwiseSeq2SeqTrainer:
    """A copy of the dense model that has lost its closed heads, trained a little more."""
    folder = Path(training_args.output_dir)
    stage = folder / "checkpoints" / f"{name}-gates"
    encoder_only = set(args.gate_sites) == {"encoder"}
    freeze = encoder_only if training_args.freeze_decoder is None else training_args.freeze_decoder
    shared = {"freeze_decoder": freeze, "guidance_weight": 0.0}
    if not (stage / "gates.json").is_file():
        set_seed(training_args.seed)
        gates = {kind: {"variant": args.gate_variant} for kind in args.gate_sites}
        model = headwise_model(folder / "dense", AUTO_CLASS, guidance=None).add_gates(gates)
        history = GateHistory(every=max(1, args.gate_steps // 100))
        price = {"target_heads": keep} if penalty is None else {"gate_penalty": penalty}
        schedule = schedule_after(training_args.max_steps, training_args)
        trainer = train(
            stage.name, model, args.gate_steps, training_args, corpus, [history], **price, **schedule, **shared
        )  # fmt: skip
        prune_closed_gates(model)
        trainer.save_model(str(stage / "pruned"))
        if trainer.is_world_process_zero():
            history.save(stage / "gates.json")
        PartialState().wait_for_everyone()
    set_seed(training_args.seed)
    model = headwise_model(stage / "pruned", AUTO_CLASS)
    schedule = schedule_after(training_args.max_steps + args.gate_steps, training_args)
    return train(name, model, args.finetune_steps, training_args, corpus, **schedule, **shared)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------


def evaluated(model: PreTrainedModel, method: str, args: TranslationArguments, training_args, corpus: Corpus) -> dict:
    """Figures of one model: a row of the summary, and some translations."""
    eval_args = copy.copy(training_args)
    settings = {
        # Smoothing belongs to training: the likelihood is that of the model.
        "label_smoothing_factor": 0.0,
        "predict_with_generate": True,
        "generation_num_beams": args.num_beams,
        "generation_max_length": training_args.generation_max_length or model.config.max_position_embeddings,
        "use_cache": True,
        # Translations are to come in the order of the sentences.
        "train_sampling_strategy": "sequential",
        "gate_penalty": 0.0,
        "guidance_weight": 0.0,
        "report_to": [],
    }
    for key, value in settings.items():
        setattr(eval_args, key, value)
    tokenizer = corpus.tokenizer
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    trainer = HeadwiseSeq2SeqTrainer(model, eval_args, data_collator=collator, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    nll = trainer.evaluate(corpus.validation)["eval_loss"]
    # On several processes, sentences that fill up the last batch come after all others.
    tokens = trainer.predict(corpus.test).predictions[: len(corpus.test)]
    tokens = np.where(tokens == -100, tokenizer.pad_token_id, tokens)
    hypotheses = [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    references = corpus.test_words["target"]
    # Some of each length.
    shown = np.linspace(0, len(hypotheses) - 1, min(EXAMPLES, len(hypotheses)), dtype=int)
    layers: dict[str, list[int]] = {}
    for site, heads in model.config.kept_heads().items():
        layers.setdefault(site.kind, []).append(len(heads))
    return {
        "method": method,
        "gate_penalty": None,
        "heads": sum(sum(layers[kind]) for kind in args.gate_sites),
        **{f"heads_{kind}": sum(layers[kind]) for kind in SITE_KINDS},
        "bleu": BLEU().corpus_score(hypotheses, [list(references)]).score,
        "exact_match": float(np.mean([one == other for one, other in zip(hypotheses, references)])),
        "nll": nll,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": layers,
        "examples": [{**corpus.test_words[int(i)], "translation": hypotheses[i]} for i in shown],
    }


# ---------------------------------------------------------------------------------------------------------------------


def prepare(
    args: TranslationArguments, training_args: TranslationTrainingArguments
) -> tuple[HeadwiseMarianConfig, Corpus, dict, list[tuple[str, float | None, int | None]]]:
    """Configuration, text, what the summary says of both, and name, λ and heads of each model to be pruned."""
    check_trainer_arguments(training_args)
    if training_args.max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {training_args.max_steps}.")
    if args.keep and training_args.gate_penalty:
        raise ValueError(
            f"keep={args.keep} and gate_penalty={training_args.gate_penalty} both say how many heads are to go; give "
            "one of them."
        )
    if args.guidance is None and training_args.guidance_weight not in ("auto", 0):
        raise ValueError(f"guidance_weight={training_args.guidance_weight} weighs no guidance; give guidance.")
    layers = {"encoder": args.encoder_layers, "decoder": args.decoder_layers, "cross": args.decoder_layers}
    total = args.num_attention_heads * sum(layers[kind] for kind in args.gate_sites)
    halved = [total // 2, total // 4] if total > 3 else [1]
    keep = [] if training_args.gate_penalty else args.keep or halved
    if max(keep, default=0) >= total:
        sites = ", ".join(args.gate_sites)
        raise ValueError(f"keep={max(keep)}, but the heads at {sites} are {total}; keep fewer, or gate more sites.")
    with PartialState().main_process_first():
        corpus, facts = load_corpus(args)
    longest = 2 * corpus.longest
    if training_args.generation_max_length is not None and not 1 < training_args.generation_max_length <= longest:
        raise ValueError(
            f"generation_max_length={training_args.generation_max_length}, but it must be from 2 to the {longest} "
            "positions of the model."
        )
    config = build_config(args, corpus)
    wanted = [(str(number), None, number) for number in keep]
    wanted += [(f"penalty-{penalty:g}", penalty, None) for penalty in training_args.gate_penalty or []]
    return config, corpus, {"heads_total": total, **facts}, wanted


def main(args: TranslationArguments, training_args: TranslationTrainingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    with refuse_bad_input():
        values = values_of_run(args, training_args, PRESETS)
        folder = check_output_dir(training_args.output_dir, values, args.resume)
        config, corpus, facts, wanted = prepare(args, training_args)
    args.use_threads(training_args)
    PartialState().wait_for_everyone()
    if PartialState().is_main_process:
        write_yaml(folder / CONFIG, values)
    steps = {"dense": training_args.max_steps}
    steps["pruned"] = steps["from_scratch"] = training_args.max_steps + args.gate_steps + args.finetune_steps

    def make_dense():
        set_seed(training_args.seed)
        timer = StepTimer()
        trainer = train("dense", HeadwiseMarianMTModel(config), steps["dense"], training_args, corpus, [timer],
                        freeze_decoder=False)  # fmt: skip
        row = evaluated(trainer.model, "dense", args, training_args, corpus)
        return {**row, "seconds_per_step": timer.figures()["seconds_per_step"]}, trainer, "dense"

    def make_pruned(name: str, penalty: float | None, keep: int | None):
        trainer = prune(f"model-{name}", penalty, keep, args, training_args, corpus)
        row = evaluated(trainer.model, "pruned", args, training_args, corpus)
        return {**row, "gate_penalty": penalty}, trainer, f"model-{name}"

    def make_from_scratch(name: str, penalty: float | None):
        pruned = AutoConfig.from_pretrained(folder / f"model-{name}")
        pruned.guidance = copy.deepcopy(config.guidance)
        set_seed(training_args.seed)
        warmup = {"warmup_steps": training_args.get_warmup_steps(training_args.max_steps)}
        trainer = train(f"scratch-{name}", HeadwiseMarianMTModel(pruned), steps["from_scratch"], training_args, corpus,
                        freeze_decoder=False, **warmup)  # fmt: skip
        row = evaluated(trainer.model, "from scratch", args, training_args, corpus)
        return {**row, "gate_penalty": penalty}, trainer, None

    dense = run_or_read("dense", folder, make_dense)
    pruned = {
        name: run_or_read(f"model-{name}", folder, partial(make_pruned, name, penalty, keep))
        for name, penalty, keep in wanted
    }
    scratch = {
        name: run_or_read(f"scratch-{name}", folder, partial(make_from_scratch, name, penalty))
        for name, penalty, _ in wanted
        if args.from_scratch
    }
    summary = summarise(dense, pruned, scratch, steps, args, training_args, facts)
    if PartialState().is_main_process:
        publish(dense, pruned, scratch, summary, args, folder, wanted)
        write_json(folder / SUMMARY, summary)
        print_report(summary, folder)
    return summary


def summarise(
    dense: dict, pruned: dict[str, dict], scratch: dict[str, dict], steps: dict, args, training_args, facts: dict
) -> dict:
    """All figures; those of one model are flat."""
    name, first = next(iter(pruned.items()))
    models = {"dense": dense, "pruned": first, "from_scratch": scratch.get(name, {})}
    examples = [
        {"source": one["source"], "target": one["target"], "dense": one["translation"], "pruned": other["translation"]}
        for one, other in zip(dense["examples"], first["examples"])
    ]
    return {
        **{f"{key}_{model}": row.get(key) for key in ("bleu", "exact_match", "nll") for model, row in models.items()},
        "heads_total": facts["heads_total"],
        "heads_kept": first["heads"],
        **{f"heads_{kind}": first[f"heads_{kind}"] for kind in SITE_KINDS},
        "parameters_dense": dense["parameters"],
        "parameters_pruned": first["parameters"],
        **{f"steps_{model}": steps[model] if row else None for model, row in models.items()},
        "seconds_per_step_dense": dense["seconds_per_step"],
        "rows": [{key: row[key] for key in ROW_KEYS} for row in (dense, *pruned.values(), *scratch.values())],
        "bleu_signature": _bleu_signature(),
        "num_beams": args.num_beams,
        "examples": examples,
        **{key: value for key, value in facts.items() if key != "heads_total"},
        "num_processes": PartialState().num_processes,
        "sacrebleu_version": version("sacrebleu"),
        **provenance(training_args.seed, device_name(training_args)),
    }


def _bleu_signature() -> str:
    metric = BLEU()
    metric.corpus_score(["a"], [["a"]])
    return str(metric.get_signature())


def publish(
    dense: dict, pruned: dict[str, dict], scratch: dict[str, dict], summary: dict, args, folder: Path, wanted: list
) -> None:
    """Table, pictures, and a card for each model."""
    write_table(dense, pruned, scratch, folder / "table.csv")
    title, total = summary["text"], summary["heads_total"]
    rows = [{**row, "BLEU": row["bleu"]} for row in (*pruned.values(), *scratch.values())]
    plot_pruning_curve(rows, folder / "curve.png", title=title, metric="BLEU", dense=dense["bleu"], total=total)
    layers = {f"{row['heads']} heads" if row["gate_penalty"] is None else f"λ = {row['gate_penalty']:g}": row["layers"]
              for row in pruned.values()}  # fmt: skip
    plot_heads_per_layer(layers, folder / "heads.png", total=args.num_attention_heads, title=title)
    name, _, keep = wanted[0]
    history = GateHistory.load(folder / "checkpoints" / f"model-{name}-gates" / "gates.json")
    gated = {kind: sum(dense["layers"][kind]) for kind in args.gate_sites}
    plot_gate_history(
        history.steps, history.open_heads, folder / "gate_history.png", title, gated, keep, history.settled_heads
    )
    last = {kind: np.asarray(records[-1]) for kind, records in history.log_alpha.items()}
    plot_gates(last, folder / "gates.png", title=f"{title}; {summary['heads_kept']} of {total} heads")

    every = sum(map(sum, dense["layers"].values()))
    for model, row in {"dense": dense, **{f"model-{name}": row for name, row in pruned.items()}}.items():
        left = sum(map(sum, row["layers"].values()))
        how = f"all {every} attention heads" if row is dense else f"{left} of {every} attention heads"
        rest = "" if row is dense else (
            f" Which to keep was learnt by gates ({', '.join(args.gate_sites)}); it was fine-tuned after the others "
            "were removed."
        )  # fmt: skip
        write_model_card(
            folder / model,
            name=f"translation Transformer, {how}",
            description=f"An encoder–decoder with {how}, trained to translate.{rest}",
            config=AutoConfig.from_pretrained(folder / model),
            task="translation",
            figures={
                **{key: row[key] for key in ("bleu", "exact_match", "nll")},
                **({} if row is dense else {"bleu_dense": dense["bleu"]}),
            },
            metric=Metric("bleu", f"sacreBLEU ({summary['bleu_signature']})", row["bleu"]),
            dataset=summary["text"],
            provenance=summary,
            methods=[] if row is dense else ["gates"],
            language=args.languages,
        )


def write_table(dense: dict, pruned: dict[str, dict], scratch: dict[str, dict], path: Path) -> None:
    """One line for each choice of heads, those from the trained model and from scratch side by side."""
    metrics = ("bleu", "exact_match", "nll")
    lines = [
        {
            "model": name,
            **{f"heads_{kind}": row[f"heads_{kind}"] for kind in SITE_KINDS},
            "gate_penalty": row["gate_penalty"],
            **{f"{metric}_from_trained": row[metric] for metric in metrics},
            **{f"{metric}_from_scratch": scratch.get(name, {}).get(metric) for metric in metrics},
            "parameters": row["parameters"],
        }
        for name, row in {"dense": dense, **pruned}.items()
    ]
    table = io.StringIO()
    writer = csv.DictWriter(table, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_text(path, table.getvalue())


def print_report(summary: dict, folder: Path) -> None:
    rows = summary["rows"]
    keys = [key for key in ROW_KEYS if any(row[key] is not None for row in rows)]
    print("\n" + format_table(keys, [[row[key] for key in keys] for row in rows]))
    for example in summary["examples"]:
        print(f"\nsource     {example['source']}\nreference  {example['target']}")
        for model in ("dense", "pruned"):
            print(f"{model:<10} {'✓' if example[model] == example['target'] else '✗'} {example[model]}")
    model = f"model-{summary['heads_kept']}" if rows[1]["gate_penalty"] is None else "model-penalty-*"
    print(f"\nEverything is in {folder}: {SUMMARY}, table.csv, curve.png, dense/, {model}/.")


if __name__ == "__main__":
    run_recipe(main, TranslationArguments, TranslationTrainingArguments, presets=PRESETS)
