"""The ring of torch's context parallelism as an attention of the engine's model.

torch's functions take tensors [B, heads, tokens, D] and an operator for one pair of chunks; the operator is the
engine's kernel, so that methods differ in what they send and when alone. Shape letters as in `engine.attention.op`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.attention.accumulate.accumulators import row_dot
from engine.attention.algorithms.saved import SavedOutput, save_suffix
from engine.attention.comm_volume import SentBytes
from engine.attention.context import ContextParallel
from engine.attention.geometry.tiles import CAUSAL, FULL
from engine.attention.kernels import BackwardInputs, Kernel, KernelProblem, choose_kernel
from engine.attention.op import laid_out
from engine.ops.autograd import accumulation_dtype, outside_autocast, refuse_second_derivative
from engine.settings import TrialSettings

_TOKEN_DIM = 2  # of tensors as torch's functions take them


class TorchRing:
    """An `AttentionFn` of several ranks. Raises ValueError where this torch has no such functions."""

    def __init__(self, cp: ContextParallel, settings: TrialSettings) -> None:
        try:
            from torch.distributed.tensor.experimental._context_parallel import _attention
        except ImportError as error:
            raise ValueError(
                f"torch {torch.__version__} has no torch.distributed.tensor.experimental._context_parallel; use torch "
                "2.11 or newer for torch_cp"
            ) from error
        self.cp, self.torch_ring = cp, _attention
        self.causal = settings.mask == "causal"
        self._settings = settings
        self.kernel: Kernel | None = None
        self._sent: tuple[SentBytes, SentBytes] | None = None

    def __call__(
        self,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        *,
        sinks_N: Tensor | None = None,
        saved: SavedOutput | None = None,
        expand_NXC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs that were saved whole are used; with a part of them torch's ring computes all of them again."""
        assert sinks_N is None, "the method refuses models with sinks or a latent"
        assert expand_NXC is None, "the method refuses models with sinks or a latent"
        self.kernel = self._kernel(q_BLND, k_BLKD)
        self._sent = self._volume(k_BLKD)
        whole = saved.tensors if saved is not None and saved.cut == 0 else (None, None)
        out_BLND, lse_BNL = _TorchRingFunction.apply(laid_out(q_BLND), laid_out(k_BLKD), laid_out(v_BLKD), self, *whole)
        return out_BLND, lse_BNL

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> SavedOutput | None:
        return save_suffix(out_BLND, lse_BNL, self.cp, tail)

    def resolved(self) -> dict[str, str]:
        if self.kernel is None:
            return {}
        return {
            "kernel": self.kernel.name,
            "layout": self.cp.layout.name,
            "schedule": "ring",
            "backward": "key_value",
            "exchange": "all_gather + relay",
            "mask": self._settings.mask,
            "grad_comm_dtype": "fp32",
        }

    def computed_sent(self) -> SentBytes | None:
        """Bytes this rank sends in one forward and backward; None before the first call."""
        return None if self._sent is None else self._sent[0] + self._sent[1]

    def _kernel(self, q_BLND: Tensor, k_BLKD: Tensor) -> Kernel:
        settings = self._settings
        problem = KernelProblem(
            device=q_BLND.device,
            dtype=q_BLND.dtype,
            heads=q_BLND.shape[2],
            kv_heads=k_BLKD.shape[2],
            head_dim=q_BLND.shape[3],
            bands=frozenset({"full", "causal"} if self.causal else {"full"}),
            deterministic=settings.deterministic,
        )
        return choose_kernel(settings.kernel, problem)

    def _volume(self, k_BLKD: Tensor) -> tuple[SentBytes, SentBytes]:
        """Of a forward and of a backward: K and V gathered in each; dK and dV sent to the next rank at every step,
        the last of which returns them to their owner."""
        cp, keys = self.cp, 2 * k_BLKD.numel() * k_BLKD.itemsize
        gathered = SentBytes(keys * (cp.node_size - 1), keys * (cp.size - cp.node_size))
        grads = 2 * k_BLKD.numel() * accumulation_dtype(k_BLKD.dtype).itemsize * cp.size
        following = (cp.rank + 1) % cp.size
        near = following // cp.node_size == cp.rank // cp.node_size
        return gathered, gathered + (SentBytes(grads, 0) if near else SentBytes(0, grads))

    def count(self, backward: bool) -> None:
        """Add the bytes of one pass to the context's traffic: torch's own transfers do not pass through it."""
        assert self._sent is not None
        self.cp.traffic.sent_bytes += self._sent[backward].total

    @contextmanager
    def options(self, dtype: torch.dtype) -> Iterator[None]:
        """torch's options for this problem: sums in fp32, as shipped, but of float64 in float64."""
        options = self.torch_ring._cp_options
        before = options.enable_load_balance, options.convert_to_f32
        options.enable_load_balance, options.convert_to_f32 = self.causal, dtype != torch.float64
        try:
            yield
        finally:
            options.enable_load_balance, options.convert_to_f32 = before


