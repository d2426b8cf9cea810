# Licensed under the Apache License, Version 2.0.
"""Training of tokenizers, character tokenizers, and ids of delimiters, periods and unknown tokens."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, RobertaTokenizer


logger = logging.getLogger(__name__)

# In the order of their ids.
SPECIAL_TOKENS = {
    "roberta": {
        "cls_token": "<s>",
        "pad_token": "<pad>",
        "sep_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    },
    "bert": {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
}


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int, kind: str = "roberta") -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer (Radford et al. 2019), which can encode every text without unknown tokens.

    Args:
        texts (`Iterable[str]`): Training texts, read once, which determine the tokenizer.
        vocab_size (`int`): Maximum size of the vocabulary, special tokens included. Short texts may give fewer.
        kind (`str`):
            `"roberta"`: `<s> A </s>` and `<s> A </s></s> B </s>`, and the ids 0 to 4 for
            `<s> <pad> </s> <unk> <mask>`.
            `"bert"`: `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]` with token type ids, and the ids 0 to 4 for
            `[PAD] [UNK] [CLS] [SEP] [MASK]`.

    Returns:
        [`PreTrainedTokenizerFast`]: the tokenizer, which `AutoTokenizer` can load after `save_pretrained`.

    Raises:
        ValueError: if `kind` is unknown, `vocab_size` has no room for all bytes and special tokens, or there are no
            texts.

    Example:
        >>> tokenizer = train_byte_level_bpe(["the cat and the hat"] * 2, vocab_size=300)
        >>> tokenizer.convert_ids_to_tokens(tokenizer("the")["input_ids"])
        ['<s>', 'the', '</s>']
    """
    if kind not in SPECIAL_TOKENS:
        raise ValueError(f"kind must be one of {', '.join(SPECIAL_TOKENS)}, got {kind!r}.")
    special = SPECIAL_TOKENS[kind]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + len(special)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size must be at least {smallest} for {len(alphabet)} bytes and {len(special)} special tokens, got "
            f"{vocab_size}."
        )
    # The mask includes a preceding space, so that predicted words begin with a space.
    mask = AddedToken(special["mask_token"], lstrip=True, special=True)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[mask if name == "mask_token" else token for name, token in special.items()],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(_some(texts), trainer)
    if backend.get_vocab_size() < vocab_size:
        logger.warning("The texts only give %d tokens instead of vocab_size=%d.", backend.get_vocab_size(), vocab_size)

    names = {**special, "mask_token": mask}
    if kind == "roberta":
        model = json.loads(backend.to_str())["model"]
        merges = [tuple(pair) for pair in model["merges"]]
        return RobertaTokenizer(model["vocab"], merges, bos_token="<s>", eos_token="</s>", **names)
    return _framed(backend, kind, names)


