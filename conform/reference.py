"""The truth: dense attention, recurrences token by token, and a small Llama in plain torch, on one process.

In float64 they are what every target is compared with; in a target's dtype they show the error that the dtype itself
makes. None uses a model, a kernel or a layout of this project: only dense attention of `engine.attention.reference` and
`engine.linear.reference`.

Shape letters: B batch, S whole sequence, N query or value heads, K KV or key heads, D head dim, P head dim of values,
E embedding, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear, pad, silu

from conform.target import IGNORE, CaseProblem
from engine.attention.masks import Documents, Mask
from engine.attention.reference import dense_attention
from engine.linear.reference import recurrence


def mask_of(problem: CaseProblem) -> Mask:
    """What each token of a sequence sees."""
    lengths = problem.documents or (problem.tokens,)
    return Documents(lengths, causal=problem.mask == "causal", left=problem.window)


# Attention and recurrences


def inputs_of(problem: CaseProblem) -> tuple[str, ...]:
    """The tensors that are divided among ranks, in the order in which a target takes them."""
    gates = {"gated_delta_net": ("decay", "beta"), "mamba2": ("decay",)}
    return ("q", "k", "v", *gates.get(problem.recurrence, ()))


def call_tensors(problem: CaseProblem, calls: int = 1) -> list[dict[str, Tensor]]:
    """For each call q [B, S, N, D], k [B, S, K, D], v [B, S, K, P], the gradient of the output `dout` [B, S, N, P], and
    `sinks` [N] where there are any: the same for a seed, rounded to the problem's dtype. Of a recurrence q has K heads
    and v has N; `decay` and `beta` [B, S, N] are in float32 at least, as every system has them."""
    chance = torch.Generator().manual_seed(problem.seed)
    size, width = (problem.batch, problem.tokens), problem.value_dim or problem.head_dim
    few, many = (problem.kv_heads, problem.head_dim), (problem.heads, problem.head_dim)
    values = (problem.heads if problem.recurrence else problem.kv_heads, width)
    of_token = {"q": few if problem.recurrence else many, "k": few, "v": values, "dout": (problem.heads, width)}
    shapes = {name: (*size, *shape) for name, shape in of_token.items()}

    def drawn(shape: Sequence[int], factor: float) -> Tensor:
        values = torch.randn(shape, generator=chance, dtype=torch.float64) * factor
        return values.to(problem.device, problem.torch_dtype)

    found = []
    for _ in range(calls):
        # Larger queries: scores that differ show a wrong mask or position at once.
        tensors = {name: drawn(shape, 2.0 if name == "q" else 1.0) for name, shape in shapes.items()}
        if problem.sinks:
            tensors["sinks"] = drawn((problem.heads,), 1.0)
        for name in inputs_of(problem)[3:]:
            share = torch.rand((*size, problem.heads), generator=chance, dtype=torch.float64)
            gate = share if name == "beta" else -problem.decay * share
            tensors[name] = gate.to(problem.device, _wide(problem.torch_dtype))
        found.append(tensors)
    return found


def call_truth(
    problem: CaseProblem, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """out and the gradient of every input, dq, dk and so on, in `dtype`; those of frozen inputs are left out. Gradients
    of gates are [B, S, N, 1]."""
    leaves = {name: each.detach().to(dtype) for name, each in tensors.items() if name != "dout"}
    for name in inputs_of(problem)[3:]:
        leaves[name] = tensors[name].detach().to(_wide(dtype))
    learnt = {name: each.requires_grad_() for name, each in leaves.items() if name not in problem.frozen}
    if problem.recurrence:
        gates = leaves["decay"], leaves.get("beta")
        out = recurrence(leaves["q"], leaves["k"], leaves["v"], *gates, problem.documents)
    else:
        out, _ = dense_attention(
            leaves["q"], leaves["k"], leaves["v"], mask_of(problem), problem.scale,
            softcap=problem.softcap, sinks_N=leaves.get("sinks"),
        )  # fmt: skip
    gradients = torch.autograd.grad(out, list(learnt.values()), tensors["dout"].to(dtype))
    whole = {f"d{name}": each for name, each in zip(learnt, gradients, strict=True)}
    return {"out": out.detach()} | {name: with_rows(each) for name, each in whole.items()}


def with_rows(tensor: Tensor) -> Tensor:
    """A gate's gradient [B, S, N] as a row of one number for each token and head; others as they are."""
    return tensor[..., None] if tensor.ndim == 3 else tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Of gates and states."""
    return torch.promote_types(dtype, torch.float32)


# Training


def weights(problem: CaseProblem) -> dict[str, Tensor]:
    """Whole weights in float64, by the names of Llama in transformers, rounded to the problem's dtype. They are larger
    than weights before training: attention that looks at the wrong tokens then changes the loss."""
    chance = torch.Generator().manual_seed(problem.seed)
    heads, keys = problem.heads * problem.head_dim, problem.kv_heads * problem.head_dim
    hidden, ffn = problem.hidden, problem.ffn
    of_layer = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (problem.vocab, hidden)}
    for layer in range(problem.layers):
        start = f"model.layers.{layer}"
        shapes |= {f"{start}.{name}.weight": shape for name, shape in of_layer.items()}
        shapes |= {f"{start}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes["model.norm.weight"] = (hidden,)
    if not problem.tied:
        shapes["lm_head.weight"] = (problem.vocab, hidden)
    found = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=chance, dtype=torch.float64)
        values = values * shape[-1] ** -0.5 if len(shape) > 1 else 1 + values / 8
        found[name] = values.to(problem.torch_dtype).double()
    return found


def batches(problem: CaseProblem) -> list[dict[str, Tensor]]:
    """The micro-batches of a step, whole, as the contract says. Tokens of a sequence do not repeat where the vocabulary
    has enough, so that a row of the embedding's gradient belongs to one token."""
    chance = torch.Generator().manual_seed(problem.seed + 1)
    found = []
    for tokens in problem.micro_batches or (problem.tokens,):
        count = problem.batch * tokens
        drawn = torch.cat([torch.randperm(problem.vocab, generator=chance) for _ in range(-(-count // problem.vocab))])
        tokens_BS = drawn[:count].view(problem.batch, tokens)
        lengths = problem.documents if tokens == problem.tokens and problem.documents else (tokens,)
        positions_S = torch.cat([torch.arange(length) for length in lengths])
        labels_BS = tokens_BS.masked_fill(positions_S == 0, IGNORE)  # nothing foretells the first of a document
        place_S = torch.arange(tokens)
        hidden_S = place_S < problem.unlabelled
        if problem.every:
            hidden_S |= place_S % problem.every == 0
        labels_BS = labels_BS.masked_fill(hidden_S, IGNORE)
        batch = {"input_ids": tokens_BS, "labels": labels_BS, "position_ids": positions_S.expand_as(tokens_BS)}
        if problem.padding:
            left_B1, right_B1 = torch.tensor(problem.padding)[:, None].unbind(-1)
            real_BS = (place_S >= left_B1) & (place_S < tokens - right_B1)
            batch["attention_mask"] = real_BS.long()
            batch["labels"] = labels_BS.masked_fill(~real_BS | (place_S == left_B1), IGNORE)
            batch["position_ids"] = torch.where(real_BS, place_S - left_B1, 0)
        found.append({name: each.contiguous().to(problem.device) for name, each in batch.items()})
    return found


def training_truth(
    problem: CaseProblem,
    state: Mapping[str, Tensor],
    steps: Sequence[Mapping[str, Tensor]],
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """`loss`, and the gradient of each parameter that is not frozen, of one step over these micro-batches.

    Under autocast the parameters are in float32; in any dtype but float64 products are then in bfloat16.
    """
    leaves = {name: each.detach().to(problem.device, dtype) for name, each in state.items()}
    learnt = {
        name: each.requires_grad_() for name, each in leaves.items() if not name.startswith(problem.frozen or " ")
    }
    labels = sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in steps)
    with torch.autocast(problem.device, torch.bfloat16, enabled=problem.autocast and dtype != torch.float64):
        loss = torch.stack([_loss_sum(problem, leaves, batch) for batch in steps]).sum() / labels
    gradients = torch.autograd.grad(loss, list(learnt.values()), allow_unused=True)
    whole = {
        name: torch.zeros_like(leaf) if each is None else each
        for (name, leaf), each in zip(learnt.items(), gradients, strict=True)
    }
    return {"loss": loss.detach()} | whole


def _loss_sum(problem: CaseProblem, state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Sum of the losses of a batch's labels."""
    tokens_BS, labels_BS = batch["input_ids"], batch["labels"]
    hidden_BSE = embedding(tokens_BS, state["model.embed_tokens.weight"])
    cos_BSD, sin_BSD = _rotation(problem, batch["position_ids"], hidden_BSE.dtype)
    masks = _masks(problem, batch)
    for layer in range(problem.layers):
        part = {name.split(f"layers.{layer}.")[1]: each for name, each in state.items() if f"layers.{layer}." in name}
        hidden_BSE = _layer(problem, part, hidden_BSE, cos_BSD, sin_BSD, masks)
    hidden_BSE = _norm(hidden_BSE, state["model.norm.weight"], problem.norm_eps)
    head_VE = state["model.embed_tokens.weight" if problem.tied else "lm_head.weight"]
    logits_BSV = linear(hidden_BSE, head_VE)
    logits_BSV = logits_BSV if logits_BSV.dtype == torch.float64 else logits_BSV.float()
    next_BS = pad(labels_BS[:, 1:], (0, 1), value=IGNORE)
    return cross_entropy(logits_BSV.flatten(0, 1), next_BS.flatten(), ignore_index=IGNORE, reduction="sum")


def _masks(problem: CaseProblem, batch: Mapping[str, Tensor]) -> list[Mask]:
    """What the tokens of each row see. Padding is documents of its own."""
    tokens = batch["input_ids"].shape[1]
    if not problem.padding:
        same = problem if tokens == problem.tokens else replace(problem, tokens=tokens, documents=())
        return [mask_of(same)] * len(batch["input_ids"])
    return [
        Documents([length for length in (left, tokens - left - right, right) if length], left=problem.window)
        for left, right in problem.padding
    ]


def _layer(
    problem: CaseProblem,
    state: Mapping[str, Tensor],
    hidden_BSE: Tensor,
    cos_BSD: Tensor,
    sin_BSD: Tensor,
    masks: Sequence[Mask],
) -> Tensor:
    x_BSE = _norm(hidden_BSE, state["input_layernorm.weight"], problem.norm_eps)
    q_BSND, k_BSKD, v_BSKD = (
        linear(x_BSE, state[f"self_attn.{name}_proj.weight"]).unflatten(2, (heads, problem.head_dim))
        for name, heads in (("q", problem.heads), ("k", problem.kv_heads), ("v", problem.kv_heads))
    )
    q_BSND, k_BSKD = (_rotated(each, cos_BSD, sin_BSD).to(v_BSKD.dtype) for each in (q_BSND, k_BSKD))
    rows = [
        dense_attention(q_BSND[[row]], k_BSKD[[row]], v_BSKD[[row]], mask, problem.scale)[0]
        for row, mask in enumerate(masks)
    ]
    hidden_BSE = hidden_BSE + linear(torch.cat(rows).flatten(2), state["self_attn.o_proj.weight"])
    x_BSE = _norm(hidden_BSE, state["post_attention_layernorm.weight"], problem.norm_eps)
    gate_BSF, up_BSF = (linear(x_BSE, state[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return hidden_BSE + linear(silu(gate_BSF) * up_BSF, state["mlp.down_proj.weight"])


def _norm(x_BSE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Root mean square norm, formed in float32 at least."""
    wide = x_BSE if x_BSE.dtype == torch.float64 else x_BSE.float()
    return weight_E * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x_BSE.dtype)


def _rotation(problem: CaseProblem, positions_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary embedding, [B, S, D]; the two halves of a head rotate together."""
    exponents = torch.arange(0, problem.head_dim, 2, dtype=torch.float64, device=positions_BS.device) / problem.head_dim
    angles_BSD = (positions_BS[..., None].double() * problem.rope_theta**-exponents).repeat(1, 1, 2)
    return angles_BSD.cos().to(dtype), angles_BSD.sin().to(dtype)


def _rotated(x_BSND: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    first, second = x_BSND.chunk(2, dim=-1)
    return x_BSND * cos_BSD[:, :, None] + torch.cat((-second, first), dim=-1) * sin_BSD[:, :, None]