class _TorchRingFunction(torch.autograd.Function):
    """(q, k, v, the ring, saved out and LSE or none) -> (out_BLND, lse_BNL); out is differentiable."""

    @staticmethod
    @outside_autocast
    def forward(
        ctx: Any,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        ring: TorchRing,
        saved_out_BLND: Tensor | None,
        saved_lse_BNL: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        kernel, scale = ring.kernel, q_BLND.shape[3] ** -0.5
        assert kernel is not None
        ctx.set_materialize_grads(False)
        if saved_out_BLND is not None and saved_lse_BNL is not None:
            out_BLND, lse_BNL = saved_out_BLND.view_as(saved_out_BLND), saved_lse_BNL.view_as(saved_lse_BNL)
        else:

            def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **_: object) -> tuple[Tensor, Tensor]:
                band = CAUSAL if is_causal else FULL
                q, k, v = map(_tokens_first, (q, k, v))
                part_BLND, lse_BNL = kernel.forward(q, k, v, band, scale)
                return _heads_first(part_BLND), lse_BNL

            with ring.cp.collective(), ring.options(q_BLND.dtype):
                out, lse_BNL = ring.torch_ring._templated_ring_attention(
                    ring.cp.group, _TOKEN_DIM, attend, *map(_heads_first, (q_BLND, k_BLKD, v_BLKD)),
                    is_causal=ring.causal,
                )  # fmt: skip
            ring.count(backward=False)
            out_BLND = _tokens_first(out).to(q_BLND.dtype).contiguous()  # of the kernel's dtype before
        ctx.ring, ctx.scale = ring, scale
        ctx.mark_non_differentiable(lse_BNL)
        ctx.save_for_backward(q_BLND, k_BLKD, v_BLKD, out_BLND, lse_BNL)
        return out_BLND, lse_BNL

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, dout_BLND: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention")
        ring, kernel = ctx.ring, ctx.ring.kernel
        q_BLND, k_BLKD, v_BLKD, out_BLND, lse_BNL = ctx.saved_tensors
        dout_BLND = torch.zeros_like(out_BLND) if dout_BLND is None else dout_BLND.contiguous()

        def gradients(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            out: Tensor,
            logsumexp: Tensor,
            grad_out: Tensor,
            is_causal: bool,
        ) -> tuple[Tensor, ...]:
            q, k, v, o, dout = map(_tokens_first, (query, key, value, out, grad_out))
            delta_BNL = row_dot(dout, o)
            inputs = BackwardInputs(q, dout, logsumexp, delta_BNL, k, v)
            band = CAUSAL if is_causal else FULL
            found = kernel.backward(inputs, band, ctx.scale, ring._settings.deterministic)
            return tuple(map(_heads_first, found))

        with ring.cp.collective(), ring.options(q_BLND.dtype):
            grads = ring.torch_ring._templated_ring_attention_backward(
                ring.cp.group, _TOKEN_DIM, gradients, _heads_first(dout_BLND), "grad_out",
                *map(_heads_first, (q_BLND, k_BLKD, v_BLKD, out_BLND)), lse_BNL, is_causal=ring.causal,
            )  # fmt: skip
        ring.count(backward=True)
        return *(_tokens_first(grad).contiguous() for grad in grads[:3]), None, None, None


def _heads_first(tensor_BLND: Tensor) -> Tensor:
    return tensor_BLND.transpose(1, 2)


def _tokens_first(tensor_BNLD: Tensor) -> Tensor:
    return tensor_BNLD.transpose(1, 2)
