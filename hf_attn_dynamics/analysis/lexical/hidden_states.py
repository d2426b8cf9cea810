# Licensed under the Apache License, Version 2.0.
"""Word alignments from the hidden states of an encoder that reads both languages (Dou & Neubig 2021)."""

from collections.abc import Iterable, Sequence

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...models.number_checks import is_finite, is_integer
from ...models.precision import at_least_single
from ..model_views import evaluation_view
from ..running import arguments_of, longest_input, reader_of
from ..sentences import batches_by_length, padded
from .ibm_model import Links, Pair, sides_of


DEPTH = 2 / 3  # of the layer whose hidden states are compared by default: 8 of 12, as in the paper


@torch.no_grad()
def embedding_alignment(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Iterable[Pair],
    layer: int | None = None,
    threshold: float = 1e-3,
    batch_size: int = 32,
    progress: bool = False,
) -> list[Links]:
    """Aligns the words of sentence pairs by the hidden states of one encoder for both sentences.

    Let x_i and y_j be the hidden states of the tokens of the source and of the target, without special tokens. The
    words of tokens i and j are linked if

        softmax_j ⟨x_i, y_j⟩ > threshold   and   softmax_i ⟨x_i, y_j⟩ > threshold

    for any of their tokens (awesome-align, Dou & Neubig 2021, section 2.2). Nothing is trained: the encoder should
    have been pretrained on both languages, such as multilingual BERT or XLM-RoBERTa. For attention as an aligner, see
    [`attention_alignment`].

    Args:
        model (`PreTrainedModel`): An encoder, or a model with one, in evaluation mode or not; it is not changed.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        pairs (iterable of `(source, target)`): Words of each sentence and of its translation. A pair with an empty
            side has no links.
        layer (`int`, *optional*): Layer after which hidden states are compared; 0 for the embeddings. By default two
            thirds of the layers, rounded: 8 of 12.
        threshold (`float`): Between 0 and 1; lower values give more links.
        batch_size (`int`): Sentence pairs of a forward pass. The links do not depend on it.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        `list` of `list[tuple[int, int]]`: for each pair the links `(source position, target position)`, from 0,
        sorted.

    Raises:
        ValueError: before the first forward pass, if a pair is not two lists of words, a sentence has more tokens than
            the model has positions for, the layer does not exist, or the threshold is not between 0 and 1.

    Example:
        >>> from hf_attn_dynamics.data import train_byte_level_bpe
        >>> from transformers import BertConfig, BertModel
        >>> tokenizer = train_byte_level_bpe(["the king", "the queen"], vocab_size=265)
        >>> sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
        >>> model = BertModel(BertConfig(vocab_size=265, initializer_range=1.0, **sizes))
        >>> embedding_alignment(model, tokenizer, [(["the", "king"], ["the", "king"])], layer=0)
        [[(0, 0), (1, 1)]]
    """
    from ...data.words import encode_words

    encoder = reader_of(model)
    layers = encoder.config.get_text_config().num_hidden_layers
    layer = round(DEPTH * layers) if layer is None else layer
    if not is_integer(layer) or not 0 <= layer <= layers:
        raise ValueError(f"layer must be an integer from 0 (embeddings) to {layers}, got {layer!r}.")
    if not is_finite(threshold) or not 0 <= threshold < 1:
        raise ValueError(f"threshold must be at least 0 and below 1, got {threshold!r}.")
    texts = [
        [encode_words(list(words), tokenizer) for words in pair] if all(map(len, pair)) else []
        for pair in zip(*sides_of(pairs))
    ]
    _check_lengths(texts, longest_input(encoder))
    links: list[Links] = [[] for _ in texts]
    view = evaluation_view(encoder)
    filled = [number for number, sides in enumerate(texts) if sides]
    batches = batches_by_length(filled, batch_size, lambda number: max(len(ids) for ids, _ in texts[number]))
    for batch in tqdm(batches, desc="aligning", disable=not progress):
        states = []
        for side in (0, 1):
            inputs = padded((texts[number][side][0] for number in batch), tokenizer.pad_token_id)
            outputs = view.root(**arguments_of(encoder, inputs), output_hidden_states=True, return_dict=True)
            states.append(at_least_single(outputs.hidden_states[layer]))
        for number, source, target in zip(batch, *states):
            words = [words for _, words in texts[number]]
            links[number] = _links(source, target, *words, threshold)
    return links


def _check_lengths(texts: Sequence[Sequence[tuple[list[int], list]]], longest: int | None) -> None:
    for number, sides in enumerate(texts):
        for name, (ids, _) in zip(("source", "target"), sides):
            if longest is not None and len(ids) > longest:
                raise ValueError(
                    f"the {name} of pair {number} has {len(ids)} tokens, but the model has positions for {longest}; "
                    "leave the pair out."
                )


def _links(
    source: torch.Tensor,
    target: torch.Tensor,
    source_words: list[int | None],
    target_words: list[int | None],
    threshold: float,
) -> Links:
    """Links of the words of one pair, from the hidden states `(tokens, size)` of both sides."""
    rows = [token for token, word in enumerate(source_words) if word is not None]
    columns = [token for token, word in enumerate(target_words) if word is not None]
    similarity = source[rows] @ target[columns].T
    chosen = (similarity.softmax(-1) > threshold) & (similarity.softmax(-2) > threshold)
    return sorted({(source_words[rows[i]], target_words[columns[j]]) for i, j in chosen.nonzero().tolist()})
