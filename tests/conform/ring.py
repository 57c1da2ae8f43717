"""A small ring of attention, and a Llama on it, that `burst conform` finds right; and seeded faults that it finds.

Shards are in zigzag layout and gloo connects the ranks. K and V go round the ring, and the attention of a pair of
shards is dense. A seeded fault is the line or two below a `has(...)`.
Shape letters: B batch, S whole sequence, L this rank's tokens, M tokens of a chunk, N heads, K KV heads, D head dim.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear, pad, silu
from torch.utils.checkpoint import checkpoint

from conform.target import IGNORE, CaseProblem


class Ring:
    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.seen: dict[Any, Any] = {}  # what faults remember between calls

    def has(self, fault: str) -> bool:
        return fault == self.fault

    # Layout

    def positions(self, problem: CaseProblem, rank: int) -> Tensor:
        """Global positions of a rank's tokens, in its order; those from `tokens` on are padding."""
        chunk = -(-problem.tokens // (2 * problem.ranks))
        first, last = rank * chunk, (2 * problem.ranks - 1 - rank) * chunk
        found = torch.cat((torch.arange(first, first + chunk), torch.arange(last, last + chunk)))
        return found

    def mask_positions(self, problem: CaseProblem, rank: int) -> Tensor:
        """Positions as the mask takes them."""
        found = self.positions(problem, rank)
        if self.has("positions off by one on the last rank") and rank == problem.ranks - 1:
            found = found + 1
        if self.has("positions as in a contiguous layout"):
            found = torch.arange(len(found)) + rank * len(found)
        return found

    def shard(self, whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
        total = 2 * problem.ranks * -(-problem.tokens // (2 * problem.ranks))
        kept = problem.tokens
        if self.has("the length rounded down to what ranks divide"):
            kept -= problem.tokens % (2 * problem.ranks)
        whole = whole.narrow(dim, 0, kept)
        shape = list(whole.shape)
        shape[dim] = total - kept
        whole = torch.cat((whole, whole.new_zeros(shape)), dim)
        return whole.index_select(dim, self.positions(problem, problem.rank))

    def gather(self, part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
        parts = [torch.empty_like(part.contiguous()) for _ in range(problem.ranks)]
        dist.all_gather(parts, part.contiguous())
        order = torch.cat([self.positions(problem, rank) for rank in range(problem.ranks)])
        whole = torch.cat(parts, dim)
        if not self.has("gather in the order of ranks"):
            whole = torch.empty_like(whole).index_copy_(dim, order, whole)
        if self.has("the result of gather differs on the last rank") and problem.rank == problem.ranks - 1:
            whole = whole.roll(1, dim)
        return whole.narrow(dim, 0, problem.tokens)

    # Attention

    def visible(self, problem: CaseProblem, q_at: int, k_at: int) -> Tensor:
        """L x M: what tokens of one rank see of another's."""
        q_L, k_M = (self.mask_positions(problem, rank) for rank in (q_at, k_at))
        lengths = problem.documents or (problem.tokens,)
        if self.has("boundaries of the first batch kept"):
            lengths = self.seen.setdefault(("lengths", problem.tokens, bool(problem.documents)), lengths)
        if self.has("documents ignored"):
            lengths = (problem.tokens,)
        if self.has("the last document joined to the one before") and len(lengths) > 1:
            lengths = (*lengths[:-2], lengths[-2] + lengths[-1])
        ends = torch.tensor((*lengths, 1 << 40)).cumsum(0)
        right = not self.has("document boundary off by one")
        doc_q, doc_k = (torch.searchsorted(ends, each, right=right) for each in (q_L, k_M))
        if self.has("boundaries counted within a rank"):
            doc_q, doc_k = (torch.searchsorted(ends, torch.arange(len(each)), right=True) for each in (q_L, k_M))
        apart = q_L[:, None] - k_M[None, :]
        if self.has("padding seen"):
            doc_q, doc_k = (each.clamp(max=len(lengths) - 1) for each in (doc_q, doc_k))
        seen = doc_q[:, None] == doc_k[None, :]
        causal = problem.mask == "causal"
        if self.has("full is causal"):
            causal = True
        if self.has("documents are causal in any case") and problem.documents:
            causal = True
        if self.has("causal mask forgotten"):
            causal = False
        if self.has("causal mask of other ranks by rank"):  # as in a contiguous layout
            return seen & (apart >= 0) if q_at == k_at else seen & torch.full_like(seen, q_at > k_at)
        if causal:
            least = 0
            if self.has("a query sees the next token"):
                least = -1
            if self.has("a query does not see itself"):
                least = 1
            seen = seen & (apart >= least)
        window = problem.window
        if self.has("window ignored") or (self.has("window ignored for other ranks") and q_at != k_at):
            window = None
        if window is not None:
            if self.has("window counts the token itself"):
                window -= 1
            if self.has("window one too wide"):
                window += 1
            if self.has("window in local positions"):
                apart = torch.arange(len(q_L))[:, None] - torch.arange(len(k_M))[None, :]
            seen = seen & (apart <= window)
        return seen

    def heads(self, k_BMKD: Tensor, problem: CaseProblem) -> Tensor:
        """KV heads as query heads."""
        group = problem.heads // problem.kv_heads
        if self.has("KV heads in turn"):
            return k_BMKD.repeat(1, 1, group, 1)
        return k_BMKD.repeat_interleave(group, dim=2)

    def scale(self, problem: CaseProblem) -> float:
        width = problem.head_dim
        if self.has("the scale of V's head dim"):
            width = problem.value_dim or width
        if self.has("scale of a padded head_dim"):
            width = 1 << (width - 1).bit_length()
        if problem.scale is None or self.has("scale ignored"):
            return float(width**-0.5)
        return problem.scale

    def scores(self, q: Tensor, k: Tensor, seen: Tensor, problem: CaseProblem) -> tuple[Tensor, Tensor | None]:
        """(masked scores [B, N, L, M], derivative of soft-capping)."""
        raw = torch.einsum("blnd,bmnd->bnlm", q, k) * self.scale(problem)
        slope = None
        if problem.softcap is not None and not self.has("softcap ignored"):
            bent = torch.tanh(raw / problem.softcap)
            raw, slope = problem.softcap * bent, 1 - bent.square()
        hidden = -20.0 if self.has("hidden keys lose 20 instead of all") else -torch.inf
        if hidden == -20.0:
            return torch.where(seen, raw, raw + hidden), slope
        return raw.masked_fill(~seen, hidden), slope

    def attention(self, q: Tensor, k: Tensor, v: Tensor, problem: CaseProblem) -> Tensor:
        if self.has("one rank raises") and problem.rank == 1:
            raise RuntimeError("no memory left")
        if self.has("one rank dies") and problem.rank == 1:
            os._exit(7)
        if self.has("one rank never answers") and problem.rank == 1:
            time.sleep(3600)
        if self.has("a plan without gradients kept"):
            self.seen["grad"] = self.seen.get("grad", True) and torch.is_grad_enabled()
        if self.has("an input as a buffer"):
            with torch.no_grad():
                q.mul_(2.0)
                q = q / 2.0
        if self.has("memory taken as contiguous"):
            k = k.as_strided(k.shape, (k[0].numel(), k[0, 0].numel(), k.shape[3], 1))
        if self.has("keys of the first sequence for all"):
            k = k[:1].expand_as(k)
        out: Tensor = _RingAttention.apply(q, k, v, problem.sinks_N, self, problem)
        if self.has("sums in the order of arrival"):
            out = out + 1e-7 * torch.rand(())
        return out

    def send_on(self, tensors: Sequence[Tensor], problem: CaseProblem) -> list[Tensor]:
        """To the next rank; returns those of the rank before."""
        if problem.ranks == 1:
            return list(tensors)
        to, source = (problem.rank + 1) % problem.ranks, (problem.rank - 1) % problem.ranks
        given = [each.contiguous() for each in tensors]
        received = [torch.empty_like(each) for each in given]
        if self.has("partial gradients sent in bfloat16"):
            given = [each.bfloat16().to(each.dtype) for each in given]
        work = [dist.P2POp(dist.isend, each, to) for each in given]
        work += [dist.P2POp(dist.irecv, each, source) for each in received]
        for each in dist.batch_isend_irecv(work):
            each.wait()
        if self.has("more sent than claimed"):
            dist.all_reduce(given[0].clone())
        return received

    def sent_bytes(self, problem: CaseProblem) -> int:
        """K and V once around but for the last step, then K, V, dK and dV all around, in float32."""
        tokens = 2 * -(-problem.tokens // (2 * problem.ranks))
        width = problem.head_dim + (problem.value_dim or problem.head_dim)
        chunk = 4 * problem.batch * tokens * problem.kv_heads * width
        return (problem.ranks - 1) * chunk + 2 * problem.ranks * chunk

    # Training

    def make_model(self, problem: CaseProblem) -> dict[str, Tensor]:
        model = {
            name: each.detach().clone().requires_grad_(not name.startswith(problem.frozen or " "))
            for name, each in problem.state.items()
        }
        self.seen["model"] = model
        return model

    def shard_batch(self, batch: Mapping[str, Tensor], problem: CaseProblem) -> dict[str, Any]:
        tokens = batch["input_ids"].shape[1]
        asked = replace(problem, tokens=tokens, documents=())
        labels = batch["labels"]
        if not self.has("labels shifted after the cut"):
            labels = pad(labels[:, 1:], (0, 1), value=IGNORE)
        if self.has("labels shifted twice"):
            labels = pad(labels[:, 1:], (0, 1), value=IGNORE)
        if self.has("labels not shifted"):
            labels = batch["labels"]
        if self.has("ignored labels learnt"):
            following = pad(batch["input_ids"][:, 1:], (0, 1), value=IGNORE)
            labels = following
        positions = batch["position_ids"]
        rows = []
        for row in range(len(positions)):
            lengths = [problem.documents] if problem.documents and tokens == problem.tokens else [(tokens,)]
            if problem.padding:
                left, right = problem.padding[row]
                if self.has("padding on the left seen"):
                    left = 0
                lengths = [tuple(each for each in (left, tokens - left - right, right) if each)]
            rows += lengths
        if self.has("documents lost in training"):
            rows = [(tokens,)] * len(rows)
        part = {
            name: self.shard(each + add, 1, asked) - add
            for name, each, add in (("input_ids", batch["input_ids"], 0), ("labels", labels, -IGNORE))
        }
        part["position_ids"] = self.shard(positions, 1, asked)
        if self.has("labels shifted after the cut"):
            part["labels"] = pad(part["labels"][:, 1:], (0, 1), value=IGNORE)
        if self.has("positions counted per rank"):
            part["position_ids"] = torch.arange(part["input_ids"].shape[1]).expand_as(part["input_ids"])
        if self.has("last label of a rank lost"):
            part["labels"][:, -1] = IGNORE
        return {**part, "rows": rows, "tokens": tokens, "real": int(batch["input_ids"].numel())}

    def loss_sum(self, model: Mapping[str, Tensor], part: Mapping[str, Any], problem: CaseProblem) -> Tensor:
        if self.has("weights of the newest model"):
            model = self.seen["model"]
        asked = replace(problem, tokens=part["tokens"], documents=())
        if self.has("window lost in training"):
            asked = replace(asked, window=None)
        hidden = embedding(part["input_ids"], model["model.embed_tokens.weight"])
        if self.has("no gradient of the last token"):
            hidden = torch.cat((hidden[:, :-1], hidden[:, -1:].detach()), dim=1)
        for layer in range(problem.layers):
            start = f"model.layers.{layer}."
            own = {name.removeprefix(start): each for name, each in model.items() if name.startswith(start)}
            if problem.checkpointing:
                calls = [0]
                hidden = checkpoint(self.layer, own, hidden, part, asked, calls, use_reentrant=False)
            else:
                hidden = self.layer(own, hidden, part, asked, [0])
        hidden = _norm(hidden, model["model.norm.weight"], problem.norm_eps)
        head = model["model.embed_tokens.weight" if problem.tied else "lm_head.weight"]
        if self.has("gradient of a tied head lost") and problem.tied:
            head = head.detach()
        logits = linear(hidden, head)
        return cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), ignore_index=IGNORE, reduction="sum")

    def layer(
        self, own: Mapping[str, Tensor], hidden: Tensor, part: Mapping[str, Any], asked: CaseProblem, calls: list[int]
    ) -> Tensor:
        calls[0] += 1
        x = _norm(hidden, own["input_layernorm.weight"], asked.norm_eps)
        q, k, v = (
            linear(x, own[f"self_attn.{name}_proj.weight"]).unflatten(2, (heads, asked.head_dim))
            for name, heads in (("q", asked.heads), ("k", asked.kv_heads), ("v", asked.kv_heads))
        )
        q, k = (_rotated(each, part["position_ids"], asked) for each in (q, k))
        rows = []
        for row, lengths in enumerate(part["rows"]):
            if self.has("documents lost in recomputation") and calls[0] > 1:
                lengths = (asked.tokens,)
            of_row = replace(asked, documents=lengths, batch=1)
            rows.append(self.attention(q[row : row + 1], k[row : row + 1], v[row : row + 1], of_row))
        hidden = hidden + linear(torch.cat(rows).flatten(2), own["self_attn.o_proj.weight"])
        x = _norm(hidden, own["post_attention_layernorm.weight"], asked.norm_eps)
        gate, up = (linear(x, own[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return hidden + linear(silu(gate) * up, own["mlp.down_proj.weight"])

    def count(self, parts: Sequence[Mapping[str, Any]]) -> Tensor:
        labels = torch.tensor(float(sum(int((part["labels"] != IGNORE).sum()) for part in parts)))
        if self.has("labels of this rank counted"):
            return labels
        if self.has("ignored labels counted"):
            return torch.tensor(float(sum(part["real"] for part in parts)))
        dist.all_reduce(labels)
        return labels

    def step(self, model: dict[str, Tensor], parts: Sequence[Mapping[str, Any]], problem: CaseProblem) -> Tensor:
        if not self.has("gradients of the step before kept"):
            for each in model.values():
                each.grad = None
        total = torch.zeros((), dtype=problem.torch_dtype)
        for part in parts:
            labels = self.count(parts)
            if self.has("mean of the means of micro-batches"):
                labels = self.count([part]) * len(parts)
            if self.has("mean of the means of ranks"):
                mine = torch.tensor(float((part["labels"] != IGNORE).sum()))
                labels = mine.clamp(min=1) * problem.ranks
            if self.has("gradients of the last micro-batch alone"):
                for each in model.values():
                    each.grad = None
            loss = self.loss_sum(model, part, problem) / labels
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        if self.has("loss averaged over ranks"):
            total /= problem.ranks
        if self.has("loss of each rank counted again"):
            dist.all_reduce(total)
        for name, each in model.items():
            if each.grad is None:
                continue
            if self.has("gradients of a rank not added up"):
                continue
            if self.has("gradients of norms not added up") and "norm" in name:
                continue
            dist.all_reduce(each.grad)
            if self.has("gradients averaged over ranks"):
                each.grad /= problem.ranks
        return total

    def gather_gradients(self, model: Mapping[str, Tensor], problem: CaseProblem) -> dict[str, Tensor]:
        found = {name: each.grad for name, each in model.items() if each.grad is not None}
        if self.has("a parameter left out of gather"):
            found.pop("model.norm.weight")
        return found

    @torch.no_grad()
    def evaluate(self, model: dict[str, Tensor], part: Mapping[str, Any], problem: CaseProblem) -> Tensor:
        loss = self.loss_sum(model, part, problem)
        dist.all_reduce(loss)
        labels = self.count([part])
        if self.has("evaluation counts labels of a rank"):
            labels = torch.tensor(float((part["labels"] != IGNORE).sum())).clamp(min=1)
        if self.has("evaluation times the ranks"):
            loss = loss * problem.ranks
        return loss / labels


class _RingAttention(torch.autograd.Function):
    """Forward and backward of attention over the ring, in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring, problem: CaseProblem
    ) -> Tensor:
        wide = torch.float64 if q.dtype == torch.float64 and not ring.has("a float32 buffer") else torch.float32
        q_w, k_w, v_w = (each.detach().to(wide) for each in (q, k, v))
        out = q_w.new_zeros((*q.shape[:3], v.shape[3]))
        lse = q_w.new_full((q.shape[0], problem.heads, q.shape[1]), -torch.inf)
        steps = problem.ranks
        if ring.has("a tile dropped on the last rank") and problem.rank == problem.ranks - 1:
            steps -= 1
        chunk_k, chunk_v = k_w, v_w
        for step in range(problem.ranks):
            owner = (problem.rank - step) % problem.ranks
            if step < steps:
                seen = ring.visible(problem, problem.rank, owner)
                scores, _ = ring.scores(q_w, ring.heads(chunk_k, problem), seen, problem)
                if sinks is not None and ring.has("sinks at every step of the ring"):
                    lse = torch.logaddexp(lse, sinks.to(wide)[None, :, None].expand_as(lse)) if step else lse
                part_lse = scores.logsumexp(dim=-1)
                p = (scores - part_lse[..., None]).exp()
                if not ring.has("NaN where a row sees nothing"):
                    p = p.nan_to_num(nan=0.0)
                part = torch.einsum("bnlm,bmnd->blnd", p, ring.heads(chunk_v, problem))
                new = torch.logaddexp(lse, part_lse)
                shares = ((each - new).exp().nan_to_num(nan=0.0) for each in (lse, part_lse))
                before, now = (each.transpose(1, 2)[..., None] for each in shares)
                if ring.has("outputs merged without their weights") and step:
                    before, now = torch.full_like(before, 0.5), torch.full_like(now, 0.5)
                out, lse = out * before + part * now, new
                if ring.has("partial outputs in bfloat16"):
                    out = out.bfloat16().to(wide)
            if ring.has("V sent in the shape of K"):
                sent_v = pad(chunk_v, (0, k.shape[3] - v.shape[3])).flatten()
                chunk_v = sent_v[: chunk_v.numel()].view_as(chunk_v)
            if step < problem.ranks - 1:
                chunk_k, chunk_v = ring.send_on((chunk_k, chunk_v), problem)
        if sinks is not None and not ring.has("sinks dropped"):
            bent = sinks.to(wide)
            if ring.has("sinks of the next head"):
                bent = bent.roll(1)
            whole = torch.logaddexp(lse, bent[None, :, None].expand_as(lse))
            out, lse = out * (lse - whole).exp().transpose(1, 2)[..., None], whole
        if ring.has("keys and values kept globally"):
            ring.seen["kv"] = (k_w, v_w)
        ctx.save_for_backward(q_w, k_w, v_w, out, lse, sinks)
        ctx.ring, ctx.problem, ctx.dtype = ring, problem, q.dtype
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        ring, problem = ctx.ring, ctx.problem
        if ring.has("gradient of the output taken as contiguous"):
            storage = torch.zeros(dout.numel()) + dout.reshape(-1)[0]
            dout = storage.view(dout.shape).to(dout.dtype)
        if ring.has("keys and values kept globally"):
            k, v = ring.seen["kv"]
        dout = dout.to(q.dtype)
        delta = (dout * out).sum(-1).transpose(1, 2)  # B N L
        if ring.has("delta forgotten"):
            delta = torch.zeros_like(delta)
        if ring.has("delta in bfloat16"):
            delta = delta.bfloat16().to(q.dtype)
        dq = torch.zeros_like(q)
        chunk_k, chunk_v, dk, dv = k, v, torch.zeros_like(k), torch.zeros_like(v)
        group = problem.heads // problem.kv_heads
        for step in range(problem.ranks):
            owner = (problem.rank - step) % problem.ranks
            own_k, own_v = (k, v) if ring.has("stale K and V in backward") else (chunk_k, chunk_v)
            wide_k, wide_v = ring.heads(own_k, problem), ring.heads(own_v, problem)
            scores, slope = ring.scores(q, wide_k, ring.visible(problem, problem.rank, owner), problem)
            p = (scores - lse[..., None]).exp().nan_to_num(nan=0.0)
            dp = torch.einsum("blnd,bmnd->bnlm", dout, wide_v)
            ds = p * (dp - delta[..., None])
            if slope is not None and not ring.has("derivative without that of tanh"):
                ds = ds * slope
            ds = ds * ring.scale(problem)
            if not (ring.has("a tile dropped in backward") and step == problem.ranks - 1):
                dq += torch.einsum("bnlm,bmnd->blnd", ds, wide_k)
            dk_step, dv_step = torch.einsum("bnlm,blnd->bmnd", ds, q), torch.einsum("bnlm,blnd->bmnd", p, dout)
            if ring.has("dK of one query head of a group"):
                dk_step = dk_step.unflatten(2, (problem.kv_heads, group))[:, :, :, :1].flatten(2, 3)
                dk += dk_step
            elif ring.has("KV heads in turn"):
                dk += dk_step.unflatten(2, (group, problem.kv_heads)).sum(2)
            else:
                dk += dk_step.unflatten(2, (problem.kv_heads, group)).sum(3)
            dv += dv_step.unflatten(2, (problem.kv_heads, group)).sum(3)
            if ring.has("dK and dV stay where they are formed"):
                chunk_k, chunk_v = ring.send_on((chunk_k, chunk_v), problem)
            elif ring.has("dK and dV one rank too early") and step == problem.ranks - 1:
                pass
            else:
                chunk_k, chunk_v, dk, dv = ring.send_on((chunk_k, chunk_v, dk, dv), problem)
        if ring.has("dK scaled by 1.02"):
            dk *= 1.02
        if ring.has("dQ without the scale"):
            dq /= ring.scale(problem)
        if ring.has("dV added twice"):
            dv *= 2
        if ring.has("a plan without gradients kept") and not ring.seen["grad"]:
            dq = torch.zeros_like(dq)
        if ring.has("no dQ where keys are frozen") and not ctx.needs_input_grad[1]:
            dq = torch.zeros_like(dq)
        dsinks = None
        if sinks is not None:
            p_sink = (sinks[None, :, None].to(q.dtype) - lse).exp()
            dsinks = -(p_sink * (dout * out).sum(-1).transpose(1, 2)).sum((0, 2)).to(sinks.dtype)
            if ring.has("no gradient of the sinks"):
                dsinks = None
            if ring.has("gradient of the sinks on rank 0 alone") and problem.rank:
                dsinks = torch.zeros_like(sinks)
        return (*(each.to(ctx.dtype) for each in (dq, dk, dv)), dsinks, None, None)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _rotated(x: Tensor, positions_BL: Tensor, problem: CaseProblem) -> Tensor:
    half = problem.head_dim // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    angles = (positions_BL[..., None].double() * problem.rope_theta**-exponents)[:, :, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
