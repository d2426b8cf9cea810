"""The table of architectures in docs/architectures.md, probed on tiny models; run this file to update it."""

from pathlib import Path

import torch
import transformers
from stock_models import STOCK_MODELS, build_stock, stock_inputs

import hf_attn_dynamics as had
from hf_attn_dynamics.models.head_roles import locate_heads
from hf_attn_dynamics.models.head_sites import kinds_of
from hf_attn_dynamics.models.unit_roles import locate_units


FILE = Path(__file__).parents[2] / "docs" / "architectures.md"
HEADER = """# Architectures

`headwise_architectures()` lists all architectures with headwise classes. The package creates each class from the stock
class at its first use: `from hf_attn_dynamics import HeadwiseLlamaForCausalLM`. `headwise_model` returns the headwise
model for a checkpoint, a configuration or a loaded model.

`python tests/reference/architecture_table.py` writes this table. It runs a tiny model of each architecture:

| column | what is run |
|---|---|
| guide | the guidance loss; it needs scores without added relative positions |
| gate | closed gates, which change the output; "by group": query heads that share a key and a value share a gate |
| prune | `prune_heads` |
| units | `prune_units`, `prune_layers`: feed-forward units and whole layers |
| read | `observe` with `HeadConfidence(excluded_ids=[])`; it needs the attention interface of Transformers |
| attribute | `local_contribution`, at each kind of site; it needs the attention interface of Transformers |
| relevance | `head_relevance`; it needs token embeddings, a task head, and a rule for every operation |

"No" is a `ValueError` that names the reason. Without guidance, gates and removed heads, headwise models have the same
outputs as stock models. `tests/models/test_every_architecture.py` also compares guidance with dense attention, and
closed gates with removed heads.

| architecture | sites | task heads | guide | gate | prune | units | read | attribute | relevance |
|---|---|---|---|---|---|---|---|---|---|
"""


def _is_possible(probe) -> str:
    try:
        works = probe()
    except ValueError:
        return "no"
    assert works
    return "yes"


def row(model_type: str) -> str:
    """The line of one architecture."""
    settings = next(
        name for name, (_, config, _) in STOCK_MODELS.items() if getattr(transformers, config).model_type == model_type
    )
    architecture = had.headwise_architectures()[model_type]
    stock = build_stock(settings)
    inputs = stock_inputs(stock)
    layers = locate_heads(stock)
    kinds = kinds_of({layer.site: 1 for layer in layers})
    group = max(layer.group_size for layer in layers)

    def by_kind(value):
        return value if len(kinds) == 1 else dict.fromkeys(kinds, value)

    def guided():
        loss = had.headwise_model(stock, guidance=by_kind({"fraction": 0.5}))(**inputs, output_guidance_loss=True)
        return loss.guidance_loss > 0

    def gated():
        model = had.headwise_model(stock, gates=by_kind({}))
        for gate in model.head_gates().values():
            gate.log_alpha.data[0] = -3.0
        with torch.no_grad():
            found, expected = (next(v for v in one(**inputs).values() if torch.is_tensor(v)) for one in (model, stock))
        return not torch.allclose(found, expected)

    def removed():
        layer = layers[0]
        heads = {layer.site.layer: layer.groups()[0]}
        model = had.prune_heads(had.headwise_model(stock), heads if len(kinds) == 1 else {kinds[0]: heads})
        with torch.no_grad():
            model(**inputs)
        return len(locate_heads(model)[0].heads) == layer.num_heads - layer.group_size

    def without_units():
        blocks = locate_units(stock)
        sites = kinds_of({block.site: 1 for block in blocks})
        chosen = {blocks[0].site.layer: blocks[0].units[::2]}
        model = had.prune_units(had.headwise_model(stock), chosen if len(sites) == 1 else {sites[0]: chosen})
        with torch.no_grad():
            model(**inputs)
        return locate_units(model)[0].units == blocks[0].units[1::2]

    def read():
        with torch.no_grad(), had.observe(stock, had.HeadConfidence(excluded_ids=[])) as seen:
            stock(**inputs)
        return all(seen.confidence[kind].isfinite().all() for kind in kinds)

    def attributed():
        found = [had.local_contribution(stock, inputs, kind=kind) for kind in kinds]
        return all(one.isfinite().all() for one in found)

    def relevant():
        relevance = had.head_relevance(stock, inputs)
        return all(relevance[kind].isfinite().all() for kind in kinds)

    heads = [auto.removeprefix("AutoModel").removeprefix("For") for auto in architecture.classes]
    gates = _is_possible(gated)
    return (
        f"| `{model_type}` | {', '.join(kinds)} | {', '.join(head for head in heads if head) or '–'} | "
        f"{_is_possible(guided)} | {gates + (', by group' if group > 1 and gates == 'yes' else '')} | "
        f"{_is_possible(removed)} | {_is_possible(without_units)} | {_is_possible(read)} | "
        f"{_is_possible(attributed)} | {_is_possible(relevant)} |"
    )


def table() -> str:
    """The whole file."""
    return HEADER + "\n".join(map(row, had.headwise_architectures())) + "\n"


if __name__ == "__main__":
    FILE.write_text(table())
