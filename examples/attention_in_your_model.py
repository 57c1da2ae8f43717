"""BurstAttention in a model of your own: a small one, packed documents, on as many ranks as there are.

    torchrun --nproc-per-node 4 examples/attention_in_your_model.py

Every rank holds a part of one long sequence. Only four things differ from training on one device: tokens and labels are
sharded, RoPE gets global positions, attention is `burst_attention`, and gradients are summed over the ranks. The same
step is then run without sharding, and loss and gradients must agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from burst import ContextParallel, Documents, burst_attention, choose_layout

SEQ_LEN, VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 384, 64, 48, 4, 2, 16
MASK = Documents((100, 28, 192, 64))  # four texts in one sequence; none sees another
NO_LABEL = -100

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rope(x_BLND: Tensor, positions_L: Tensor) -> Tensor:
    """Rotary embedding at global positions: a shard's first token is hardly ever token 0."""
    frequencies_D = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2, device=x_BLND.device) / HEAD_DIM)
    angles_LD = torch.outer(positions_L.double(), frequencies_D.double())
    cos, sin = (table[:, None].to(x_BLND.dtype) for table in (angles_LD.cos(), angles_LD.sin()))
    first, second = x_BLND.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class YourModel(nn.Module):
    """One attention layer and one MLP, written for tokens it is given; it never asks how many ranks there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM)
        self.output = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, VOCAB)
        )

    def forward(self, tokens_BL: Tensor, positions_L: Tensor, attend: Attend) -> Tensor:
        """Logits [batch, tokens, vocabulary]."""
        x_BLE = self.embedding(tokens_BL)
        q_BLND = self.q(x_BLE).unflatten(-1, (HEADS, HEAD_DIM))
        k_BLKD, v_BLKD = self.kv(x_BLE).unflatten(-1, (2 * KV_HEADS, HEAD_DIM)).chunk(2, dim=2)
        out_BLND = attend(rope(q_BLND, positions_L), rope(k_BLKD, positions_L), v_BLKD)
        return self.mlp(x_BLE + self.output(out_BLND.flatten(-2)))


def step(model: nn.Module, tokens_BS: Tensor, labels_BS: Tensor, cp: ContextParallel) -> tuple[float, list[Tensor]]:
    """(mean loss over all labelled tokens of the sequence, gradients of all parameters), the same on every rank."""
    tokens_BL, labels_BL = (cp.shard(tensor, dim=1) for tensor in (tokens_BS, labels_BS))
    positions_L = cp.positions(tokens_BS.shape[1], tokens_BS.device)

    def attend(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        out_BLND: Tensor = burst_attention(q_BLND, k_BLKD, v_BLKD, mask=MASK, cp=cp)
        return out_BLND

    logits_BLV = model(tokens_BL, positions_L, attend)
    # A sum over this rank's labels, divided by the count of the whole sequence: ranks may hold different numbers of
    # labels, even none, and a mean of their means would weigh tokens unequally.
    labelled = int((labels_BS != NO_LABEL).sum())
    loss = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=NO_LABEL, reduction="sum")
    loss = loss / labelled
    gradients = list(torch.autograd.grad(loss, list(model.parameters())))
    total = loss.detach().clone()
    if cp.size > 1:
        for tensor in (total, *gradients):
            dist.all_reduce(tensor, group=cp.group)  # a sum; with DDP or FSDP, which average, multiply by the ranks
    return total.item(), gradients


def sequence(device: torch.device) -> tuple[Tensor, Tensor]:
    """Random tokens and the next token of each as its label; the last token of a document has none."""
    tokens_BS = torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    labels_BS = tokens_BS.roll(-1, dims=1)
    labels_BS[:, torch.tensor(list(MASK.lengths)).cumsum(0) - 1] = NO_LABEL
    return tokens_BS.to(device), labels_BS.to(device)


def main() -> tuple[float, float, float]:
    """(loss on all ranks, loss on one, largest difference of any gradient). Collective when distributed."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    started = "RANK" in os.environ and not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    cp = ContextParallel(layout=choose_layout(MASK, SEQ_LEN, ranks))

    torch.manual_seed(0)
    # bf16 where the fast kernels want it; fp32 on a CPU.
    model = YourModel().to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    batch = sequence(device)
    loss, gradients = step(model, *batch, cp)
    alone, expected = step(model, *batch, ContextParallel.single())
    error = max((found - truth).abs().max().item() for found, truth in zip(gradients, expected, strict=True))
    if cp.rank == 0:
        print(f"layout {cp.layout.name}, {cp.size} ranks: loss {loss:.6f}; one device: {alone:.6f}")
        print(f"largest difference of any gradient: {error:.2e}")
    if started:
        dist.destroy_process_group()
    return loss, alone, error


if __name__ == "__main__":
    main()
