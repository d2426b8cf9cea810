# Licensed under the Apache License, Version 2.0.
"""Models and sentences of the recipes that read heads."""

import itertools
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data import Tree, embedded_corpus, embedded_trees, load_conllu, load_texts
from ..data.tables import column_of_flag
from .arguments.reading import ReadingArguments
from .checkpoints import load_checkpoint, load_config, load_tokenizer
from .demonstration import demonstration_model


def load_model(args: ReadingArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode, and its tokenizer; of an encoder–decoder model, the encoder."""
    name = args.model or demonstration_model(Path(args.output_dir) / "pretraining", args.seed, args.disable_tqdm)
    return load_reader("model", name)


def load_reader(flag: str, name: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a checkpoint that a flag names, in evaluation mode, and its tokenizer; see `load_model`."""
    config, tokenizer = load_config(flag, name), load_tokenizer(flag, name)
    model = load_checkpoint(flag, name, config).eval()
    return model.get_encoder() if getattr(config, "is_encoder_decoder", False) else model, tokenizer


def load_sentences(args: ReadingArguments) -> tuple[list[Tree], list[str]]:
    """Sentences with and without trees, at most `max_examples` in all."""
    if not args.data:
        paragraphs = (text for document in embedded_corpus() for text in document.split("\n"))
        trees, texts = embedded_trees(), itertools.islice(paragraphs, 300)
    else:
        parsed = [name for name in args.data if holds_trees(name)]
        plain = [name for name in args.data if name not in parsed]
        trees = load_conllu(parsed) if parsed else []
        column = column_of_flag(args.text_column)
        rows = load_texts(plain, None, text_column=column, streaming=True) if plain else []
        texts = (row["text"] for row in rows)
    trees = trees[: args.max_examples]
    left = None if args.max_examples is None else args.max_examples - len(trees)
    return trees, list(itertools.islice(texts, left))


def holds_trees(name: str) -> bool:
    """Whether a file is a treebank, or a folder has one; other files of such a folder are not read."""
    if Path(name).is_dir():
        return any(holds_trees(path.name) for path in Path(name).rglob("*.conllu*"))
    return name.removesuffix(".gz").endswith(".conllu")


def page_facts(provenance: dict[str, Any]) -> dict[str, Any]:
    """The lines about its origin at the end of a report."""
    facts = ("command", "seed", "hf_attn_dynamics_version", "transformers_version", "torch_version")
    return {name: provenance[name] for name in facts}
