"""Where parameters live: over all ranks or within nodes, drawn in parts, and never whole on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import engine.initialise
import engine.parallelize
from engine.attention.problem import node_size_of
from engine.distributed import arrange
from engine.initialise import initialise
from engine.models.decoder import Decoder
from engine.parallelize import ReduceIntoFreedMemory, WholeMatrices, parallelize
from engine.settings import TrialSettings, keeps_whole
from engine.shape import ModelShape
from tests.engine.parity import task_of, whole_of
from tests.ranks import run_on_ranks
from tests.slow import slow

# Five rows of a matrix over four ranks leave the last one with none.
SHAPE = ModelShape(name="odd", layers=1, hidden=18, ffn=5, heads=3, kv_heads=1, head_dim=6, vocab=259)
SETTINGS = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=16, dtype="fp32")
HYBRID = dataclasses.replace(SETTINGS, world_size=4, sharding="hybrid", emulate_nodes=2)
MODELS = Path(__file__).parents[2] / "experiments" / "models"


@pytest.mark.parametrize(
    ("hosts", "size"),
    [("a", 1), ("aaaa", 4), ("aabb", 2), ("abcd", 1), ("aaab", None), ("abab", None), ("aabbaa", None)],
)
def test_nodes_are_equal_runs_of_consecutive_ranks_or_none(hosts: str, size: int | None) -> None:
    assert node_size_of(list(hosts)) == size


def placements_and_values(settings: TrialSettings) -> tuple[set[Any], dict[str, list[float]], int]:
    engine.initialise.BLOCK_ELEMENTS = 5 * 18  # blocks that end inside shards
    _, task = task_of(settings)
    parameters = dict(task.model.named_parameters())
    sharded = [parameter for parameter in parameters.values() if isinstance(parameter, DTensor)]
    held = sum(parameter.to_local().numel() for parameter in sharded)
    values = {name: whole_of(parameter).flatten().tolist() for name, parameter in parameters.items()}
    return {parameter.placements for parameter in sharded}, values, held


def whole_values() -> dict[str, list[float]]:
    with torch.device("meta"):
        model = Decoder(SHAPE)
    initialise(model, SETTINGS.seed, torch.device("cpu"))
    return {name: parameter.flatten().tolist() for name, parameter in model.named_parameters()}


def test_hybrid_sharding_splits_within_nodes_and_repeats_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.initialise, "BLOCK_ELEMENTS", 5 * 18)
    ranks = run_on_ranks(4, placements_and_values, HYBRID)
    for placements, values, _ in ranks:
        assert placements == {(Replicate(), Shard(0))}
        assert values == whole_values()
    # Two ranks of a node hold all parameters between them, and both nodes alike.
    held = [held for *_, held in ranks]
    assert held[:2] == held[2:]
    assert sum(held[:2]) == SHAPE.parameters


@pytest.mark.parametrize("world_size", [1, 4])
def test_values_drawn_in_blocks_do_not_depend_on_the_number_of_ranks(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.initialise, "BLOCK_ELEMENTS", 5 * 18)
    whole = whole_values()
    settings = dataclasses.replace(SETTINGS, world_size=world_size)
    for placements, values, _ in run_on_ranks(world_size, placements_and_values, settings):
        assert placements == ({(Shard(0),)} if world_size > 1 else set())  # one rank keeps them whole
        assert values == whole
    for name, rows in whole.items():
        assert len(set(rows)) > 0.99 * len(rows) or "norm" in name  # no block repeats another


def test_only_a_rank_that_is_alone_keeps_its_parameters_whole() -> None:
    assert keeps_whole(SETTINGS)
    assert not keeps_whole(dataclasses.replace(SETTINGS, optimizer_offload=True))  # memory is short there
    assert keeps_whole(SETTINGS, optimizer_offload=False)
    assert not keeps_whole(SETTINGS, optimizer_offload=True)
    assert not keeps_whole(dataclasses.replace(SETTINGS, world_size=2))


def unsupported_reason(hosts: str) -> str:
    os.environ["NCCL_HOSTID"] = hosts[dist.get_rank()]
    with pytest.raises(ValueError, match="hybrid") as error:
        arrange(dataclasses.replace(HYBRID, world_size=3), torch.device("cpu"))
    return str(error.value)


class Streams:
    """A device with a stream of the computation and one of FSDP2, which notes on which of them memory is taken."""

    def __init__(self) -> None:
        self.current, self.taken = "compute", []

    def current_stream(self, device: torch.device) -> str:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.mark.parametrize("adds", [False, True])
def test_reduced_gradients_have_memory_of_the_computations_stream(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, marked = Streams(), []
    empty = torch.empty
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch, "empty", lambda *size, **named: device.taken.append(device.current) or empty(*size))
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: marked.append(stream))
    reduce = ReduceIntoFreedMemory(adds=adds, alone=False)
    cuda, named = torch.device("cuda"), {"dtype": torch.float32, "device": torch.device("cuda")}
    with device.stream("reduces"):
        reduce.allocate((4,), **named)  # without a forward nothing is known of the computation's stream
    reduce.forward_begins(cuda)
    for sends in (True, False, True):  # a version of torch may send gradients where they are
        if sends:
            reduce.allocate((8,), **named)
        with device.stream("reduces"):
            assert reduce.allocate((4,), **named).shape == (4,)
    assert device.taken == ["reduces", *["compute"] * 5]
    assert marked == ["reduces"] * (3 if adds else 0)


def results_are_added(counts: tuple[int, ...]) -> list[tuple[bool, bool]]:
    found = []

    class Noting(ReduceIntoFreedMemory):
        def __init__(self, *, adds: bool, alone: bool) -> None:
            found.append((adds, alone))
            super().__init__(adds=adds, alone=alone)

    engine.parallelize.ReduceIntoFreedMemory = Noting  # type: ignore[misc]
    for count in counts:
        task_of(dataclasses.replace(SETTINGS, world_size=2, gradient_accumulation=count))
    return found


def test_with_several_micro_batches_reduced_gradients_are_marked_as_added() -> None:
    assert run_on_ranks(2, results_are_added, (1, 3)) == [[(False, False), (True, False)]] * 2


@pytest.mark.parametrize("adds", [False, True])
def test_a_rank_alone_has_its_gradients_where_they_were_copied_to(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, marked = Streams(), []
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **named: device.taken.append(device.current) or empty(*size))
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: marked.append(stream))
    reduce = ReduceIntoFreedMemory(adds=adds, alone=True)
    cuda, named = torch.device("cuda"), {"dtype": torch.float32, "device": torch.device("cuda")}
    reduce.forward_begins(cuda)
    for size in (8, 8, 4):
        given = reduce.allocate((size,), **named)
        with device.stream("reduces"):
            assert reduce.allocate((size,), **named) is given
        assert reduce(given, given, None, None) is None  # nothing is sent
    assert (device.taken, marked) == (["compute"] * 3, ["reduces"] * (3 if adds else 0))
    # Where FSDP2 asks for the result alone, or for one of another size, there is no tensor that may be it.
    reduce.allocate((8,), **named)
    for size in (4, 8):
        with device.stream("reduces"):
            reduce.allocate((size,), **named)
    assert len(device.taken) == 6


def gradients_alone(count: int) -> tuple[int, int, bool]:
    """Of a rank alone whose moments are on the host: tensors that gradients were copied into, those of them that are
    gradients after a backward, and whether these are the gradients of whole parameters."""
    copied: list[Tensor] = []

    class Keeping(ReduceIntoFreedMemory):
        def allocate(self, size, *, dtype, device):  # type: ignore[no-untyped-def]
            copied.append(super().allocate(size, dtype=dtype, device=device))
            return copied[-1]

    engine.parallelize.ReduceIntoFreedMemory = Keeping  # type: ignore[misc]
    found = []
    for offload in (True, False):
        settings = dataclasses.replace(SETTINGS, optimizer_offload=offload, gradient_accumulation=count)
        _, task = task_of(settings)
        task.gradients(1)
        found.append([whole_of(parameter.grad) for parameter in task.model.parameters()])
        if offload:
            grads = [parameter.grad for parameter in task.model.parameters()]
            kept = {grad.to_local().untyped_storage().data_ptr() for grad in grads if isinstance(grad, DTensor)}
    places = {each.untyped_storage().data_ptr() for each in copied}
    return len(copied), len(places & kept), all(map(torch.equal, *found))


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_a_rank_alone_are_copied_once_and_those_of_whole_parameters(count: int) -> None:
    [(asked, kept, equal)] = run_on_ranks(1, gradients_alone, count)
    units = SHAPE.layers + 2 + 1  # layers, embedding and head; the norm is the root's
    assert (asked, equal) == (2 * units * count, True)
    assert kept == units


def test_unequal_nodes_are_refused_for_hybrid_sharding() -> None:
    assert set(run_on_ranks(3, unsupported_reason, "aab")) == {
        "sharding hybrid needs equally many consecutive ranks on every node, found runs of [2, 1] ranks on 2 nodes; "
        "place the ranks evenly, one node after another, or choose sharding full"
    }


class LargestDraw(TorchDispatchMode):
    """The most elements that were drawn at once."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.normal_:
            self.elements = max(self.elements, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_no_more_than_a_block_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.initialise, "BLOCK_ELEMENTS", 200)
    with torch.device("meta"):
        model = Decoder(SHAPE)
    with LargestDraw() as draws:
        initialise(model, 0, torch.device("cpu"))
    assert draws.elements == 200 // 18 * 18


