"""Trains a guided and gated model, alone or sharded by FSDP2; saves it, loads it and cuts heads."""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

import torch
import torch.distributed as dist
from tiny_models import no_dropout, tiny_config
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_attn_dynamics import HeadwiseRobertaForMaskedLM, prune_heads


def main(folder: Path, processes: int) -> None:
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    config = tiny_config("roberta", guidance={"fraction": 0.5}, gates={}, **no_dropout("roberta"))
    model = HeadwiseRobertaForMaskedLM(config)
    ids = torch.randint(5, 50, (8, 10), generator=torch.Generator().manual_seed(1))
    noise = torch.linspace(0.1, 0.9, config.num_hidden_layers * config.num_attention_heads)
    if processes > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (processes,))
        for layer in model.roberta.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        ids = ids.chunk(processes)[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        output = model(ids, labels=ids, guidance_weight=0.5, gate_penalty_weight=0.1, gate_noise=noise)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = output.loss.detach()
        if processes > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / processes)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        whole = HeadwiseRobertaForMaskedLM(config)
        whole.load_state_dict(state, strict=False)
        whole.save_pretrained(folder)
        again = HeadwiseRobertaForMaskedLM.from_pretrained(folder).eval()
        prune_heads(again, {0: [0]})
        with torch.no_grad():
            logits = again(torch.arange(5, 12)[None]).logits
        gates = torch.cat([gate.log_alpha for gate in again.head_gates().values()])
        report = {"losses": losses, "logits": logits.flatten().tolist(), "gates": gates.tolist()}
        (folder / "report.json").write_text(json.dumps(report))
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