def character_tokenizer(vocab: Mapping[str, int]) -> PreTrainedTokenizerFast:
    """Builds a tokenizer whose tokens are single characters, for example for protein models.

    Args:
        vocab (`dict[str, int]`): Ids of the characters, and of all special tokens of RoBERTa (`<s> <pad> </s> <unk>
            <mask>`) or of BERT (`[PAD] [UNK] [CLS] [SEP] [MASK]`), which determine the template, see
            [`train_byte_level_bpe`].

    Returns:
        [`PreTrainedTokenizerFast`]: the tokenizer. Characters that `vocab` lacks, including white space, become the
        unknown token.

    Raises:
        ValueError: if `vocab` lacks special tokens, or has other tokens of several characters.

    Example:
        >>> tokenizer = character_tokenizer({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "A": 4, "C": 5, "<mask>": 6})
        >>> tokenizer.convert_ids_to_tokens(tokenizer("ACX<mask>")["input_ids"])
        ['<s>', 'A', 'C', '<unk>', '<mask>', '</s>']
    """
    kind = next((kind for kind, special in SPECIAL_TOKENS.items() if vocab.keys() >= {*special.values()}), None)
    if kind is None:
        raise ValueError(
            f"vocab must have the special tokens of {' or '.join(SPECIAL_TOKENS)}, got "
            f"{', '.join(islice(vocab, 8))} …; add them."
        )
    special = SPECIAL_TOKENS[kind]
    longer = [token for token in vocab if len(token) != 1 and token not in special.values()]
    if longer:
        raise ValueError(f"vocab must have single characters, got {longer[0]!r}; use its original tokenizer.")
    backend = Tokenizer(models.WordLevel(dict(vocab), unk_token=special["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _framed(backend, kind, special)


def _framed(backend: Tokenizer, kind: str, names: Mapping[str, str | AddedToken]) -> PreTrainedTokenizerFast:
    """Builds a tokenizer that adds special tokens to one or two texts."""
    if kind == "roberta":
        single, pair = "<s> $A </s>", "<s> $A </s> </s> $B </s>"
        inputs = ["input_ids", "attention_mask"]
    else:
        single, pair = "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
        inputs = ["input_ids", "token_type_ids", "attention_mask"]
    around = [(names[name], backend.token_to_id(names[name])) for name in ("cls_token", "sep_token")]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=around)
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **names)


def delimiter_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the tokens that begin, end or separate texts: bos, cls, eos and sep.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer.

    Returns:
        `list[int]`: the unique ids, in ascending order.
    """
    ids = {tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id}
    return sorted(ids - {None})


def period_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all tokens that are a period, with or without surrounding white space.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer.

    Returns:
        `list[int]`: the ids, in ascending order.
    """
    ids = sorted(tokenizer.get_vocab().values())
    decoded = tokenizer.batch_decode([[index] for index in ids], clean_up_tokenization_spaces=False)
    return [index for index, text in zip(ids, decoded, strict=True) if text.strip() == "."]


def unknown_rate(
    texts: Iterable[str | Sequence[int]], tokenizer: PreTrainedTokenizerBase, limit: int | None = 1000
) -> float:
    """Fraction of unknown tokens in some texts, without other special tokens.

    Args:
        texts (iterable of `str` or of `list[int]`): The texts, or their ids, such as a column `input_ids`.
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer. Byte-level tokenizers have no unknown tokens.
        limit (`int`, *optional*): Number of texts to read, from the first; `None` for all.

    Returns:
        `float`: between 0 and 1.

    Raises:
        ValueError: if `limit` is less than 1, or `texts` is a single string, empty, or has neither words nor ids.

    Example:
        >>> unknown_rate(["the cat", "ሰላም"], train_byte_level_bpe(["the cat"], 270))
        0.0
    """
    ids = _bare_ids(_first(texts, limit), tokenizer)
    return ids[tokenizer.unk_token_id] / ids.total() if ids else 0.0


def warn_of_unknown(
    texts: Iterable[str | Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    threshold: float = 0.05,
    limit: int | None = 1000,
) -> float:
    """Warns if a large fraction of tokens is unknown, with the most frequent characters that the tokenizer lacks.

    Args:
        texts (iterable of `str` or of `list[int]`): The texts, or their ids, from which characters are not known.
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer.
        name (`str`): Name of the texts, for the warning.
        threshold (`float`): Largest fraction of unknown tokens without a warning.
        limit (`int`, *optional*): Number of texts to read, from the first; `None` for all.

    Returns:
        `float`: the fraction, see [`unknown_rate`].

    Raises:
        ValueError: see [`unknown_rate`]; also if `threshold` is not between 0 and 1.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be between 0 and 1, got {threshold}.")
    texts = _first(texts, limit)
    rate = unknown_rate(texts, tokenizer, limit)
    if rate > threshold:
        lost = ""
        if all(isinstance(text, str) for text in texts):
            characters = Counter("".join("".join(texts).split())).most_common()
            lacking = (c for c, _ in characters if tokenizer.unk_token_id in _bare_ids([c], tokenizer))
            found = " ".join(islice(lacking, 10)) or "none, only their words"
            lost = f"; characters that the tokenizer lacks: {found}"
        logger.warning(
            "%.0f %% of the tokens of %s are the unknown token %s%s. Choose a tokenizer for this language, or a "
            "byte-level one.",
            100 * rate,
            name,
            tokenizer.unk_token,
            lost,
        )
    return rate


def _first(texts: Iterable[str | Sequence[int]], limit: int | None) -> list[str | Sequence[int]]:
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or None for all texts, got {limit}.")
    return list(islice(_some(texts), limit))


def _bare_ids(texts: list[str | Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> Counter[int]:
    """Number of occurrences of each token, without special tokens around texts."""
    if texts and isinstance(texts[0], str):
        encoded, framing = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"], ()
    else:
        # If the unknown token is also one of these, as in GPT-2, ids do not distinguish them.
        encoded = texts
        framing = {*delimiter_token_ids(tokenizer), tokenizer.pad_token_id, tokenizer.mask_token_id}
    return Counter(token for ids in encoded for token in map(int, ids) if token not in framing)


def _some(texts: Iterable[str | Sequence[int]]) -> Iterator[str | Sequence[int]]:
    if isinstance(texts, str):
        raise ValueError("texts must be a list of strings, got a string.")
    found = False
    for text in texts:
        found = found or bool(text.strip() if isinstance(text, str) else len(text))
        yield text
    if not found:
        raise ValueError("texts is empty or blank; pass some text.")