def shards_of(shape: ModelShape, world_size: int, nodes: int) -> tuple[int, int, set[str]]:
    """On rank 0 of a world that exists on paper only: parameters in its shards, most in one, and their devices."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    sizes, names = ((world_size,), ("fsdp",)) if nodes == 1 else ((nodes, world_size // nodes), ("replicate", "shard"))
    settings = TrialSettings(task="train", method="burst", model=shape, seq_len=1 << 20, world_size=world_size)
    with torch.device("meta"):
        model = Decoder(shape)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        parallelize(model, settings, model.blocks[0].attend, mesh, WholeMatrices(shape))
    shards = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        shards.append(parameter.to_local())
    elements = [shard.numel() for shard in shards]
    return sum(elements), max(elements), {shard.device.type for shard in shards}


@pytest.mark.parametrize(("world_size", "nodes"), [(64, 8), *slow((64, 1))])
def test_a_70b_model_is_sharded_without_a_byte_of_it_allocated(world_size: int, nodes: int) -> None:
    fields = {key: value for key, value in yaml.safe_load((MODELS / "70b.yaml").read_text()).items()}
    shape = ModelShape(name="70b", **{key: value for key, value in fields.items() if key != "parameters"})
    [(held, largest, devices)] = run_on_ranks(1, shards_of, shape, world_size, nodes)
    assert devices == {"meta"}
    ranks = world_size // nodes
    assert held == shape.parameters // ranks  # every dimension of the shape divides by the ranks
    assert largest == shape.vocab * shape.hidden // ranks
