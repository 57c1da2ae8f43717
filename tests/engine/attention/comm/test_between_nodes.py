"""Ways to give transfers between nodes their turn: the same attention and the same bytes, in other kernel calls."""

from __future__ import annotations

import itertools
import re
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel, burst_attention
from engine.attention.comm.all_to_all import GroupAllToAll
from engine.attention.comm.between_nodes import PLAIN, BetweenNodes, parse_between_nodes
from engine.attention.comm.nccl import nccl_options
from engine.attention.geometry.tiles import Band, Tile, cut_keys, cut_queries, trim
from engine.attention.kernels.reference import KERNEL
from engine.attention.masks import Causal, Full, SlidingWindow
from tests.engine.attention.test_parity import dense, distributed, problem, worst_error
from tests.ranks import run_on_ranks

CASES = (((8, 8), Causal(), "query"), ((8, 8), Full(), "key_value"), ((16, 8), SlidingWindow(9, 4), "query"))


@pytest.mark.parametrize("text", ["plain", "priority", "no_clusters+ctas:4", "reserve:12+blocks:16384+ahead"])
def test_a_setting_is_written_as_it_is_read(text) -> None:
    assert str(parse_between_nodes(text)) == text


def test_tokens_may_be_written_in_units_of_1024() -> None:
    assert parse_between_nodes("blocks:16k+priority") == BetweenNodes(blocks=16384, priority=True)
    assert parse_between_nodes("plain") == PLAIN == BetweenNodes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "between_nodes has 'fast'; give plain, or priority, no_clusters, ahead, ctas:N"),
        ("", "between_nodes has ''"),
        ("priority:2", "'priority:2'"),
        ("ctas", "'ctas'"),
        ("ctas:0", "'ctas:0'"),
        ("plain+priority", "'plain'"),
        ("priority+priority", "priority twice; give each remedy once"),
        ("ctas:33", "ctas:33; give 1 to 32"),
    ],
)
def test_another_text_is_refused_in_a_sentence(text, said) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_between_nodes(text)


def visible(tile: Tile) -> set[tuple[int, int]]:
    """Pairs (query, key) that a tile shows."""
    lo, hi = tile.band.lo, tile.band.hi
    pairs = itertools.product(range(tile.rows), range(tile.columns))
    return {
        (tile.q_start + i, tile.k_start + j)
        for i, j in pairs
        if (lo is None or j - i >= lo) and (hi is None or j - i <= hi)
    }


@pytest.mark.parametrize("most", [1, 3, 7, 100])
@pytest.mark.parametrize("band", [(None, None), (None, 0), (None, 5), (-4, 3), (2, None)])
@pytest.mark.parametrize("shape", [(12, 12), (20, 9), (9, 20)])
def test_a_cut_tile_shows_each_of_its_pairs_once(shape, band, most) -> None:
    tile = trim(*shape, *band)
    assert tile is not None
    tile = tile.shifted(3, 5)
    for parts, longest in ((cut_keys(tile, most), "columns"), (cut_queries(tile, most), "rows")):
        shown = [visible(part) for part in parts]
        assert sum(map(len, shown)) == len(set().union(*shown))
        assert set().union(*shown) == visible(tile)
        assert max(getattr(part, longest) for part in parts) <= most
        assert all(part.rows == part.columns for part in parts if part.band == Band(hi=0))


def test_long_tiles_are_cut_between_the_blocks_of_a_kernel() -> None:
    parts = cut_keys(Tile(0, 256, 0, 10_000), 4096)
    assert [part.columns for part in parts] == [3456, 3456, 3088]
    assert {part.columns % 128 for part in parts[:-1]} == {0}


def cut_cases(schedule: str, node_size: int, remedy: str) -> tuple[dict[str, float], int, int, bool]:
    """(errors, kernel calls of plain attention, with the remedy, whether all transfers were waited for)."""
    errors, calls = {}, {"plain": 0, remedy: 0}
    contexts = {text: ContextParallel(node_size=node_size, between_nodes=text) for text in calls}
    for (heads, kv_heads), mask, route in CASES:
        whole = problem(16 * dist.get_world_size(), heads, kv_heads, batch=1, head_dim=4)
        expected = dense(*whole, mask)
        choices = {"kernel": "reference", "schedule": schedule, "backward": route}
        if schedule != "double_ring":
            choices["num_head_chunks"] = 2
        for text, cp in contexts.items():
            forward, backward = type(KERNEL).forward, type(KERNEL).backward

            def counted(method, text=text):
                def call(self, *arguments):
                    calls[text] += 1
                    return method(self, *arguments)

                return call

            with mock.patch.multiple(type(KERNEL), forward=counted(forward), backward=counted(backward)):
                found = distributed(cp, whole, mask, torch.float64, **choices)
            errors[f"{text} {mask} {heads}:{kv_heads} {route}"] = worst_error(found, expected)
    waited = all(cp.traffic.pending == 0 for cp in contexts.values())
    return errors, calls["plain"], calls[remedy], waited


@pytest.mark.parametrize(
    ("schedule", "remedy"),
    [("double_ring", "blocks:5"), ("usp", "blocks:5"), ("usp_transposed", "blocks:7+ahead"), ("ulysses", "blocks:6")],
)
def test_shorter_kernel_calls_beside_transfers_equal_dense_float64(schedule, remedy) -> None:
    for errors, plain, cut, waited in run_on_ranks(4, cut_cases, schedule, 2, remedy):
        assert len(errors) == 2 * len(CASES)
        assert {case: error for case, error in errors.items() if not error < 1e-10} == {}
        assert cut > 1.2 * plain > 0
        assert waited


