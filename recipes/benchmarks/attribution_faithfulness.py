# Licensed under the Apache License, Version 2.0.
"""Which attribution a classifier of sentences follows most: attention, rollout, contributions, relevance, gradients.

    python recipes/benchmarks/attribution_faithfulness.py --model runs/sst2/dense --data data/sst2/dev.tsv
    python recipes/benchmarks/attribution_faithfulness.py --methods rollout attn_lrp --output_dir runs/faithfulness

The model, an encoder or a decoder with a classifier, reads texts with labels, of which only the texts are used. Each
method assigns a number to each token for the prediction; tokens other than special ones are then removed in the order
of these numbers (`faithfulness`). Methods that give contributions to each position are read at the position that the
classifier reads, the first of an encoder and the last of a decoder. All methods take the same texts; those that do not
know the model are left out. The seconds of each method are those of attributing all texts, in batches: the median of
`--rounds` measurements.

Keys of `summary.json`: `rows`, one for each method, the highest gap first: `method`, `gap`, `comprehensiveness`,
`sufficiency`, and `seconds`; `left_out`, why the other methods do not know the model; `texts`, their number; `tokens`,
the mean number of tokens; and the settings. `faithfulness.png` shows the curves, and can be drawn again by `redraw`.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from benchmarking import BenchmarkArguments, write_summary
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import hf_attn_dynamics  # noqa: F401  (models without some heads)
from hf_attn_dynamics import (
    Faithfulness,
    attention_maps,
    attention_rollout,
    faithfulness,
    global_contribution,
    layer_contribution,
    plot_faithfulness,
    token_decomposition,
    token_relevance,
    value_weighted_attention,
)
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.analysis.sentences import batches_by_length, padded
from hf_attn_dynamics.data import load_classification
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.recipes.arguments.base import check_names, flag
from hf_attn_dynamics.recipes.pictures import draw
from hf_attn_dynamics.recipes.run import run_recipe


Batch = dict[str, torch.Tensor]
POINTS = 20  # on the path of integrated gradients
PROBES = 32  # directions per token


def where_read(model: PreTrainedModel, batch: Batch, maps: torch.Tensor) -> torch.Tensor:
    """Contributions to the position that the classifier reads, `(batch, tokens)`, of maps `(batch, query, key)`."""
    if locate_heads(model)[0].site.kind == "encoder":
        return maps[:, 0]
    return maps[torch.arange(len(maps)), batch["attention_mask"].sum(1) - 1]


def only(by_kind: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The value of the only kind of attention."""
    [value] = by_kind.values()
    return value


def of_last_layer(maps: torch.Tensor) -> torch.Tensor:
    """Mean over the heads of the last layer that has any, of maps `(layers, batch, heads, query, key)`."""
    has_heads = (~maps.isnan()).flatten(1).any(1)
    return maps[has_heads.nonzero().max()].nanmean(1)


