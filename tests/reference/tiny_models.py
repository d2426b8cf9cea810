"""Random models and batches small enough for every test, with ragged sentences and uneven labels."""

import torch

from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseRobertaConfig


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


def tiny_config(kind="roberta", **changes):
    settings = {**SIZES, "guidance": GUIDANCE, **changes}
    return {"roberta": HeadwiseRobertaConfig, "bert": HeadwiseBertConfig}[kind](**settings)


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
