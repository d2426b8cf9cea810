"""Random models and batches small enough for every test, with ragged sentences and uneven labels."""

import torch

from hf_attn_dynamics import (
    HeadwiseBertConfig,
    HeadwiseElectraConfig,
    HeadwiseMarianConfig,
    HeadwiseRobertaConfig,
)


SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}
GUIDANCE = {
    "heads": {"next": [0], "prev": [1], "first": [2], "period": [3]},
    "period_token_ids": [7],
    "delimiter_token_ids": [2, 3],
}


MARIAN_SIZES = {
    "vocab_size": 60,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
    "decoder_start_token_id": 1,
}
CONFIGS = {
    "roberta": HeadwiseRobertaConfig,
    "bert": HeadwiseBertConfig,
    "electra": HeadwiseElectraConfig,
    "marian": HeadwiseMarianConfig,
}
PAD = {"roberta": 1, "bert": 0, "electra": 0, "marian": 1}


def tiny_config(kind="roberta", **changes):
    sizes = {**MARIAN_SIZES} if kind == "marian" else {**SIZES}
    if kind == "electra":
        sizes["embedding_size"] = 12
    guidance = {"encoder": GUIDANCE} if kind == "marian" else GUIDANCE
    return CONFIGS[kind](**{**sizes, "guidance": guidance, **changes})


def ragged_sentences(count=8, seed=0):
    """Sentences of 1 to 19 tokens; the shortest has one token, some have no period."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 20, (count,), generator=generator)
    lengths[count // 2] = 1
    return [torch.randint(4, SIZES["vocab_size"], (int(n),), generator=generator).tolist() for n in lengths]


def padded_batch(sentences, pad=1, length=None):
    length = length or max(map(len, sentences))
    ids = torch.full((len(sentences), length), pad)
    mask = torch.zeros_like(ids)
    for row, sentence in enumerate(sentences):
        ids[row, : len(sentence)], mask[row, : len(sentence)] = torch.tensor(sentence), 1
    return {"input_ids": ids, "attention_mask": mask}
