"""A plan whose forward and backward are CUDA graphs: launched by the host once, captured once, then replayed.

Below some tens of thousands of tokens the host needs longer to launch a pass (kernels, copies, counters, events) than
the GPUs to run it. A graph is one launch. Its kernels and copies have fixed addresses, so a call copies its tensors to
those of the graph, and the results to memory of its own: calls may be under way one behind the other, as those of a
model's layers are, and each backward gets the tensors that its forward saved.

The transfers of a captured pass have receive slots of their own, guarded by flags in place of counters
(`engine.attention.comm.symm_mem.guards`). All ranks call the same passes in the same order, so all launch, capture and
replay together.

Shape letters as in `engine.attention.op`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor

from engine.attention.algorithms.ring import RingPlan
from engine.attention.algorithms.saved import AttentionPlan, FirstRowsPlan, Saved
from engine.attention.algorithms.ulysses import UlyssesPlan
from engine.attention.comm.exchange import AllPairsP2P, RingComms
from engine.attention.comm.p2p import Traffic
from engine.attention.comm.symm_mem.all_to_all import CopyEngineAllToAll
from engine.attention.comm.symm_mem.channel import Message, SymmMemChannel
from engine.attention.comm.symm_mem.copy_engine import CopyEngine
from engine.attention.context import ContextParallel
from engine.attention.geometry.tiles import Band
from engine.attention.kernels import Kernel
from engine.attention.planning.comm_volume import CallBytes
from engine.cuda.graph import CapturedParts
from engine.cuda.streams import own_stream

Work = Callable[..., tuple[Tensor, ...]]


def captured_unsupported_reason(plan: AttentionPlan) -> str | None:
    """Why the passes of `plan` cannot be captured, one sentence; None when they can."""
    if plan.cp.size == 1:
        return "captured passes are for several ranks and there is one; leave captured out, or cuda_graph: pass"
    whole = plan.cp.node_size == plan.cp.size
    by_copies = (
        isinstance(plan.all_to_all, CopyEngineAllToAll) and plan.inner.cp.size == 1
        if isinstance(plan, UlyssesPlan)
        else isinstance(plan, RingPlan) and plan.exchange == "copy_engine"
    )
    if plan.kernel.name == "flex":  # its cache may free a mask's tensors, which the graph would go on to read
        return (
            "captured passes need a kernel without tensors of its own, found kernel flex, which keeps those of some "
            "masks; choose kernel fa4, or leave captured out, or cuda_graph: pass"
        )
    if whole and by_copies:
        return None
    found = plan.resolved()
    return (
        f"captured passes need a ring or ulysses whose ranks share a node and exchange by copy_engine, found schedule "
        f"{found['schedule']} by {found['exchange']} of {plan.cp.size} ranks in nodes of {plan.cp.node_size}; leave "
        "captured out, or cuda_graph: pass"
    )


class CapturedPlan:
    """An `engine.attention.algorithms.saved.AttentionPlan` that replays another one, for which
    `captured_unsupported_reason` is None. Calls for some rows alone are launched as by that plan."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._launched = plan
        self._repeated, self._channels = _repeatable(plan)
        self._passes: dict[tuple[str, bool], _Pass] = {}
        self._lock = Lock()
        self._stream: torch.cuda.Stream | None = None  # of the last call

    @property
    def cp(self) -> ContextParallel:
        return self._launched.cp

    @property
    def kernel(self) -> Kernel:
        return self._launched.kernel

    @property
    def scale(self) -> float:
        return self._launched.scale

    @property
    def deterministic(self) -> bool:
        return self._launched.deterministic

    @property
    def one_call(self) -> Band | None:
        return self._launched.one_call

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, save: bool) -> tuple[Tensor, Tensor, Saved]:
        """(out_BLND, lse_BNL, saved): this rank's queries over the whole sequence."""
        plan, given = self._repeated, (q_BLND, k_BLKD, v_BLKD)

        def work(*shards: Tensor) -> tuple[Tensor, ...]:
            out_BLND, lse_BNL, saved = plan.forward(*shards, save=save)
            return out_BLND, lse_BNL, *(saved.tensors if saved.gathered else ())

        out_BLND, lse_BNL, *gathered = self._run("forward", save, work, given)
        return out_BLND, lse_BNL, Saved(tuple(gathered), gathered=True) if gathered else Saved(given)

    def backward(
        self, saved: Saved, dout_BLND: Tensor, lse_BNL: Tensor, delta_BNL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq_BLND, dk_BLKD, dv_BLKD) of this rank's shards, in the inputs' dtype."""
        plan, gathered = self._repeated, saved.gathered

        def work(dout_BLND: Tensor, lse_BNL: Tensor, delta_BNL: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            return plan.backward(Saved(tensors, gathered), dout_BLND, lse_BNL, delta_BNL)

        dq_BLND, dk_BLKD, dv_BLKD = self._run(
            "backward", gathered, work, (dout_BLND, lse_BNL, delta_BNL, *saved.tensors)
        )
        return dq_BLND, dk_BLKD, dv_BLKD

    def _run(self, name: str, variant: bool, work: Work, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with self._lock:
            stream = torch.cuda.current_stream()
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)  # passes share receive slots, and the graphs' memory
            self._stream = stream
            if (name, variant) not in self._passes:
                self._passes[name, variant] = _Pass(work, self._channels, self.cp.traffic)
            return self._passes[name, variant](given)

    def before(self, cut: int) -> FirstRowsPlan:
        return self._launched.before(cut)

    def recompute_share(self, cut: int) -> float:
        return self._launched.recompute_share(cut)

    def sent_bytes(self, *, gathered: bool = True) -> CallBytes:
        return self._launched.sent_bytes(gathered=gathered)

    def resolved(self) -> dict[str, str]:
        """What each `auto` became, for the record."""
        return self._launched.resolved() | {"cuda_graph": "pass"}


class _Pass:
    """One pass of a plan: its first call is launched by the host, its second captured, and that and all later ones are
    replayed."""

    def __init__(self, work: Work, channels: Sequence[SymmMemChannel], traffic: Traffic) -> None:
        self._work, self._channels, self._traffic = work, channels, traffic
        self._inputs: list[Tensor] = []  # of every call: the first one compiles kernels for their strides
        self._graph: CapturedParts[tuple[Tensor, ...]] | None = None
        self._held: list[tuple[SymmMemChannel, Message]] = []  # whose slots hold results when a pass ends
        self._sent_bytes = 0  # in each replay

    def __call__(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not self._inputs:
            with torch.inference_mode(False):  # calls under that mode and calls outside it write to them
                self._inputs = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in given]
            torch._foreach_copy_(self._inputs, list(given))
            return self._own(self._launch())
        if self._graph is None:
            self._graph = self._capture()
        torch._foreach_copy_(self._inputs, list(given))
        for _stop in self._graph.replay():
            pass
        self._traffic.sent_bytes += self._sent_bytes
        return self._own(self._graph.result)

    def _launch(self) -> tuple[Tensor, ...]:
        for channel in self._channels:
            channel.begin_pass()
        results = self._work(*self._inputs)
        for channel in self._channels:
            channel.end_pass()
        self._held = [(channel, message) for channel in self._channels for message in channel.held]
        return results

    def _own(self, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results of a pass in memory of the caller's; the slots that held some are released."""
        copies = [torch.empty_like(result, memory_format=torch.contiguous_format) for result in results]
        torch._foreach_copy_(copies, list(results))
        for channel, message in self._held:
            channel.release(message)
        return tuple(copies)

    def _capture(self) -> CapturedParts[tuple[Tensor, ...]]:
        def whole() -> Generator[None, None, tuple[Tensor, ...]]:
            return self._launch()
            yield  # a generator that never stops

        before = self._traffic.sent_bytes
        graph = CapturedParts(whole(), own_stream(self._inputs[0].device))
        # A capture sends nothing.
        self._sent_bytes, self._traffic.sent_bytes = self._traffic.sent_bytes - before, before
        return graph


def _repeatable(plan: AttentionPlan) -> tuple[AttentionPlan, tuple[SymmMemChannel, ...]]:
    """`plan` with transfers that a graph can repeat, in memory of their own, and their channels."""
    if isinstance(plan, UlyssesPlan):
        assert isinstance(plan.all_to_all, CopyEngineAllToAll)
        all_to_all = plan.all_to_all.repeatable()
        return replace(plan, all_to_all=all_to_all), (all_to_all.outbound, all_to_all.inbound)
    assert isinstance(plan, RingPlan)
    pattern = plan.comms.intra_node
    assert isinstance(pattern, AllPairsP2P)
    chunks, gradients = pattern.chunks, pattern.gradients
    assert isinstance(chunks, CopyEngine)
    assert isinstance(gradients, CopyEngine)
    # A slot for each step: its message comes from the same rank in every pass.
    chunks, gradients = chunks.repeatable(pattern.size - 1), gradients.repeatable(pattern.size - 1)
    comms = RingComms(replace(pattern, chunks=chunks, gradients=gradients))
    return replace(plan, comms=comms), (chunks.channel, gradients.channel)
