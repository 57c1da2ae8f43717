"""Transfers between two ranks of a node by the GPU's copy engines: a `Transport` over a `SymmMemChannel`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.accumulate.accumulators import TensorSpec
from engine.attention.comm.p2p import Traffic, Transfer
from engine.attention.comm.symm_mem.channel import Message, SymmMemChannel, message_bytes


class CopyEngine:
    """An `engine.attention.comm.p2p.Transport` for the ranks of one node.

    At most `slots` - 1 received messages may be held unreleased while the next one is waited for.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, slots: int, *, repeatable: bool = False) -> None:
        self._group, self._traffic = group, traffic
        self.channel = SymmMemChannel(group, traffic, slots, repeatable=repeatable)

    def repeatable(self, slots: int) -> CopyEngine:
        """The same with memory of its own, whose transfers a CUDA graph can repeat. Collective once it is used."""
        return CopyEngine(self._group, self._traffic, slots, repeatable=True)

    def reserve(self, largest: tuple[TensorSpec, ...]) -> None:
        """Make room for messages as large as `largest`. Collective with equal arguments; free when there is room."""
        self.channel.reserve(message_bytes(largest))

    def start(self, sent: tuple[Tensor, ...], to: int, expected: tuple[TensorSpec, ...], source: int) -> Transfer:
        message, pushed = self.channel.open(), None
        sent = tuple(tensor.contiguous() for tensor in sent)
        if sent:
            self.channel.follow()
            self.channel.send(message, to, sent)
            pushed = self.channel.sent()
        return _Push(self.channel, message, sent, pushed, expected, source)


class _Push:
    """Transfer of `CopyEngine`. The sent tensors are held until it has been waited for."""

    def __init__(
        self,
        channel: SymmMemChannel,
        message: Message,
        sent: tuple[Tensor, ...],
        pushed: torch.cuda.Event | None,
        expected: tuple[TensorSpec, ...],
        source: int,
    ) -> None:
        self._channel, self._message = channel, message
        self._sent, self._pushed = sent, pushed
        self._expected, self._source = expected, source

    def wait(self) -> tuple[Tensor, ...]:
        if self._pushed is not None:
            # The allocator may reuse the sent tensors' memory on the current stream once they are dropped here.
            torch.cuda.current_stream().wait_event(self._pushed)
            self._sent = ()
        if not self._expected:
            return ()
        self._channel.await_part(self._message, self._source)
        return self._message.buffer.tensors(self._message.number, self._expected)

    def release(self) -> None:
        if self._expected or not self._channel.repeatable:  # flags know no message without a sender
            self._channel.release(self._message, source=self._source)
