# Licensed under the Apache License, Version 2.0.
"""Models that are read, and the sentences they are read on: what the recipes have in common that look at heads."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hf_attn_dynamics

from .. import load_pruned
from ..analysis.page import HtmlPage
from ..analysis.running import longest_input
from ..data import (
    Tree,
    character_tokenizer,
    embedded_corpus,
    embedded_trees,
    load_conllu,
    load_texts,
    token_counts,
)
from .run import RunArguments, parse_yaml_or_flags


@dataclass
class ReadingArguments(RunArguments):
    """Which model, which sentences, and where to write."""

    output_dir: str = field(default="runs/heads", metadata={"help": "Where to write."})
    model: str | None = field(
        default=None,
        metadata={"help": "Checkpoint; without, that of runs/pretrain_ag, or else a small one is trained first."},
    )
    data: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files, folders or patterns, .conllu or text (of a folder with both, the .conllu); without, "
            "embedded sentences."
        },
    )
    text_column: str = field(default="text", metadata={"help": "Column of the sentences in tables."})
    max_sentences: int | None = field(default=2000, metadata={"help": "Sentences that are read, from the first."})
    batch_size: int = field(default=32, metadata={"help": "Sentences of a batch."})
    seed: int = field(default=42, metadata={"help": "Of what is drawn, and of the model that is trained first."})
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bars."})

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "batch_size", "max_sentences")


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def load_model(args: ReadingArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint with the head it was saved with, if this can be told."""
    checkpoint = args.model or demonstration_model(args)
    try:
        tokenizer, config = load_tokenizer(checkpoint), AutoConfig.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {checkpoint!r} can not be loaded: {' '.join(str(error).split())}") from error
    model = load_checkpoint(checkpoint, config)
    return model.get_encoder() if getattr(config, "is_encoder_decoder", False) else model, tokenizer


def load_checkpoint(checkpoint: str | Path, config: PreTrainedConfig) -> PreTrainedModel:
    """A model with the head it was saved with, if this can be told; without the attention heads that were removed."""
    # Auto classes do not know of heads that were removed from stock models.
    if getattr(config, "pruned_heads", None):
        return load_pruned(checkpoint)
    name = (getattr(config, "architectures", None) or [""])[0]
    model_class = getattr(transformers, name, None) or getattr(hf_attn_dynamics, name, None) or AutoModel
    return model_class.from_pretrained(checkpoint)


