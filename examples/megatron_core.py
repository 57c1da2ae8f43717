"""GPT of Megatron Core on a sequence that two or more ranks share.

    pip install megatron-core
    torchrun --nproc-per-node 2 examples/megatron_core.py

One line differs from Megatron with its own attention: it is marked. Started with one rank, the program prints the same
losses. Megatron cuts each batch itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

import burst.megatron

SEQ_LEN, VOCABULARY = 96, 64


def main(steps: int = 5) -> None:
    """Train, and print the loss of each step."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    initialize_rng_tracker(inference_rng_tracker=True)  # the one that needs no GPU
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, context_parallel_size=ranks,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, bias_dropout_fusion=False,
    )  # fmt: skip
    spec = burst.megatron.sharded(get_gpt_layer_local_spec())  # the one line
    torch.manual_seed(0)
    model = GPTModel(config, spec, VOCABULARY, SEQ_LEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(VOCABULARY, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        positions = torch.arange(SEQ_LEN).expand(2, -1)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous(), "position_ids": positions}
        part = get_batch_on_this_cp_rank(batch)
        loss = model(part["tokens"], part["position_ids"], None, labels=part["labels"]).sum() / tokens[:, 1:].numel()
        loss.backward()
        total = loss.detach()
        for each in (total, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(each)  # sums over the ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    if dist.get_rank() == 0:
        print(f"{ranks} ranks: losses {', '.join(f'{loss:.5f}' for loss in losses)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
