"""A step of NeMo Automodel with a model of transformers, on a sequence that two or more ranks share.

    torchrun --nproc-per-node 2 examples/nemo_sharder.py

One line differs from NeMo's own context parallelism: it is marked. The rest is what NeMo's recipes do with a batch.
Started with one rank, the program prints the same losses.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import burst
import burst.nemo

SEQ_LEN, VOCABULARY = 95, 64


def main(steps: int = 5) -> None:
    """Train on packed rows, and print the loss of each step."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    burst.nemo.attach(model, burst.ContextParallel(mesh["cp"]))  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(VOCABULARY, (2, SEQ_LEN + 1))
    positions = torch.cat([torch.arange(length) for length in (50, 6, 39)])[None]
    whole = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions}
    losses = []
    for _ in range(steps):
        batch = dict(whole)
        context, batch = ContextParallelSharder(model, mesh, batch).shard(batch)
        with context():
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
            labels = batch["labels"].flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / tokens.numel()
            loss.backward()
        for each in (loss := loss.detach(), *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(each)  # sums over the ranks, which FSDP does in NeMo's recipes
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.5f}")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: losses {', '.join(losses)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
