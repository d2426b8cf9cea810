"""Random models and batches small enough for every test, with ragged sentences and uneven labels."""

import json

import torch
import transformers
from fresh_processes import python

import hf_attn_dynamics
from hf_attn_dynamics import (
    HeadwiseBertConfig,
    HeadwiseElectraConfig,
    HeadwiseMarianConfig,
    HeadwiseRobertaConfig,
)
from hf_attn_dynamics.models.architectures import ARCHITECTURES


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
KINDS = tuple(CONFIGS)
# Every kind with each of its heads; one head can serve two Auto classes.
CLASSES = [
    (kind, name.removeprefix(ARCHITECTURES[kind].stock_config.removesuffix("Config")))
    for kind in KINDS
    for name in dict.fromkeys(ARCHITECTURES[kind].stock_models().values())
]
# The head each kind was pretrained with.
PRETRAINED = {"roberta": "ForMaskedLM", "bert": "ForPreTraining", "electra": "ForPreTraining", "marian": "MTModel"}
PAD = {"roberta": 1, "bert": 0, "electra": 0, "marian": 1}


def sizes(kind):
    if kind == "marian":
        return dict(MARIAN_SIZES)
    return {**SIZES, "embedding_size": 12} if kind == "electra" else dict(SIZES)


def tiny_config(kind="roberta", **changes):
    guidance = {"encoder": GUIDANCE} if kind == "marian" else GUIDANCE
    return CONFIGS[kind](**{**sizes(kind), "guidance": guidance, **changes})


def stock_config(kind, **changes):
    """The stock configuration of the same sizes."""
    return getattr(transformers, f"{kind.capitalize()}Config")(**{**sizes(kind), **changes})


def no_dropout(kind):
    names = ["dropout"] if kind == "marian" else ["hidden_dropout_prob", "attention_probs_dropout_prob"]
    return dict.fromkeys(names, 0.0)


def stock_class(kind, head):
    return getattr(transformers, f"{kind.capitalize()}{head}")


def headwise_class(kind, head):
    return getattr(hf_attn_dynamics, f"Headwise{kind.capitalize()}{head}")


def tiny_model(kind="roberta", head=None, **changes):
    """A headwise model in evaluation mode, by default with the head it was pretrained with."""
    torch.manual_seed(0)
    return headwise_class(kind, head or PRETRAINED[kind])(tiny_config(kind, **changes)).eval()


# Heads to remove, unevenly; one layer of each site loses all.
_UNEVEN = {0: [1, 2], 1: [0, 1, 2, 3]}
UNEVEN = {
    **dict.fromkeys(("roberta", "bert", "electra"), _UNEVEN),
    "marian": {
        "encoder": {0: [0, 1, 2, 3], 1: [2]},
        "decoder": {0: [1], 1: [0, 1]},
        "cross": {0: [0, 1], 1: [0]},
    },
}
ALL_GATES = {
    **dict.fromkeys(("roberta", "bert", "electra"), {}),
    "marian": {"encoder": {}, "decoder": {}, "cross": {}},
}


@torch.no_grad()
def vivid(model, seed=0):
    """Random weights so large, biases included, that every head matters to the output; gates stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.endswith("log_alpha"):
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    return model


def vivid_bert(tokenizer):
    """A BERT with a language-modelling head that reads the tokens of a tokenizer."""
    config = tiny_config("bert", vocab_size=len(tokenizer), max_position_embeddings=60, sep_token_id=3)
    return vivid(transformers.AutoModelForMaskedLM.from_config(config))


def batch_for(kind, sentences=None):
    """A padded batch for a model of this kind; a decoder reads the same sentences."""
    batch = padded_batch(sentences or ragged_sentences(), pad=PAD[kind])
    if kind == "marian":
        batch |= {f"decoder_{name}": value for name, value in batch.items()}
    return batch


def first_output(model, kind, **arguments):
    with torch.no_grad():
        return model(**batch_for(kind), **arguments).to_tuple()[0]


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


# Loads checkpoints, with the package or where importing it fails, as if it were not installed.
_FRESH = """
import json, sys
package, checkpoints = json.loads(sys.argv[1])
if package:
    import hf_attn_dynamics
else:
    sys.modules["hf_attn_dynamics"] = None
import torch, transformers
for folder, auto_class, inputs, arguments in checkpoints:
    auto = getattr(transformers, auto_class)
    model = auto.from_pretrained(folder, dtype="auto", trust_remote_code=not package).eval()
    with torch.no_grad():
        outputs = model(**{name: torch.tensor(value) for name, value in inputs.items()}, **arguments)
    scalars = [outputs[name].item() for name in ("guidance_loss", "gate_penalty") if name in outputs]
    print(json.dumps([type(model).__name__, outputs.to_tuple()[0].flatten().tolist(), scalars]))
"""


def assert_same_in_a_fresh_process(checkpoints, package):
    """Checks that checkpoints give there what they give here.

    Args:
        checkpoints (list of `(model, folder, auto_class, kind, arguments)`): A model, where it was saved, the Auto
            class to load it with, and arguments of the forward pass.
        package (`bool`): Whether the package can be imported there.
    """
    rows = []
    for _, folder, auto_class, kind, arguments in checkpoints:
        inputs = {name: value.tolist() for name, value in batch_for(kind).items()}
        rows.append([str(folder), auto_class, inputs, arguments])
    (result,) = python(["-c", _FRESH, json.dumps([package, rows])])
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for (model, _, auto_class, kind, arguments), line in zip(checkpoints, lines, strict=True):
        name, output, scalars = json.loads(line)
        with torch.no_grad():
            expected = model(**batch_for(kind), **arguments)
        assert name == type(model).__name__, auto_class
        found = torch.tensor(output, dtype=model.dtype)
        torch.testing.assert_close(found, expected.to_tuple()[0].flatten(), rtol=0, atol=1e-6)
        own = [expected[name].item() for name in ("guidance_loss", "gate_penalty") if name in expected]
        assert len(own) == len(arguments)
        torch.testing.assert_close(torch.tensor(scalars), torch.tensor(own), rtol=1e-6, atol=0)
