"""Counts the bytes that a rank hands to other ranks, from outside the program that sends them.

Two places are watched: the methods of torch's ProcessGroup, which every function of torch.distributed calls, and
torch's functional collectives, which do not pass through them. Counted are the bytes that leave the rank under the
algorithm that sends least: an all-to-all without its own share, a reduce-scatter once over the ring, an all-reduce as
a reduce-scatter and an all-gather. Barriers, and what the program does outside the block, are not counted.
"""

import contextlib

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


def _size(value):
    """Bytes of a tensor, or of all in a list."""
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return value.numel() * value.element_size()


def _exchanged(tensor, splits, group):
    """Of an all-to-all of one tensor: all rows but those for this rank itself."""
    rows, size, rank = tensor.shape[0], group.size(), group.rank()
    own = splits[rank] if splits else rows // size
    return _size(tensor) * (rows - own) // max(rows, 1)


def _to_all(group, _into, tensors, *_):
    return (group.size() - 1) * _size(tensors)


def _scattered(group, _into, tensors, *_):
    return (group.size() - 1) * _size(tensors) // group.size()


def _in_place(group, tensors, *_):
    return (group.size() - 1) * _size(tensors) // group.size()


def _reduced(group, tensors, *_):
    return 2 * _in_place(group, tensors)


def _uncounted(group, *_):
    raise NotImplementedError("a collective that is not counted; add it to _SENT")


def _single(group, _into, tensor, _out=(), splits=(), *_):
    return _exchanged(tensor, splits, group)


# What each method of a group sends, from its arguments. Releases of torch name some of them differently.
_SENT = {
    "send": lambda group, tensors, *_: _size(tensors),
    "alltoall": lambda group, _into, tensors, *_: _size(tensors) - _size(tensors[group.rank()]),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _single),
    **dict.fromkeys(("allgather", "_allgather_base", "all_gather_single"), _to_all),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced", "allgather_coalesced"), _to_all),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"), _scattered),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), _scattered),
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), _reduced),
    **dict.fromkeys(("broadcast", "reduce"), _in_place),
    **dict.fromkeys(("gather", "scatter"), _uncounted),
}


class _Functional(TorchDispatchMode):
    """Sees torch's functional collectives, which are operators and call no method of a group in Python."""

    def __init__(self, sent):
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        space, name = function.name().split("::")
        if space.startswith("_c10d_functional") and (method := _FUNCTIONAL.get(name.partition(".")[0])):
            self.sent[name] = self.sent.get(name, 0) + method(*args)
        return function(*args, **(kwargs or {}))


def _group(name):
    return dist.distributed_c10d._resolve_process_group(name)


_FUNCTIONAL = {
    "all_to_all_single": lambda tensor, _out, splits, group: _exchanged(tensor, splits, _group(group)),
    "all_gather_into_tensor": lambda tensor, size, _group: (size - 1) * _size(tensor),
    "all_reduce": lambda tensor, _op, group: 2 * (_group(group).size() - 1) * _size(tensor) // _group(group).size(),
    "reduce_scatter_tensor": lambda tensor, _op, size, _group: (size - 1) * _size(tensor) // size,
}


@contextlib.contextmanager
def counted():
    """A dictionary that holds, after the block, the bytes sent in it by each kind of operation."""
    sent = {}
    # As the class holds them: what getattr gives is no method any more when it is put back.
    found = {name: method for name, method in vars(dist.ProcessGroup).items() if name in _SENT}

    def watched(name):
        method = getattr(dist.ProcessGroup, name)

        def call(group, *args, **kwargs):
            sent[name] = sent.get(name, 0) + int(_SENT[name](group, *args, *kwargs.values()))
            return method(group, *args, **kwargs)

        return call

    for name in found:
        setattr(dist.ProcessGroup, name, watched(name))
    try:
        with _Functional(sent):
            yield sent
    finally:
        for name, method in found.items():
            setattr(dist.ProcessGroup, name, method)
