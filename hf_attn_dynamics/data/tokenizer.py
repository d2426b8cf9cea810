# Licensed under the Apache License, Version 2.0.
"""Tokenizers trained on one's own texts or made of characters, and the tokens that attention heads like best."""

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
    """Train a byte-level BPE tokenizer (Radford et al. 2019); every text can be encoded, none needs the unknown token.

    Args:
        texts (`Iterable[str]`): The texts to learn from, read once. The same texts give the same tokenizer.
        vocab_size (`int`): Most tokens of the vocabulary, special tokens included. Short texts may give fewer.
        kind (`str`):
            `"roberta"`: `<s> A </s>` and `<s> A </s></s> B </s>`, and the ids 0 to 4 for
            `<s> <pad> </s> <unk> <mask>`.
            `"bert"`: `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]` with token type ids, and the ids 0 to 4 for
            `[PAD] [UNK] [CLS] [SEP] [MASK]`.

    Returns:
        [`PreTrainedTokenizerFast`]: The tokenizer, which `save_pretrained` and `AutoTokenizer` bring back unchanged.

    Raises:
        ValueError: if `kind` is unknown, `vocab_size` has no room for all bytes and special tokens, or there is no
            text.

    Example:
        >>> tokenizer = train_byte_level_bpe(["the cat and the hat"] * 2, vocab_size=300)
        >>> tokenizer.convert_ids_to_tokens(tokenizer("the")["input_ids"])
        ['<s>', 'the', '</s>']
    """
    if kind not in SPECIAL_TOKENS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(SPECIAL_TOKENS)}.")
    special = SPECIAL_TOKENS[kind]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + len(special)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be at least {smallest}, for {len(alphabet)} bytes and {len(special)}"
            " special tokens."
        )
    # A space before the mask belongs to it, so that the word put there is one that begins with a space.
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
        logger.warning("The texts gave only %d of vocab_size=%d tokens.", backend.get_vocab_size(), vocab_size)

    names = {**special, "mask_token": mask}
    if kind == "roberta":
        model = json.loads(backend.to_str())["model"]
        merges = [tuple(pair) for pair in model["merges"]]
        return RobertaTokenizer(model["vocab"], merges, bos_token="<s>", eos_token="</s>", **names)
    return _framed(backend, kind, names)


def character_tokenizer(vocab: Mapping[str, int]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are single characters, as models of proteins have it.

    Args:
        vocab (`dict[str, int]`): Ids of the characters, and of all special tokens of RoBERTa (`<s> <pad> </s> <unk>
            <mask>`) or of BERT (`[PAD] [UNK] [CLS] [SEP] [MASK]`), which tell how texts are framed, see
            [`train_byte_level_bpe`].

    Returns:
        [`PreTrainedTokenizerFast`]: The tokenizer. Characters that `vocab` lacks, also white space, are the unknown
        token.

    Raises:
        ValueError: if `vocab` has the special tokens of neither, or other tokens of several characters.

    Example:
        >>> tokenizer = character_tokenizer({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "A": 4, "C": 5, "<mask>": 6})
        >>> tokenizer.convert_ids_to_tokens(tokenizer("ACX<mask>")["input_ids"])
        ['<s>', 'A', 'C', '<unk>', '<mask>', '</s>']
    """
    kind = next((kind for kind, special in SPECIAL_TOKENS.items() if vocab.keys() >= {*special.values()}), None)
    if kind is None:
        raise ValueError(
            f"vocab has the special tokens neither of {' nor of '.join(SPECIAL_TOKENS)}: "
            f"{', '.join(islice(vocab, 8))} …; add them."
        )
    special = SPECIAL_TOKENS[kind]
    longer = [token for token in vocab if len(token) != 1 and token not in special.values()]
    if longer:
        raise ValueError(f"vocab has {longer[0]!r}, which is no single character; use the tokenizer it was made for.")
    backend = Tokenizer(models.WordLevel(dict(vocab), unk_token=special["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _framed(backend, kind, special)


def _framed(backend: Tokenizer, kind: str, names: Mapping[str, str | AddedToken]) -> PreTrainedTokenizerFast:
    """A tokenizer that puts special tokens around one or two texts."""
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
        `list[int]`: Those that the tokenizer has, each once, in ascending order.
    """
    ids = {tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id}
    return sorted(ids - {None})


def period_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all tokens that are a period, with or without white space around it.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer.

    Returns:
        `list[int]`: The ids, in ascending order.
    """
    ids = sorted(tokenizer.get_vocab().values())
    decoded = tokenizer.batch_decode([[index] for index in ids], clean_up_tokenization_spaces=False)
    return [index for index, text in zip(ids, decoded, strict=True) if text.strip() == "."]


def unknown_rate(
    texts: Iterable[str | Sequence[int]], tokenizer: PreTrainedTokenizerBase, limit: int | None = 1000
) -> float:
    """Fraction of the tokens of some texts that are the unknown token; other special tokens do not count.

    Args:
        texts (iterable of `str` or of `list[int]`): The texts, or their ids, such as a column `input_ids`.
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer. A byte-level one knows every text: its rate is 0.
        limit (`int`, *optional*): Texts to look at, from the first; all if `None`.

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
    """Logs one warning if a tokenizer loses much of some texts: the rate, and the most frequent characters it lacks.

    Args:
        texts (iterable of `str` or of `list[int]`): The texts, or their ids, which do not tell the characters.
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer.
        name (`str`): What to call the texts.
        threshold (`float`): Warn if a larger fraction of tokens than this is unknown.
        limit (`int`, *optional*): Texts to look at, from the first; all if `None`.

    Returns:
        `float`: the rate, see [`unknown_rate`].

    Raises:
        ValueError: as [`unknown_rate`], or if `threshold` does not lie between 0 and 1.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}; it must lie between 0 and 1.")
    texts = _first(texts, limit)
    rate = unknown_rate(texts, tokenizer, limit)
    if rate > threshold:
        lost = ""
        if all(isinstance(text, str) for text in texts):
            characters = Counter("".join("".join(texts).split())).most_common()
            lacking = (c for c, _ in characters if tokenizer.unk_token_id in _bare_ids([c], tokenizer))
            found = " ".join(islice(lacking, 10)) or "none, but their words"
            lost = f"; characters that the tokenizer lacks: {found}"
        logger.warning(
            "%.0f %% of the tokens of %s are %s, which tells the model nothing%s. Choose a tokenizer of this "
            "language, or a byte-level one.",
            100 * rate,
            name,
            tokenizer.unk_token,
            lost,
        )
    return rate


def _first(texts: Iterable[str | Sequence[int]], limit: int | None) -> list[str | Sequence[int]]:
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1, or None for all texts.")
    return list(islice(_some(texts), limit))


def _bare_ids(texts: list[str | Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> Counter[int]:
    """How often each token occurs, without those that frame a text."""
    if texts and isinstance(texts[0], str):
        encoded, framing = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"], ()
    else:
        # Where the unknown token is one of these, as in GPT-2, ids do not tell it from them.
        encoded = texts
        framing = {*delimiter_token_ids(tokenizer), tokenizer.pad_token_id, tokenizer.mask_token_id}
    return Counter(token for ids in encoded for token in map(int, ids) if token not in framing)


def _some(texts: Iterable[str | Sequence[int]]) -> Iterator[str | Sequence[int]]:
    if isinstance(texts, str):
        raise ValueError("texts is a single string, which would be read letter by letter; give a list of strings.")
    found = False
    for text in texts:
        found = found or bool(text.strip() if isinstance(text, str) else len(text))
        yield text
    if not found:
        raise ValueError("texts is empty or blank; give some text.")
