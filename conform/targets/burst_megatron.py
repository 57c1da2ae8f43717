"""Megatron Core's GPT with this package's attention in its slot: `burst.megatron.sharded`.

Megatron cuts the batch and its rotary embedding; it cuts packed documents on GPUs alone, so those are not claimed.
Where it asks for the current GPU the CPU is named. Its loss of each token is in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conform.summed import LABELS, LabelCount, evaluation_of, step_of
from conform.target import IGNORE, CaseProblem, Part, version_of

NAME = "Megatron Core with burst.megatron"
RANKS = (1, 2, 4)
DEVICES = ("cpu",)
REQUIRES = ("megatron.core",)
INSTALL = "pip install megatron-core==0.16.1"
CAPABILITIES = (
    "causal", "window", "grouped_heads", "few_kv_heads", "batch", "evaluation", "accumulation", "tied", "frozen",
    "two_models",
)  # fmt: skip
_NAMES = {
    "model.embed_tokens": "embedding.word_embeddings", "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer", "model.layers": "decoder.layers", "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.down_proj": "mlp.linear_fc2", "post_attention_layernorm": "pre_mlp_layernorm",
}  # fmt: skip


def VERSION() -> str:
    return f"burst-harness {version_of()}, megatron-core {version_of('megatron-core')}"


class _TorchWithoutGpu:
    """torch for modules of Megatron that name a GPU: tensors are made on the CPU."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("tensor", "ones"):
            return found
        return lambda *args, device=None, pin_memory=False, **settings: found(*args, **settings)


def _own_name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _fused(state: Mapping[str, Tensor], problem: CaseProblem) -> dict[str, Tensor]:
    """Whole weights, or gradients, as Megatron names and joins them: q, k and v of each group, gate before up."""
    found = {}
    for name, weight in state.items():
        start = _own_name(name.rpartition("self_attn.")[0] or name.rpartition("mlp.")[0])
        if "q_proj" in name:
            k, v = (state[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            groups = [each.view(problem.kv_heads, -1, problem.hidden) for each in (weight, k, v)]
            found[f"{start}self_attention.linear_qkv.weight"] = torch.cat(groups, 1).view(-1, problem.hidden)
        elif "gate_proj" in name:
            found[f"{start}mlp.linear_fc1.weight"] = torch.cat((weight, state[name.replace("gate", "up")]))
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            found[_own_name(name)] = weight
    return found


def _parted(own: Mapping[str, Tensor], problem: CaseProblem) -> dict[str, Tensor]:
    """`_fused` undone."""
    share, size = problem.heads // problem.kv_heads, problem.head_dim
    found = {}
    for name in problem.state:
        start, _, rest = name.partition("self_attn.") if "self_attn." in name else name.partition("mlp.")
        start = _own_name(start)
        if rest[1:7] == "_proj.":
            rows = own[f"{start}self_attention.linear_qkv.weight"].view(problem.kv_heads, -1, problem.hidden)
            q, k, v = rows.split((share * size, size, size), dim=1)
            found[name] = {"q": q, "k": k, "v": v}.get(rest[0], rows).reshape(-1, problem.hidden)
        if rest.startswith(("gate", "up")):
            gate, up = own[f"{start}mlp.linear_fc1.weight"].chunk(2)
            found[name] = gate if rest.startswith("gate") else up
        if rest.startswith(("o_proj", "down")) or not rest:
            found[name] = own[_own_name(name)]
    return found


def make_model(problem: CaseProblem) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    import burst.megatron

    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    modules: Any = (rope_utils, utils)
    cuda.current_device = lambda: torch.device("cpu")
    tensor.cuda = lambda own, **_: own
    for module in modules:
        module.torch = _TorchWithoutGpu()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=problem.ranks)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # the one that needs no GPU
    config = TransformerConfig(
        num_layers=problem.layers, hidden_size=problem.hidden, ffn_hidden_size=problem.ffn,
        num_attention_heads=problem.heads, num_query_groups=problem.kv_heads, kv_channels=problem.head_dim,
        layernorm_epsilon=problem.norm_eps, context_parallel_size=problem.ranks, use_cpu_initialization=True,
        window_size=None if problem.window is None else (problem.window, 0), params_dtype=problem.torch_dtype,
        pipeline_dtype=problem.torch_dtype, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0,
        bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
    )  # fmt: skip
    model: nn.Module = GPTModel(
        config, burst.megatron.sharded(get_gpt_layer_local_spec(normalization="RMSNorm")), vocab_size=problem.vocab,
        max_sequence_length=max(problem.micro_batches or (problem.tokens,)), position_embedding_type="rope",
        rotary_base=int(problem.rope_theta), share_embeddings_and_output_weights=problem.tied,
    )  # fmt: skip
    own = dict(model.named_parameters())
    state = _fused(problem.state, problem)
    assert state.keys() == own.keys(), sorted(state.keys() ^ own.keys())
    frozen = tuple(map(_own_name, problem.frozen))
    with torch.no_grad():
        for name, weight in state.items():
            own[name].copy_(weight)
            own[name].requires_grad_(not name.startswith(frozen or " "))
    return model


def shard(batch: Mapping[str, Tensor], problem: CaseProblem) -> Part:
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    whole = {
        "tokens": batch["input_ids"],
        "labels": labels.clamp(min=0),
        "loss_mask": (labels != IGNORE).float(),
        "position_ids": batch["position_ids"],
    }
    count = int((labels != IGNORE).sum())
    if problem.ranks > 1:
        whole = get_batch_on_this_cp_rank(whole, parallel_state.get_context_parallel_group())
    return {**whole, LABELS: count}


def _loss(model: nn.Module, part: Part, labels: LabelCount) -> Tensor:
    per_token = model(part["tokens"], part["position_ids"], None, labels=part["labels"])
    loss: Tensor = (per_token * part["loss_mask"]).sum() / labels
    return loss


def step(model: nn.Module, parts: Sequence[Part], problem: CaseProblem) -> Tensor:
    return step_of(_loss, model, parts, problem)


def gather(model: nn.Module, problem: CaseProblem) -> dict[str, Tensor]:
    own = {name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in model.named_parameters()}
    return {name: each for name, each in _parted(own, problem).items() if not name.startswith(problem.frozen or " ")}


def evaluate(model: nn.Module, part: Part, problem: CaseProblem) -> Tensor:
    return evaluation_of(_loss, model, part, problem)