def attention(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    return where_read(model, batch, of_last_layer(only(attention_maps(model, batch))))


def rollout(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    return where_read(model, batch, attention_rollout(only(attention_maps(model, batch)))[-1])


def value_weighted_rollout(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    weighted = value_weighted_attention(model, batch, projected=True)
    return where_read(model, batch, attention_rollout(weighted)[-1])


def hidden_token_attribution(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    return where_read(model, batch, of_last_layer(global_contribution(model, batch)))


def estimated_hidden_token_attribution(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    probes = min(PROBES, model.get_input_embeddings().weight.shape[1])
    return where_read(model, batch, of_last_layer(global_contribution(model, batch, "probes", probes)))


def gradients(model: PreTrainedModel, batch: Batch, points: int) -> torch.Tensor:
    """Integrated gradients from embeddings of zeros, `(batch, tokens)`; gradient × input for a single point."""
    layer = model.get_input_embeddings()
    embedded = layer(batch["input_ids"]).detach()
    with torch.no_grad():
        predicted = model(**batch).logits.argmax(-1, keepdim=True)
    total = torch.zeros_like(embedded)
    for point in range(points):
        inputs = (embedded * ((point + 0.5) / points if points > 1 else 1.0)).requires_grad_()
        # In place of `inputs_embeds`, with which decoders do not find the last token before padding.
        handle = layer.register_forward_hook(lambda *_, inputs=inputs: inputs)
        logit = model(**batch).logits.gather(1, predicted).sum()
        handle.remove()
        total += torch.autograd.grad(logit, inputs)[0] / points
    return (total * embedded).sum(-1)


def decompx(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Shares of the logit of the predicted class, `(batch, tokens)`."""
    shares = token_decomposition(model, batch).logits
    return shares[torch.arange(len(shares)), shares.sum(-1).argmax(-1)]


METHODS: dict[str, Callable[[PreTrainedModel, Batch], torch.Tensor]] = {
    "random": lambda model, batch: torch.rand(batch["input_ids"].shape),
    "attention": attention,
    "rollout": rollout,
    "value_weighted_rollout": value_weighted_rollout,
    "hidden_token_attribution": hidden_token_attribution,
    "hidden_token_attribution_probes": estimated_hidden_token_attribution,
    "alti": lambda model, batch: where_read(model, batch, layer_contribution(model, batch)[-1]),
    "globenc": lambda model, batch: where_read(model, batch, layer_contribution(model, batch, "globenc")[-1]),
    "decompx": decompx,
    "gradient_times_input": lambda model, batch: gradients(model, batch, 1),
    "integrated_gradients": lambda model, batch: gradients(model, batch, POINTS),
    "lrp_ratio": lambda model, batch: only(token_relevance(model, batch, "ratio"))[:, 0],
    "lrp_alpha_beta": lambda model, batch: only(token_relevance(model, batch, "alpha_beta"))[:, 0],
    "attn_lrp": lambda model, batch: only(token_relevance(model, batch))[:, 0],
}


@dataclass
class FaithfulnessArguments(BenchmarkArguments):
    """Model, texts and methods."""

    model: str = flag("runs/prune_heads/dense", "Checkpoint of a classifier of sentences.")
    data: list[str] = flag(["data/sst2/dev.tsv"], "Files with texts and labels.")
    methods: list[str] | None = flag(None, f"Methods: {', '.join(METHODS)}; all by default.")
    rounds: int = flag(1, "Number of times that each method is timed.")
    max_examples: int = flag(200, "Number of texts: the first ones.")
    max_length: int = flag(64, "Maximum number of tokens; longer texts are cut.")
    batch_size: int = flag(16, "Batch size, in texts.")
    steps: int = flag(10, "Number of steps in which tokens are removed.")

    def __post_init__(self):
        super().__post_init__()
        if self.methods is not None:
            check_names("methods", self.methods, METHODS)
        self.check_at_least(1, "max_examples", "max_length", "batch_size", "steps")


def merged(parts: list[Faithfulness]) -> Faithfulness:
    """The mean over all sentences of several results."""
    total = sum(part.sentences for part in parts)

    def mean(name: str) -> torch.Tensor:
        return sum(getattr(part, name) * part.sentences for part in parts) / total

    return Faithfulness(parts[0].removed, mean("most_first"), mean("least_first"), total)


def main(args: FaithfulnessArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    args.use_threads()
    torch.manual_seed(args.seed)
    model = AutoModelForSequenceClassification.from_pretrained(args.model).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = load_classification(args.data)["text"][: args.max_examples]
    encoded = tokenizer(texts, truncation=True, max_length=args.max_length)["input_ids"]
    batches = [padded(some, tokenizer.pad_token_id) for some in batches_by_length(encoded, args.batch_size)]
    results, rows, left_out = {}, [], {}
    for name in args.methods or METHODS:
        seconds = []
        try:
            for _ in range(args.rounds):
                start = time.perf_counter()
                found = [METHODS[name](model, batch) for batch in batches]
                seconds.append(time.perf_counter() - start)
        except ValueError as error:
            left_out[name] = str(error)
            print(f"{name} is left out: {error}", flush=True)
            continue
        parts = [
            faithfulness(model, batch, own, args.steps, tokenizer.all_special_ids)
            for batch, own in zip(batches, found)
        ]
        results[name] = one = merged(parts)
        rows.append(
            {
                "method": name,
                "gap": one.gap,
                "comprehensiveness": one.comprehensiveness,
                "sufficiency": one.sufficiency,
                "seconds": statistics.median(seconds),
            }
        )
        print(f"{name}: gap {one.gap:.3f}, {rows[-1]['seconds']:.1f} s", flush=True)
    rows.sort(key=lambda row: -row["gap"])
    print(format_table(list(rows[0]), [list(row.values()) for row in rows]))
    if args.summary_path is not None:
        ranked = {row["method"].replace("_", " "): results[row["method"]] for row in rows}
        title = f"{args.model}, {len(texts)} texts"
        args.summary_path.parent.mkdir(parents=True, exist_ok=True)
        draw(plot_faithfulness, args.summary_path.parent / "faithfulness.png", ranked, title=title)
    tokens = sum(map(len, encoded)) / len(encoded)
    return write_summary(args, {"rows": rows, "left_out": left_out, "texts": len(texts), "tokens": tokens})


if __name__ == "__main__":
    run_recipe(main)
