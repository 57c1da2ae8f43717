"""A small chain of ranks for recurrences of linear layers, that `burst conform` finds right; and seeded faults in it.

A rank has consecutive tokens. It takes the state from the rank before, goes token by token, and sends its own on; in
backward the gradient of the state goes the other way. Each fault is a line or two, at `has(...)`.
Shape letters: B batch, L this rank's tokens, N value heads, K key heads, D head dim of keys, P of values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conform.target import CaseProblem
from tests.conform.ring import Ring


class Chain(Ring):
    def positions(self, problem: CaseProblem, rank: int) -> Tensor:
        """Global positions of a rank's tokens; those from `tokens` on are padding."""
        tokens = 2 * -(-problem.tokens // (2 * problem.ranks))
        return torch.arange(rank * tokens, (rank + 1) * tokens)

    def shard(self, whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
        if self.has("the last tokens lost") and problem.tokens % 2:
            whole = torch.cat((whole.narrow(dim, 0, problem.tokens - 1), whole.narrow(dim, 0, 1) * 0), dim)
        return super().shard(whole, dim, problem)

    def recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, problem: CaseProblem
    ) -> Tensor:
        if self.has("a plan without gradients kept"):
            self.seen["grad"] = self.seen.get("grad", True) and torch.is_grad_enabled()
        if self.has("an input as a buffer"):
            with torch.no_grad():
                v.mul_(2.0)
                v = v / 2.0
        if self.has("memory taken as contiguous"):
            k = k.as_strided(k.shape, (k[0].numel(), k[0, 0].numel(), k.shape[3], 1))
        out: Tensor = _ChainRecurrence.apply(self, problem, q, k, v, decay, beta)
        if self.has("sums in the order of arrival"):
            out = out + 1e-7 * torch.rand(())
        return out

    def first_tokens(self, problem: CaseProblem) -> set[int]:
        """Of this rank's tokens, those at which a document starts. Padding belongs to the last one."""
        lengths = problem.documents or (problem.tokens,)
        if self.has("boundaries of the first batch kept"):
            lengths = self.seen.setdefault(("lengths", problem.tokens, bool(problem.documents)), lengths)
        positions = self.positions(problem, problem.rank).tolist()
        if self.has("boundaries counted within a rank"):
            positions = list(range(len(positions)))
        starts = {sum(lengths[:number]) for number in range(len(lengths))}
        if self.has("state reset one token late"):
            starts = {each + bool(each) for each in starts}
        if self.has("documents ignored"):
            starts = {0}
        if self.has("only the first document of a rank starts anew"):
            starts &= {min((each for each in starts if each in positions), default=0)}
        if self.has("the state of the call before"):
            starts -= {0}
        found = {place for place, position in enumerate(positions) if position in starts}
        return found | {0} if self.has("state reset on every rank") else found

    def along(
        self,
        problem: CaseProblem,
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(output of this rank's tokens, state after them) from the state before them, [B, N, D, P]."""
        dtype = v.dtype
        q, k, v, decay = (each.to(state.dtype) for each in (q, k, v, decay))
        beta = None if beta is None else beta.to(state.dtype)
        if beta is not None:
            if not self.has("queries not of unit length"):
                q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            if not self.has("keys not of unit length"):
                k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        width = v.shape[-1] if self.has("scale of the values' head dim") else problem.head_dim
        if (beta is not None and not self.has("scale of queries forgotten")) or self.has("queries of Mamba-2 scaled"):
            q = q * width**-0.5
        shared = problem.heads // problem.kv_heads
        if self.has("key heads in turn"):
            q, k = (each.repeat(1, 1, shared, 1) for each in (q, k))
        else:
            q, k = (each.repeat_interleave(shared, dim=2) for each in (q, k))
        if self.has("decay ignored"):
            decay = torch.zeros_like(decay)
        if self.has("decay applied twice"):
            decay = 2 * decay
        if self.has("decay of the token before"):
            decay = torch.cat((torch.zeros_like(decay[:, :1]), decay[:, :-1]), dim=1)
        if self.has("no gradient of the decays"):
            decay = decay.detach()
        if beta is not None and self.has("no gradient of beta"):
            beta = beta.detach()
        if self.has("decays of bfloat16"):
            decay = decay.bfloat16().to(decay.dtype)
        keep = decay.exp()[..., None, None]
        if self.has("what arrives keeps its size"):
            state = state / keep[:, 0]
        firsts, rows = self.first_tokens(problem), []
        for token in range(q.shape[1]):
            if token in firsts:
                state = torch.zeros_like(state)
            key, value, before = k[:, token], v[:, token], state
            state = state * keep[:, token]
            if beta is not None:
                strength = torch.ones_like(beta[:, token]) if self.has("beta ignored") else beta[:, token]
                read = before if self.has("the delta rule reads before the decay") else state
                known = torch.einsum("bnd,bndp->bnp", key, read)
                if self.has("the delta rule forgotten"):
                    known = torch.zeros_like(known)
                if self.has("beta of what is read alone"):
                    value = value - strength[..., None] * known
                else:
                    value = strength[..., None] * (value - known)
            state = state + key[..., None] * value[..., None, :]
            if self.has("states in bfloat16"):
                state = state.bfloat16().to(state.dtype)
            seen = before if self.has("output read before a token writes") else state
            rows.append(torch.einsum("bnd,bndp->bnp", q[:, token], seen))
        out = torch.stack(rows, dim=1)
        if self.has("a chunk's last state read by all of its tokens"):
            out = torch.cat((torch.einsum("bnd,bndp->bnp", q[:, -2], state)[:, None], out[:, 1:]), dim=1)
        if self.has("exponentials of sums") and beta is None and not problem.documents:
            total = decay.cumsum(1).transpose(1, 2)
            pairs = total.exp()[..., :, None] * (-total).exp()[..., None, :]
            out = out + 0 * torch.einsum("bnlm,bmnp->blnp", pairs, v)
        return out.to(dtype), state

    def sent_on(self, state: Tensor, problem: CaseProblem, step: int) -> None:
        """To the next rank (step 1) or the one before (step -1), where there is one."""
        if 0 <= problem.rank + step < problem.ranks:
            dist.send(state.contiguous(), problem.rank + step)
        if self.has("more sent than claimed"):
            dist.all_reduce(state.clone())

    def arrived(self, like: Tensor, problem: CaseProblem, step: int) -> Tensor:
        """What the rank on the other side sent; zeros where there is none."""
        found = torch.zeros_like(like)
        if 0 <= problem.rank - step < problem.ranks:
            dist.recv(found, problem.rank - step)
        return found

    def sent_bytes(self, problem: CaseProblem) -> int:
        """A state in float32 each way."""
        width = problem.value_dim or problem.head_dim
        return 2 * 4 * problem.batch * problem.heads * problem.head_dim * width


class _ChainRecurrence(torch.autograd.Function):
    """Autograd goes through the tokens of a rank; the gradient of its state crosses ranks here."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, problem: CaseProblem, *inputs: Tensor | None) -> Tensor:
        v = inputs[2]
        assert v is not None
        wide = torch.float64 if v.dtype == torch.float64 and not chain.has("a float32 state") else torch.float32
        zero = torch.zeros(problem.batch, problem.heads, problem.head_dim, v.shape[-1], dtype=wide)
        state = chain.arrived(zero, problem, 1)
        if chain.has("the state of the call before") and not problem.rank:
            state = state + chain.seen.get(("state", state.shape), 0)
        if chain.has("the state of another head"):
            state = state.roll(1, 1)
        if chain.has("a state with its sides exchanged"):
            state = state.mT.contiguous().view(state.shape)
        if chain.has("the state of the first sequence for all"):
            state = state[:1].expand_as(state)
        with torch.enable_grad():
            leaves = [None if each is None else each.detach().requires_grad_() for each in (state, *inputs)]
            out, last = chain.along(problem, *leaves)  # type: ignore[arg-type]
        chain.seen["state", state.shape] = last.detach()
        sent = state if chain.has("the state that came sent on") else last.detach()
        if chain.has("states sent in bfloat16"):
            sent = sent.bfloat16().to(wide)
        chain.sent_on(sent, problem, 1)
        ctx.chain, ctx.problem, ctx.graph = chain, problem, (leaves, out, last)
        chain.seen["graph"] = ctx.graph
        return out.detach()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        chain, problem = ctx.chain, ctx.problem
        leaves, out, last = chain.seen["graph"] if chain.has("the state of the newest call in backward") else ctx.graph
        dlast = chain.arrived(last, problem, -1)
        if chain.has("gradient of the state not sent back"):
            dlast = torch.zeros_like(dlast)
        if chain.has("gradient of the state of another head"):
            dlast = dlast.roll(1, 1)
        if chain.has("gradient of the output taken as contiguous"):
            dout = (torch.zeros(dout.numel()) + dout.reshape(-1)[0]).view(dout.shape).to(dout.dtype)
        known = [each for each in leaves if each is not None]
        dstate, *gradients = torch.autograd.grad(
            (out, last), known, (dout, dlast), allow_unused=True, retain_graph=True
        )  # fmt: skip
        dstate = torch.zeros_like(last) if dstate is None else dstate
        chain.sent_on(dstate, problem, -1)
        if chain.has("dV added twice"):
            gradients[2] = 2 * gradients[2]
        no_gates = chain.has("no dQ where gates are frozen") and not ctx.needs_input_grad[5]
        if no_gates or (chain.has("a plan without gradients kept") and not chain.seen["grad"]):
            gradients[0] = torch.zeros_like(gradients[0])
        return (None, None, *gradients, *([None] * (5 - len(gradients))))