def load_tokenizer(checkpoint: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint; of a folder with a vocabulary of characters and nothing else, one of these."""
    folder = Path(checkpoint)
    vocabulary = folder / "vocab.json"
    others = ("merges.txt", "tokenizer.json", "tokenizer_config.json")
    if vocabulary.is_file() and not any((folder / name).is_file() for name in others):
        return character_tokenizer(json.loads(vocabulary.read_text(encoding="utf-8")))
    return AutoTokenizer.from_pretrained(checkpoint)


def demonstration_model(args: ReadingArguments) -> Path:
    """The model of the pretraining demonstration, or a small one, guided and trained for a minute."""
    from . import pretrain_ag

    folder = Path("runs/pretrain_ag/model")
    if not (folder / "config.json").is_file():
        folder = Path(args.output_dir) / "pretraining"
        if not (folder / "model" / "config.json").is_file():
            flags = {"compare": False, "max_steps": 200, "output_dir": folder}
            flags |= {
                name: getattr(args, name) for name in ("seed", "resume", "disable_tqdm", "device", "cpu_threads")
            }
            argv = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
            kinds = pretrain_ag.PretrainArguments, pretrain_ag.PretrainTrainingArguments
            pretrain_ag.main(*parse_yaml_or_flags(*kinds, presets=pretrain_ag.PRESETS, argv=argv))
        folder /= "model"
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Sentences
# ---------------------------------------------------------------------------------------------------------------------


def load_sentences(args: ReadingArguments) -> tuple[list[Tree], list[str]]:
    """Sentences with and without trees, together at most `max_sentences`."""
    if not args.data:
        paragraphs = (text for document in embedded_corpus() for text in document.split("\n"))
        trees, texts = embedded_trees(), itertools.islice(paragraphs, 300)
    else:
        parsed = [name for name in args.data if holds_trees(name)]
        plain = [name for name in args.data if name not in parsed]
        trees = load_conllu(parsed) if parsed else []
        rows = load_texts(plain, None, text_column=args.text_column, streaming=True) if plain else []
        texts = (row["text"] for row in rows)
    trees = trees[: args.max_sentences]
    left = None if args.max_sentences is None else args.max_sentences - len(trees)
    return trees, list(itertools.islice(texts, left))


def holds_trees(name: str) -> bool:
    """Whether these are treebanks: files, or a folder with any, whose other files are then left out."""
    if Path(name).is_dir():
        return any(holds_trees(path.name) for path in Path(name).rglob("*.conllu*"))
    return name.removesuffix(".gz").endswith(".conllu")


class Sentences:
    """Sentences as tokens, those that are too short or too long left out.

    Args:
        trees: Sentences with trees.
        texts: Sentences without, or pairs of sentences that are read as one.
        model, tokenizer: What is to read them.
        shortest, longest: Numbers of tokens; never more than the model takes.
    """

    def __init__(
        self,
        trees: list[Tree],
        texts: list[str] | list[tuple[str, str]],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        shortest: int = 1,
        longest: int | None = None,
    ):
        longest = min((limit for limit in (longest, longest_input(model)) if limit is not None), default=None)
        encoded = tokenizer([*(tree.text for tree in trees), *texts], verbose=False)["input_ids"]
        self.too_short = sum(len(ids) < shortest for ids in encoded)
        self.too_long = sum(longest is not None and len(ids) > longest for ids in encoded)
        fits = [len(ids) >= shortest and (longest is None or len(ids) <= longest) for ids in encoded]
        self.ids = [ids for ids, fit in zip(encoded, fits) if fit]
        self.trees = [tree for tree, fit in zip(trees, fits) if fit]
        if not self.ids:
            lengths = [len(ids) for ids in encoded] or [0]
            raise ValueError(
                f"data: none of {len(encoded)} sentences fits; they have {min(lengths)} to {max(lengths)} tokens, and "
                f"the model is to read {shortest} to {longest}."
            )
        self.tokenizer = tokenizer

    @cached_property
    def counts(self) -> torch.Tensor:
        """How often each token occurs."""
        return token_counts(Dataset.from_dict({"input_ids": self.ids}), len(self.tokenizer))

    def rows(self, batch_size: int, limit: int | None = None) -> Iterator[list[list[int]]]:
        """Token ids of the first sentences, those of about the same length together."""
        ids = sorted(self.ids[:limit], key=len)
        return (ids[start : start + batch_size] for start in range(0, len(ids), batch_size))

    def padded(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        """A batch of some sentences, padded behind them: before them, padding would move absolute positions."""
        ids = [torch.tensor(row) for row in rows]
        # Many decoders have no token for padding; the mask hides whatever stands there.
        columns = {
            "input_ids": (ids, self.tokenizer.pad_token_id or 0),
            "attention_mask": (map(torch.ones_like, ids), 0),
        }
        return {name: pad_sequence(list(some), True, padding) for name, (some, padding) in columns.items()}

    def batches(self, batch_size: int, limit: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Padded batches of [`rows`]."""
        return map(self.padded, self.rows(batch_size, limit))


def end_page(page: HtmlPage, definitions: dict[str, str], summary: dict[str, Any], path: Path) -> None:
    """Ends a page with what its words mean and how it was made, and writes it."""
    page.heading("Definitions")
    page.definitions(definitions)
    page.heading("How it was made")
    facts = ("command", "seed", "hf_attn_dynamics_version", "transformers_version", "torch_version")
    page.table(["what", ""], [[name.replace("_", " "), str(summary[name])] for name in facts])
    page.save(path)
