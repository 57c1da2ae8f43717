"""What the targets of torchtitan 0.2 and 0.3 share: names of parameters, the mesh, a rank's part of a batch, the loss.

For targets/torchtitan.py and targets/torchtitan_02.py, which import their release of torchtitan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conform.flexible import blocks_of
from conform.summed import LABELS, LabelCount
from conform.target import IGNORE, CaseProblem, Part

_NAMES = {
    "model.embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "model.norm": "norm", "model.layers": "layers",
}  # fmt: skip


def versions() -> str:
    return f"torchtitan {version('torchtitan')}, torch {torch.__version__}"


def own_name(name: str, of_release: Mapping[str, str]) -> str:
    """A parameter's name in torchtitan. `of_release` has the names that only one release uses."""
    for theirs, ours in (_NAMES | dict(of_release)).items():
        name = name.replace(theirs, ours)
    return name


@lru_cache
def cp_mesh(ranks: int) -> DeviceMesh:
    """All ranks. Collective at the first call."""
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))


@contextlib.contextmanager
def mask_blocks(batch: Mapping[str, Tensor], problem: CaseProblem) -> Iterator[int]:
    """Inside, blocks of masks are so small that each rank has whole ones. Gives the tokens of a block."""
    import torch.distributed.tensor.experimental._context_parallel._attention as ring

    tokens = max(1, batch["input_ids"].shape[1] // (2 * problem.ranks))
    with blocks_of(tokens, ring):
        yield tokens


def part_of(batch: Mapping[str, Tensor], more: dict[str, object], problem: CaseProblem) -> Part:
    """This rank's part of a batch. `more` is what the model takes beside tokens, such as masks. Labels are shifted
    first, as the data loaders of torchtitan give them."""
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    tokens = batch["input_ids"]
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    count = int((labels != IGNORE).sum())
    if problem.ranks > 1:
        tokens, labels, more = prepare_context_parallel_input(
            tokens, labels, more, cp_mesh(problem.ranks), torch.device("cpu")
        )
    return {"tokens": tokens, "labels": labels, "more": more, LABELS: count}


def loss_of(model: nn.Module, part: Part, labels: LabelCount) -> Tensor:
    """Of a rank's part, for `step_of` and `evaluation_of`."""
    from torchtitan.components.loss import cross_entropy_loss

    loss: Tensor = cross_entropy_loss(model(part["tokens"], **part["more"]), part["labels"]) / labels
    return loss
