"""torchtitan 0.2's Llama with its context parallelism: flexible attention whose keys are gathered.

As in torchtitan.py, which is of 0.3: its model, mask, sharding of a batch and loss are called as its trainer calls
them, without FSDP and optimizer. It divides documents at a token that ends them, which cases do not have, so documents
are not claimed. Its rotary embedding turns neighbouring channels, those of transformers the halves of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from conform.flexible import allow_cpu, blocks_of
from conform.summed import LABELS, LabelCount, evaluation_of, step_of
from conform.target import IGNORE, CaseProblem, Part

NAME = "torchtitan 0.2"
RANKS = (1, 2, 4)
DEVICES = ("cpu",)
REQUIRES = ("torchtitan", "torchdata", "tyro", "docstring_parser", "typeguard", "shtab", "triton")
INSTALL = (
    "pip install --no-deps torchtitan==0.2.2 torchdata==0.11.0 tyro==1.0.17 docstring-parser==0.18.0 "
    "typeguard==4.4.4 shtab==1.13.0 triton==3.9.0"
)
CAPABILITIES = (
    "causal", "grouped_heads", "few_kv_heads", "batch", "bf16", "evaluation", "accumulation", "frozen",
    "two_models",
)  # fmt: skip
_NAMES = {
    "model.embed_tokens": "tok_embeddings", "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "model.norm": "norm", "model.layers": "layers", "lm_head": "output",
}  # fmt: skip


def VERSION() -> str:
    return f"torchtitan {version('torchtitan')}, torch {torch.__version__}"


def _own_name(name: str) -> str:
    """A parameter's name in torchtitan."""
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _reordered(name: str, weight: Tensor, problem: CaseProblem, pairs: tuple[int, int]) -> Tensor:
    """A weight of queries or keys, or its gradient, with the channels of each head in the other order. `pairs`:
    (2, -1) where the halves of a head turn together in `weight`, (-1, 2) where neighbours do. Others as they are."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    by_pair = weight.unflatten(0, (-1, problem.head_dim)).unflatten(1, pairs)
    return by_pair.transpose(1, 2).reshape(weight.shape)


@lru_cache
def _mesh(ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))


def make_model(problem: CaseProblem) -> nn.Module:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
    from torchtitan.models import attention as titan
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    allow_cpu()
    titan.FlexAttentionWrapper._compiled_flex_attn = staticmethod(flex_attention)
    titan._compiled_create_block_mask = create_block_mask
    width = int(2 * 4 * problem.hidden / 3)  # of its MLP, before the factor
    model: Any = Transformer(TransformerModelArgs(
        dim=problem.hidden, n_layers=problem.layers, n_heads=problem.heads, n_kv_heads=problem.kv_heads,
        vocab_size=problem.vocab, multiple_of=1, ffn_dim_multiplier=(problem.ffn + 0.5) / width,
        norm_eps=problem.norm_eps, rope_theta=problem.rope_theta, rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
        max_seq_len=max(problem.micro_batches or (problem.tokens,)), attn_type="flex",
    ))  # fmt: skip
    own = dict(model.named_parameters())
    for name, weight in problem.state.items():  # in the problem's dtype; its rotary embedding stays complex
        parameter = own[_own_name(name)]
        assert parameter.shape == weight.shape, name
        parameter.data = _reordered(name, weight, problem, (2, -1)).clone()
        parameter.requires_grad_(not name.startswith(problem.frozen or " "))
    if problem.ranks > 1:
        inner = [layer.attention.inner_attention for layer in model.layers.values()]
        apply_cp_to_attention_module(inner, _mesh(problem.ranks), "flex")
    built: nn.Module = model.train()
    return built


def shard(batch: Mapping[str, Tensor], problem: CaseProblem) -> Part:
    """Labels are shifted first, as its data loaders give them."""
    import torch.distributed.tensor.experimental._context_parallel._attention as ring
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input
    from torchtitan.models.attention import create_attention_mask, get_causal_mask_mod

    tokens = batch["input_ids"]
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    length = tokens.shape[1]
    with blocks_of(max(1, length // (2 * problem.ranks)), ring):
        masks = create_attention_mask(get_causal_mask_mod(), 1, None, length, length, device="cpu")
        more: dict[str, Any] = {"attention_masks": masks}
        if problem.ranks > 1:
            tokens, labels, more = prepare_context_parallel_input(
                tokens, labels, more, _mesh(problem.ranks), torch.device("cpu")
            )
    whole = int((batch["labels"][:, 1:] != IGNORE).sum())
    return {"tokens": tokens, "labels": labels, "more": more, LABELS: whole}


def _loss(model: nn.Module, part: Part, labels: LabelCount) -> Tensor:
    from torchtitan.components.loss import cross_entropy_loss

    loss: Tensor = cross_entropy_loss(model(part["tokens"], **part["more"]), part["labels"]) / labels
    return loss


def step(model: nn.Module, parts: Sequence[Part], problem: CaseProblem) -> Tensor:
    return step_of(_loss, model, parts, problem)


def gather(model: nn.Module, problem: CaseProblem) -> dict[str, Tensor]:
    own = {name: each.grad for name, each in model.named_parameters()}
    found = {name: own[_own_name(name)] for name in problem.state}
    return {name: _reordered(name, each, problem, (-1, 2)) for name, each in found.items() if each is not None}


def evaluate(model: nn.Module, part: Part, problem: CaseProblem) -> Tensor:
    return evaluation_of(_loss, model, part, problem)
