"""Trains guided and gated models, alone or sharded by FSDP2; resumes them, saves and loads them and cuts heads."""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from stock_models import SMALL_MISTRAL
from tiny_models import ALL_GATES, headwise_class, no_dropout, tiny_config
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_attn_dynamics import HeadwiseMistralForCausalLM, prune_heads
from hf_attn_dynamics.models.head_gates import gates_of
from hf_attn_dynamics.training.sharding import whole_model


HEADS = {"roberta": "ForMaskedLM", "marian": "MTModel", "mistral": "ForCausalLM"}
GUIDANCE = {
    "roberta": {"fraction": 0.5},
    "marian": {kind: {"fraction": 0.5} for kind in ("encoder", "decoder", "cross")},
    "mistral": {"fraction": 0.5},
}
REMOVED = {"roberta": {0: [0]}, "marian": {"encoder": {0: [0]}, "cross": {1: [1]}}, "mistral": {0: [0, 1]}}
STEPS, RESUMED = 4, 2  # in all, and before the checkpoint


def class_of(kind):
    return HeadwiseMistralForCausalLM if kind == "mistral" else headwise_class(kind, HEADS[kind])


def build(kind, processes):
    """The model with the weights of seed 0, each of its layers sharded if there are several processes."""
    torch.manual_seed(0)
    cls = class_of(kind)
    if kind == "mistral":
        config = cls.config_class(
            **SMALL_MISTRAL, guidance=GUIDANCE[kind], gates={"parts": ["heads", "units", "blocks"]}
        )
    else:
        config = tiny_config(kind, guidance=GUIDANCE[kind], gates=ALL_GATES[kind], **no_dropout(kind))
    model = cls(config)
    if processes > 1:
        mesh = init_device_mesh("cpu", (processes,))
        for layer in [
            m for m in model.modules() if type(m).__name__.endswith(("Layer", "EncoderLayer", "DecoderLayer"))
        ]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return config, model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer, ids, noise, processes):
    output = model(ids, labels=ids, guidance_weight=0.5, gate_penalty_weight=0.1, gate_noise=noise)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = output.loss.detach()
    if processes > 1:
        dist.all_reduce(loss)
    return loss.item() / processes


def train(kind, folder, processes, rank):
    ids = torch.randint(5, 50, (8, 10), generator=torch.Generator().manual_seed(1))
    ids = ids.chunk(processes)[rank]
    config, model, optimizer = build(kind, processes)
    noise = torch.linspace(0.1, 0.9, sum(gate.num_gates for gate in gates_of(model)))
    losses = []
    for number in range(STEPS):
        if number == RESUMED:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"{kind}-checkpoint")
        losses.append(step(model, optimizer, ids, noise, processes))
    # As after a kill: another model and optimizer take up what was saved.
    _, again, optimizer = build(kind, processes)
    weights, state = get_state_dict(again, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / f"{kind}-checkpoint")
    set_state_dict(again, optimizer, model_state_dict=weights, optim_state_dict=state)
    resumed = [step(again, optimizer, ids, noise, processes) for _ in range(STEPS - RESUMED)]
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(again, options=options)
    report = {"losses": losses, "resumed": resumed, "differing": differing_from_whole(again, state, rank)}
    return config, report, state


def differing_from_whole(model, state, rank):
    """Names of parameters of a sharded model that the whole one does not have with the same values, or as frozen."""
    next(model.parameters()).requires_grad_(False)
    is_trained = {name: value.requires_grad for name, value in model.named_parameters()}
    whole = whole_model(model)
    found = dict(whole.named_parameters())
    # The state is known to the first process only.
    differing = [name for name, value in found.items() if rank == 0 and not torch.equal(value, state[name])]
    differing += [name for name, value in found.items() if value.requires_grad != is_trained[name]]
    tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    return differing + ["tied weights"] * (tied != model.config.tie_word_embeddings)


def saved_and_pruned(kind, folder, config, state):
    """What a whole model with these weights gives, saved, loaded and without some of its heads."""
    cls = class_of(kind)
    whole = cls(config)
    whole.load_state_dict(state, strict=False)
    whole.save_pretrained(folder / kind)
    again = prune_heads(cls.from_pretrained(folder / kind).eval(), REMOVED[kind])
    again.save_pretrained(folder / f"{kind}-pruned")
    again = cls.from_pretrained(folder / f"{kind}-pruned").eval()
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        logits = again(ids, **({"decoder_input_ids": ids} if kind == "marian" else {})).logits
    gates = torch.cat([phi for gate in gates_of(again) for phi in gate.parameters()])
    return {"logits": logits.flatten().tolist(), "gates": gates.tolist()}


def main(folder: Path, processes: int) -> None:
    rank = int(os.environ.get("RANK", 0))
    if processes > 1:
        dist.init_process_group("gloo")
    report = {}
    for kind in HEADS:
        config, report[kind], state = train(kind, folder, processes, rank)
        if rank == 0:
            report[kind] |= saved_and_pruned(kind, folder, config, state)
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
