"""What measured speeds and failed exchanges mean: pure, on made-up numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from cluster.active.judge import Pair, Speed, culprits, judge_pairs, judge_speeds, rounds, second_pass, suspects
from cluster.active.measurement import NodeSpeeds, Unavailable, line, read_speeds, speeds_line
from cluster.profiles import load_profiles

PROFILES = load_profiles()
LIMITS = PROFILES.limits
EIGHT = NodeSpeeds(
    gpu="NVIDIA H200",
    gemm_tflops=[780.0] * 8,
    hbm_gb_per_second=[4000.0] * 8,
    to_device_gb_per_second=[55.0] * 8,
    from_device_gb_per_second=[55.0] * 8,
    peer_gb_per_second={f"{one}-{other}": 380.0 for one, other in itertools.permutations(range(8), 2)},
    all_reduce_gb_per_second=430.0,
)


def third(value: float, usual: float) -> list[float]:
    return [usual, usual, value, *[usual] * 5]


def test_a_fleet_that_is_alike_and_fast_is_ok() -> None:
    verdicts = judge_speeds({"a": EIGHT, "b": EIGHT}, PROFILES)
    assert {test: verdict.level for test, verdict in verdicts["b"].items()} == dict.fromkeys(
        ("active_gemm", "active_copy", "active_peers", "active_all_reduce"), "ok"
    )
    assert "published is 796" in verdicts["a"]["active_gemm"].summary


@pytest.mark.parametrize(("tflops", "level"), [(741.0, "ok"), (740.9, "warn")])
def test_a_gpu_more_than_five_percent_below_the_fleets_median_is_named(tflops: float, level: str) -> None:
    slow = replace(EIGHT, gemm_tflops=third(tflops, 780.0))
    verdicts = judge_speeds({"a": EIGHT, "b": slow, "c": EIGHT}, PROFILES)
    assert verdicts["b"]["active_gemm"].level == level
    assert verdicts["a"]["active_gemm"].level == "ok"
    assert ("GPU 2: 741 TFLOP/s" in verdicts["b"]["active_gemm"].summary) == (level == "warn")


@pytest.mark.parametrize(
    ("change", "test", "words"),
    [
        ({"hbm_gb_per_second": third(3700.0, 4000.0)}, "active_copy", "device memory GPU 2: 3700 GB/s"),
        ({"to_device_gb_per_second": third(40.0, 55.0)}, "active_copy", "from host GPU 2: 40 GB/s"),
        ({"from_device_gb_per_second": third(40.0, 55.0)}, "active_copy", "to host GPU 2: 40 GB/s"),
        ({"peer_gb_per_second": {**EIGHT.peer_gb_per_second, "3-5": 40.0}}, "active_peers", "GPUs 3-5: 40 GB/s"),
        ({"all_reduce_gb_per_second": 400.0}, "active_all_reduce", "400 GB/s, more than 5% below"),
    ],
)
def test_each_speed_is_judged_beside_the_fleet(change: dict[str, object], test: str, words: str) -> None:
    slow = replace(EIGHT, **change)  # type: ignore[arg-type]
    verdicts = judge_speeds({"a": EIGHT, "b": slow, "c": EIGHT}, PROFILES)
    assert [name for name, verdict in verdicts["b"].items() if verdict.level == "warn"] == [test]
    assert words in verdicts["b"][test].summary
    assert all(verdict.level == "ok" for verdict in verdicts["c"].values())


def test_a_fleet_that_is_slow_as_a_whole_is_found_by_the_published_figure() -> None:
    slow = replace(EIGHT, gemm_tflops=[600.0] * 8, all_reduce_gb_per_second=200.0)
    verdicts = judge_speeds({"a": slow, "b": slow}, PROFILES)["a"]
    assert (verdicts["active_gemm"].level, verdicts["active_all_reduce"].level) == ("warn", "warn")
    assert "less than 80% of the published 796" in verdicts["active_gemm"].summary


def test_models_are_compared_with_their_like() -> None:
    old = replace(EIGHT, gpu="NVIDIA A800-SXM4-80GB", gemm_tflops=[265.0] * 8, all_reduce_gb_per_second=155.0)
    verdicts = judge_speeds({"a": EIGHT, "b": EIGHT, "c": old}, PROFILES)
    assert {verdict.level for tests in verdicts.values() for verdict in tests.values()} == {"ok"}


def test_a_lone_gpu_has_neither_peers_nor_an_all_reduce() -> None:
    alone = replace(EIGHT, gemm_tflops=[780.0], hbm_gb_per_second=[1.0], to_device_gb_per_second=[1.0],
                    from_device_gb_per_second=[1.0], peer_gb_per_second={}, all_reduce_gb_per_second=None)  # fmt: skip
    assert set(judge_speeds({"a": alone}, PROFILES)["a"]) == {"active_gemm", "active_copy"}


def test_a_node_that_cannot_measure_is_unknown_with_its_reason() -> None:
    verdicts = judge_speeds({"a": EIGHT, "b": Unavailable(reason="torch sees no GPU on the node")}, PROFILES)
    assert {test: (one.level, one.summary) for test, one in verdicts["b"].items()} == {
        "active": ("unknown", "torch sees no GPU on the node")
    }


def test_the_workers_answer_is_found_among_other_output_and_another_version_is_said() -> None:
    assert read_speeds(f"warning\n{speeds_line(EIGHT)}\nbye") == EIGHT
    assert read_speeds("Segmentation fault") is None
    assert read_speeds("burst-active {broken") is None
    assert isinstance(read_speeds(line("speeds", {"gpu": "x"})), Unavailable)
    assert read_speeds(line("unavailable", {"reason": "why"})) == Unavailable(reason="why")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 16])
def test_every_two_nodes_are_paired_once_and_none_is_in_two_pairs_at_once(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    found = rounds(nodes)
    for pairs in found:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    met = sorted(tuple(sorted(pair)) for pairs in found for pair in pairs)
    assert met == sorted(tuple(sorted(pair)) for pair in itertools.combinations(nodes, 2))


def test_nodes_of_large_fleets_are_paired_as_often_as_the_limit_says() -> None:
    found = rounds([f"n{number}" for number in range(64)])
    assert len(found) == 15
    assert all(len(pairs) == 32 for pairs in found)


def outcomes(nodes: str, *failed: str) -> dict[Pair, bool]:
    return {(a, b): a + b not in failed for a, b in itertools.combinations(nodes, 2)}


@pytest.mark.parametrize(
    ("worked", "doubted", "second"),
    [
        (outcomes("abc"), [], []),
        (outcomes("abc", "ac", "bc"), ["c"], [[("c", "a")]]),
        (outcomes("abcd", "ab"), ["a", "b"], [[("a", "c"), ("b", "d")]]),
        (outcomes("abc", "ab"), ["a", "b"], [[("a", "c")], [("b", "c")]]),
        (outcomes("abcde", "ab", "ac", "ad", "ae", "bc", "bd", "be"), ["a", "b"], [[("a", "c"), ("b", "d")]]),
        (outcomes("ab", "ab"), ["a", "b"], []),
    ],
)
def test_those_that_explain_the_failures_are_tried_with_those_beyond_doubt(worked, doubted, second):
    assert suspects(worked) == doubted
    assert second_pass(worked) == second


def test_the_second_pass_tells_the_broken_from_the_cleared() -> None:
    worked = outcomes("abcd", "ab")
    assert culprits(worked, {("a", "c"): False, ("b", "d"): True}) == {"a": "broken", "b": "cleared"}
    assert culprits(outcomes("ab", "ab"), {}) == {"a": "undecided", "b": "undecided"}


def speeds(nodes: str, **special: Speed) -> dict[Pair, Speed]:
    return {(a, b): special.get(a + b, 40.0) for a, b in itertools.combinations(nodes, 2)}


def test_a_node_that_fails_with_a_sound_one_again_is_isolated_and_its_partner_cleared() -> None:
    verdicts = judge_pairs(speeds("abcd", ab="time out"), {("a", "c"): "connection refused", ("b", "d"): 40.0}, LIMITS)
    assert {node: verdict.level for node, verdict in verdicts.items()} == {"a": "fail", "b": "ok", "c": "ok", "d": "ok"}
    assert verdicts["a"].action == "isolate"
    assert "connection refused" in verdicts["a"].summary
    assert "cleared of the failed exchange with a" in verdicts["b"].summary


def test_two_nodes_that_fail_together_both_fail_without_a_third_to_separate_them() -> None:
    verdicts = judge_pairs(speeds("ab", ab="time out"), {}, LIMITS)
    assert {verdict.level for verdict in verdicts.values()} == {"fail"}
    assert all("no node is beyond doubt" in verdict.summary for verdict in verdicts.values())


def test_a_node_slow_with_everybody_is_a_warning_and_its_partners_are_not() -> None:
    verdicts = judge_pairs(speeds("abcde", ae=20.0, be=20.0, ce=20.0, de=20.0), {}, LIMITS)
    assert {node: verdict.level for node, verdict in verdicts.items()} == {
        "a": "ok", "b": "ok", "c": "ok", "d": "ok", "e": "warn",
    }  # fmt: skip


def test_one_node_alone_has_no_pairs_to_judge() -> None:
    assert judge_pairs({}, {}, LIMITS) == {}