def sent_ahead(schedule: str) -> tuple[bool, list[str], list[str], bool]:
    """Whether results with `ahead` are those of plain attention; the order of messages without and with it in forward;
    whether both sent as many bytes."""
    results, orders, sent = [], [], []
    for text in ("plain", "ahead"):
        cp = ContextParallel(node_size=2, between_nodes=text)
        order: list[str] = []
        exchange = GroupAllToAll.exchange

        def watched(self, rows, order=order, exchange=exchange):
            if len(rows) == 1 or not self._between_nodes:
                return exchange(self, rows)
            number = sum(event.startswith("start") for event in order)
            order.append(f"start {number}")
            receive = exchange(self, rows)

            def received():
                order.append(f"wait {number}")
                return receive()

            return received

        generator = torch.Generator().manual_seed(3 + cp.rank)
        q, k, v = (torch.randn(1, 8, 16, 4, generator=generator, requires_grad=True) for _ in range(3))
        with mock.patch.object(GroupAllToAll, "exchange", watched):
            out = burst_attention(q, k, v, cp=cp, schedule=schedule, num_head_chunks=4, tensor_layout="BSHD")
        results.append([out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))])
        orders.append(order)
        sent.append(cp.traffic.sent_bytes)
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return same, *orders, sent[0] == sent[1]


@pytest.mark.parametrize("schedule", ["ulysses", "usp_transposed"])
def test_sent_ahead_the_next_message_is_under_way_before_one_is_waited_for(schedule) -> None:
    for same, plain_order, ahead_order, same_bytes in run_on_ranks(4, sent_ahead, schedule):
        assert same
        assert same_bytes
        assert plain_order[:3] == ["start 0", "wait 0", "start 1"]
        assert ahead_order[:4] == ["start 0", "start 1", "wait 0", "start 2"]
        assert sorted(plain_order) == sorted(ahead_order)


def refusals(node_size: int, cases: list[tuple[str, dict]]) -> list[str]:
    said = []
    q = torch.zeros(1, 8, 8, 4)
    for text, choices in cases:
        with pytest.raises(ValueError, match=r"^between_nodes ") as error:
            burst_attention(q, q, q, cp=ContextParallel(node_size=node_size, between_nodes=text), **choices)
        said.append(str(error.value))
    return said


def test_a_remedy_without_effect_is_refused() -> None:
    [one_node, _] = run_on_ranks(2, refusals, 2, [("blocks:8", {})])
    assert one_node == [
        "between_nodes blocks:8 is for ranks on several nodes and these 2 share one; give between_nodes plain"
    ]
    found, _ = run_on_ranks(
        2,
        refusals,
        1,
        [
            ("priority+ctas:2", {}),
            ("reserve:4", {}),
            ("ahead", {"schedule": "double_ring"}),
            ("blocks:8", {"schedule": "all_gather"}),
        ],
    )
    assert found[0] == (
        "between_nodes has priority, ctas, which concern the kernels of NCCL, and these ranks exchange by gloo; "
        "leave them out"
    )
    assert "between_nodes has reserve, which concern" in found[1]
    assert "schedule double_ring sends none; leave ahead out" in found[2]
    assert "schedule all_gather has none beside its own" in found[3]


class Options:
    """Stands in for torch's own, which builds for CPUs lack."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


def test_only_groups_between_nodes_have_options_and_only_those_of_the_setting(monkeypatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    timeout = timedelta(seconds=7)
    assert nccl_options(parse_between_nodes("reserve:4+blocks:8k+ahead"), timeout) is None
    found = nccl_options(parse_between_nodes("priority"), timeout)
    assert (found.is_high_priority_stream, found._timeout, vars(found.config)) == (True, timeout, {})
    found = nccl_options(parse_between_nodes("no_clusters+ctas:4"), timeout)
    assert (found.is_high_priority_stream, vars(found.config)) == (False, {"cga_cluster_size": 0, "max_ctas": 4})


def groups_with_options(schedule: str) -> dict[str, bool]:
    """By purpose, whether the groups of a schedule got the options of the setting."""
    cp, found = ContextParallel(node_size=2, between_nodes="blocks:64"), {}
    new_group = dist.new_group

    def watched(*arguments, pg_options=None, **named):
        found[named["group_desc"].removeprefix("attention_")] = pg_options == "options"
        return new_group(*arguments, **named)

    q = torch.zeros(1, 8, 8, 4)
    patches = {"engine.attention.context.nccl_options": lambda *_: "options", "torch.distributed.new_group": watched}
    with ExitStack() as stack:
        for name, stand_in in patches.items():
            stack.enter_context(mock.patch(name, stand_in))
        burst_attention(q, q, q, cp=cp, schedule=schedule)
    return found


def test_groups_inside_a_node_keep_the_options_of_nccl() -> None:
    [double_ring, *_] = run_on_ranks(4, groups_with_options, "double_ring")
    assert double_ring == {"chunks": False, "gradients": False, "inter_node": True, "inter_node_gradients": True}
    [usp_transposed, *_] = run_on_ranks(4, groups_with_options, "usp_transposed")
    assert (usp_transposed["heads"], usp_transposed["after_heads"], usp_transposed["chunks"]) == (True, False, False)
