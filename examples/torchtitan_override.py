"""Llama 3 of torchtitan on packed documents, on a sequence that two or more ranks share.

    torchrun --nproc-per-node 2 examples/torchtitan_override.py

This is torchtitan's trainer around one step, small enough for CPUs; the trainer itself needs one setting,
`--override.imports burst.torchtitan.attention`. Started with one rank, the program prints the same losses.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention as torch_cp
import torchtitan.models.common.attention as titan
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.config import OverrideConfig, ParallelismConfig, apply_overrides
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.models.llama3 import llama3_configs

SEQ_LEN, VOCABULARY, STEPS = 512, 2048, 5


def main() -> None:
    dist.init_process_group("gloo")
    parallel_dims.device_type = "cpu"
    titan._compiled_create_block_mask = torch_cp._compiled_create_block_mask = create_block_mask  # without a compiler
    config = llama3_configs["debugmodel"](attn_backend="flex")
    parallelism = ParallelismConfig(context_parallel_degree=dist.get_world_size())
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    apply_overrides(OverrideConfig(imports=["burst.torchtitan.attention"]), config)  # the one setting
    torch.manual_seed(0)
    model, ranks = config.build(), ParallelDims.from_config(parallelism, dist.get_world_size())
    model.init_states(buffer_device=torch.device("cpu"))
    ranks.build_mesh()
    model.parallelize(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(VOCABULARY, (1, SEQ_LEN + 1))
    positions = torch.cat([torch.arange(length) for length in (300, 12, 200)])[None]
    masks = model.get_attention_masks(positions)
    part = (tokens[:, :-1], tokens[:, 1:], {"positions": positions, "attention_masks": masks})
    if ranks.cp_enabled:
        part = prepare_context_parallel_input(*part, ranks.get_mesh("cp"), torch.device("cpu"))
    losses = []
    for _ in range(STEPS):
        logits = model(part[0], **part[2])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[1].flatten(), reduction="sum") / SEQ_LEN
        optimizer.zero_grad()
        loss.backward()
        for each in (loss := loss.detach(), *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(each)  # sums over the ranks, which FSDP does in the trainer
        optimizer.step()
        losses.append(f"{loss.item():.5f}")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: losses {', '.join(losses)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
