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

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, slots: int) -> None:
        self._channel = SymmMemChannel(group, traffic, slots)

    def reserve(self, largest: tuple[TensorSpec, ...]) -> None:
        """Make room for messages as large as `largest`. Collective with equal arguments; free when there is room."""
        self._channel.reserve(message_bytes(largest))

    def start(self, sent: tuple[Tensor, ...], to: int, expected: tuple[TensorSpec, ...], source: int) -> Transfer:
        message, pushed = self._channel.open(), None
        sent = tuple(tensor.contiguous() for tensor in sent)
        if sent:
            self._channel.follow()
            self._channel.send(message, to, sent)
            pushed = self._channel.sent()
        return _Push(self._channel, message, sent, pushed, expected, source)


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
        self._channel.release(self._message)
