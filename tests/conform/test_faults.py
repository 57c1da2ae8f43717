"""`burst conform` finds every fault that is seeded in a right implementation, and none where there is none."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conform.cases import ConformCase, case_named, cases_of
from conform.run import ERROR, HANG, PASSED, WRONG, WaitingRanks, run
from conform.target import CaseProblem, LoadedTarget, load
from tests.conform.seeded import faults

# By kind and fault, a case that finds it, and what the report of it says.
FOUND_BY = {
    "attention": {
        "the length rounded down to what ranks divide": ("odd-length", "out differs"),
        "gather in the order of ranks": ("causal", "gather does not undo shard"),
        "the result of gather differs on the last rank": ("causal", "not what rank 0 returned"),
        "positions off by one on the last rank": ("causal", "rank 1"),
        "positions as in a contiguous layout": ("causal", "out differs"),
        "boundaries of the first batch kept": ("documents-called-again", "out differs"),
        "documents ignored": ("documents", "first at token 5, rank 0.*where a document starts"),
        "the last document joined to the one before": ("documents", "token 48.*where a document starts"),
        "document boundary off by one": ("documents", "token 5, rank 0.*where a document starts"),
        "boundaries counted within a rank": ("documents", "out differs"),
        "padding seen": ("odd-length-full", "out differs"),
        "full is causal": ("full", "out differs"),
        "documents are causal in any case": ("documents-full", "out differs"),
        "causal mask forgotten": ("no-later-token", "sees a later token"),
        "causal mask of other ranks by rank": ("causal", "out differs"),
        "a query sees the next token": ("no-later-token", "sees a later token"),
        "a query does not see itself": ("causal", "token 0"),
        "window ignored": ("window", "token 12.*window is lost or off by one"),
        "window ignored for other ranks": ("window-over-ranks", "out differs"),
        "window counts the token itself": ("window", "token 11.*window is lost or off by one"),
        "window one too wide": ("window-of-one", "out differs"),
        "window in local positions": ("window", "out differs"),
        "KV heads in turn": ("grouped-heads", "only heads|out differs"),
        "scale of a padded head_dim": ("wide-heads", "out differs"),
        "scale ignored": ("scale", "out differs"),
        "the scale of V's head dim": ("narrow-values", "out differs"),
        "V sent in the shape of K": ("narrow-values-documents", "out differs"),
        "softcap ignored": ("softcap", "out differs"),
        "hidden keys lose 20 instead of all": ("documents-leak", "sees another document"),
        "one rank raises": ("causal", "rank 1: RuntimeError: no memory left; rank 0 still waited"),
        "one rank dies": ("causal", "rank 1: the process ended with exit code 7"),
        "one rank never answers": (
            "causal",
            r"rank 0, 1 gave no answer within 3 s; rank 0 is in .*; rank 1 is in \w+ \(ring.py:\d+\)",
        ),
        "a plan without gradients kept": ("after-no-grad", "dq .*all 0"),
        "an input as a buffer": ("inputs-kept", "the call overwrote this input"),
        "memory taken as contiguous": ("strided-inputs", "out differs"),
        "keys of the first sequence for all": ("batch", "right in the first sequence"),
        "sums in the order of arrival": ("repeated", "other bits in a second run"),
        "partial gradients sent in bfloat16": ("causal", "dk differs"),
        "more sent than claimed": ("bytes-sent", "sent .* bytes, expected at most"),
        "a float32 buffer": ("fp64", "out differs"),
        "a tile dropped on the last rank": ("causal", "only tokens of rank 1"),
        "sinks at every step of the ring": ("sinks", "out differs"),
        "NaN where a row sees nothing": ("documents-at-edges", "NaN or infinity"),
        "outputs merged without their weights": ("causal", "out differs"),
        "partial outputs in bfloat16": ("causal", "out differs"),
        "sinks dropped": ("sinks", "out differs"),
        "sinks of the next head": ("sinks", "out differs"),
        "keys and values kept globally": ("crossed-backwards", "dq differs"),
        "gradient of the output taken as contiguous": ("strided-inputs", "dq differs"),
        "delta forgotten": ("causal", "dq differs"),
        "delta in bfloat16": ("causal", "dq differs"),
        "stale K and V in backward": ("causal", "dq differs"),
        "derivative without that of tanh": ("softcap", "dq differs"),
        "a tile dropped in backward": ("causal", "dq differs"),
        "dK of one query head of a group": ("grouped-heads", "dk differs"),
        "dK and dV stay where they are formed": ("causal", "dk differs"),
        "dK and dV one rank too early": ("causal", "dk differs"),
        "dK scaled by 1.02": ("causal", "dk differs by 2.00e-02.*1.02 times the truth everywhere"),
        "dQ without the scale": ("causal", "dq differs.*times the truth everywhere"),
        "dV added twice": ("causal", "dv differs.*2 times the truth, as many as ranks"),
        "no dQ where keys are frozen": ("frozen-keys", "dq .*all 0"),
        "no gradient of the sinks": ("sinks", "dsinks .*all 0"),
        "gradient of the sinks on rank 0 alone": ("sinks", "dsinks differs"),
    },
    "recurrence": {
        "the last tokens lost": ("delta-odd-length", "out differs"),
        "a plan without gradients kept": ("delta-after-no-grad", "dq .*all 0"),
        "an input as a buffer": ("delta-inputs-kept", "the call overwrote this input"),
        "memory taken as contiguous": ("delta-strided-inputs", "out differs"),
        "sums in the order of arrival": ("delta-repeated", "other bits in a second run"),
        "boundaries of the first batch kept": ("delta-documents-called-again", "out differs"),
        "boundaries counted within a rank": ("mamba2-documents", "out differs"),
        "state reset one token late": ("mamba2-documents", "token 5, rank 0.*where a document starts"),
        "documents ignored": ("delta-documents-leak", "sees another document"),
        "only the first document of a rank starts anew": ("delta-documents", "out differs.*where a document starts"),
        "state reset on every rank": ("delta-long-memory", "only tokens of rank 1"),
        "queries not of unit length": ("delta", "out differs"),
        "keys not of unit length": ("delta", "out differs"),
        "scale of the values' head dim": ("delta-wide-values", "out differs.*times the truth everywhere"),
        "scale of queries forgotten": ("delta", "out differs.*times the truth everywhere"),
        "queries of Mamba-2 scaled": ("mamba2", "out differs.*times the truth everywhere"),
        "key heads in turn": ("delta-grouped-heads", "only heads|out differs"),
        "decay ignored": ("mamba2", "out differs"),
        "decay applied twice": ("delta", "out differs"),
        "decay of the token before": ("mamba2", "out differs"),
        "no gradient of the decays": ("delta", "ddecay .*all 0"),
        "no gradient of beta": ("delta", "dbeta .*all 0"),
        "decays of bfloat16": ("delta", "out differs"),
        "what arrives keeps its size": ("mamba2", "only tokens of rank 1"),
        "beta ignored": ("delta", "out differs"),
        "the delta rule reads before the decay": ("delta", "out differs"),
        "the delta rule forgotten": ("delta", "out differs"),
        "beta of what is read alone": ("delta", "out differs"),
        "states in bfloat16": ("delta", "out differs"),
        "output read before a token writes": ("delta", "out differs"),
        "a chunk's last state read by all of its tokens": ("delta-no-later-token", "sees a later token"),
        "exponentials of sums": ("mamba2-strong-decay", "NaN or infinity"),
        "more sent than claimed": ("delta-bytes-sent", "sent .* bytes, expected at most"),
        "a float32 state": ("delta-fp64", "out differs"),
        "the state of the call before": ("delta-called-again", "out differs"),
        "the state of another head": ("delta-no-decay", "only tokens of rank 1"),
        "a state with its sides exchanged": ("delta", "only tokens of rank 1"),
        "the state of the first sequence for all": ("delta-batch", "right in the first sequence"),
        "the state that came sent on": ("delta", "only tokens of rank 1"),
        "states sent in bfloat16": ("delta", "only tokens of rank 1"),
        "the state of the newest call in backward": ("delta-crossed-backwards", "dq differs"),
        "gradient of the state not sent back": ("delta", "dk differs.*only tokens of rank 0"),
        "gradient of the state of another head": ("mamba2", "dk differs.*only tokens of rank 0"),
        "gradient of the output taken as contiguous": ("delta-strided-inputs", "dq differs"),
        "no dQ where gates are frozen": ("delta-frozen-gates", "dq .*all 0"),
        "dV added twice": ("delta", "dv differs.*2 times the truth, as many as ranks"),
    },
    "training": {
        "labels shifted after the cut": ("step", "loss differs"),
        "labels shifted twice": ("step", "loss differs"),
        "labels not shifted": ("step", "loss differs"),
        "ignored labels learnt": ("ignored-prompt", "loss differs"),
        "padding on the left seen": ("padding-left", "loss differs"),
        "documents lost in training": ("step-documents", "loss differs"),
        "positions counted per rank": ("step", "loss differs"),
        "last label of a rank lost": ("step", "loss differs"),
        "weights of the newest model": ("two-models", "loss differs|absent"),
        "window lost in training": ("step-window", "loss differs"),
        "no gradient of the last token": ("step", "embed_tokens.weight differs.*first at token"),
        "gradient of a tied head lost": ("tied", "embed_tokens.weight differs"),
        "documents lost in recomputation": ("checkpointing", "differs"),
        "labels of this rank counted": ("ignored-prompt", "loss differs"),
        "ignored labels counted": ("ignored-labels", "loss differs"),
        "gradients of the step before kept": ("second-step", "differs"),
        "mean of the means of micro-batches": ("accumulation", "loss differs"),
        "mean of the means of ranks": ("ignored-prompt", "loss differs"),
        "gradients of the last micro-batch alone": ("accumulation", "differs"),
        "loss averaged over ranks": ("step", "loss differs.*0.5 times the truth, one over the ranks"),
        "loss of each rank counted again": ("step", "loss differs.*2 times the truth, as many as ranks"),
        "gradients of a rank not added up": ("step", "differs"),
        "gradients of norms not added up": ("step", "layernorm.weight differs"),
        "gradients averaged over ranks": ("step", "differs.*0.5 times the truth, one over the ranks"),
        "a parameter left out of gather": ("step", "absent from what gather returned"),
        "evaluation counts labels of a rank": ("evaluation-ignored", "loss differs"),
        "evaluation times the ranks": ("evaluation", "loss differs.*2 times the truth, as many as ranks"),
    },
}
BREAKS = {"one rank raises": ERROR, "one rank dies": ERROR, "one rank never answers": HANG}
TABLE = [
    (kind, fault, *found) for kind, table in FOUND_BY.items() for fault, found in table.items() if fault not in BREAKS
]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[WaitingRanks]:
    with WaitingRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], LoadedTarget]:
    folder = tmp_path_factory.mktemp("targets")

    def made(kind: str, fault: str = "") -> LoadedTarget:
        path = Path(folder, f"{kind} {fault}.py".replace(" ", "_"))
        path.write_text(f"from tests.conform import seeded\nglobals().update(seeded.target({kind!r}, {fault!r}))\n")
        return load(str(path))

    return made


def test_faults_are_seeded_and_each_has_a_case_that_finds_it() -> None:
    assert {kind: set(table) for kind, table in FOUND_BY.items()} == {kind: set(faults(kind)) for kind in FOUND_BY}
    assert len(TABLE) + len(BREAKS) == 136


@pytest.mark.parametrize(("kind", "fault", "name", "said"), TABLE, ids=[row[1] for row in TABLE])
def test_a_seeded_fault_is_found_with_its_place(
    kind: str, fault: str, name: str, said: str, two_ranks: WaitingRanks, ring: Callable[[str, str], LoadedTarget]
) -> None:
    result = two_ranks.ask(ring(kind, fault), case_named(name))
    assert result.status == WRONG, "not found"
    assert re.search(said, " | ".join(result.sentences)), result.sentences


@pytest.mark.parametrize(("fault", "status"), BREAKS.items())
def test_ranks_that_break_are_a_result_and_the_next_case_has_new_ones(
    fault: str, status: str, ring: Callable[..., LoadedTarget]
) -> None:
    case, said = FOUND_BY["attention"][fault]
    with WaitingRanks(2, limit_seconds=10 if status == ERROR else 3) as ranks:
        result = ranks.ask(ring("attention", fault), case_named(case))
        assert result.status == status
        assert re.search(said, " | ".join(result.sentences)), result.sentences
        if status == HANG:
            return  # its ranks were ended alike
        assert ranks.ask(ring("attention"), case_named(case)).status == PASSED


@pytest.mark.parametrize("kind", list(FOUND_BY))
def test_a_right_implementation_passes_every_case(
    kind: str, two_ranks: WaitingRanks, ring: Callable[..., LoadedTarget]
) -> None:
    target = ring(kind)
    asked = [case for case in cases_of(kind) if case.needs(2) <= target.capabilities]
    assert len(asked) >= 25
    wrong = {case.name: result.sentences for case in asked if (result := two_ranks.ask(target, case)).failed}
    assert wrong == {}


def test_a_target_without_float32_is_asked_in_its_dtype(tmp_path: Path) -> None:
    path = tmp_path / "halved.py"
    path.write_text("from tests.conform import seeded\nglobals().update(seeded.target('attention'))\nDTYPE = 'bf16'\n")
    cases = [case_named("causal"), case_named("bytes-sent"), case_named("fp64")]
    found = list(run(load(str(path)), cases, ranks=[1, 2]))
    dtypes = {(each.case.name, each.ranks): each.case.problem.dtype for each in found}
    assert {name: dtype for (name, _), dtype in dtypes.items()} == {
        "causal": "bf16", "bytes-sent": "bf16", "fp64": "fp64",
    }  # fmt: skip
    assert {each.status for each in found} == {PASSED}


def test_a_factor_that_rounding_would_hide_is_found_in_bfloat16(tmp_path: Path, two_ranks: WaitingRanks) -> None:
    path = tmp_path / "scaled.py"
    text = "from tests.conform import seeded\nglobals().update(seeded.target('attention', 'dK scaled by 1.02'))\n"
    path.write_text(text + "DTYPE = 'bf16'\n")
    result = two_ranks.ask(load(str(path)), case_named("causal"))
    assert result.status == WRONG
    assert re.search(r"dk differs by .*1\.02\d* times the truth", result.sentences[0])


def setting(kind: str, number: int) -> ConformCase:
    """A correct setting at random: every capability of attention or of recurrences, and some that meet."""
    chance = random.Random(number)
    tokens = chance.choice((1, 2, 7, 16, 31, 40, 64))
    documents: list[int] = []
    if chance.random() < 0.5:
        while sum(documents) < tokens:
            documents.append(min(chance.randint(1, max(1, tokens // 2)), tokens - sum(documents)))
    kv_heads = chance.choice((1, 2, 3))
    problem = CaseProblem(
        tokens=tokens,
        batch=chance.choice((1, 1, 2)),
        kv_heads=kv_heads,
        heads=kv_heads * chance.choice((1, 2, 4)),
        head_dim=chance.choice((1, 4, 8, 20)),
        dtype=chance.choice(("fp32", "fp32", "fp64", "bf16")),
        documents=tuple(documents),
        seed=number,
    )
    if kind == "attention":
        problem = replace(
            problem,
            mask=chance.choice(("causal", "causal", "full")),
            sinks=chance.random() < 0.3,
            softcap=chance.choice((None, None, 0.7, 5.0)),
            scale=chance.choice((None, 0.05, 1.0)),
        )
        if problem.mask == "causal" and chance.random() < 0.4:
            problem = replace(problem, window=chance.randint(0, tokens))
    else:
        recurrence, decay = chance.choice(("gated_delta_net", "mamba2")), chance.choice((0.0, 0.01, 0.2, 2.0, 10.0))
        problem = replace(problem, recurrence=recurrence, decay=decay)
    problem = replace(problem, value_dim=chance.choice((None, 1, 3, 8)))
    way = chance.choice(("once", "once", "again", "crossed", "strided", "kept", "repeated", "leak"))
    return ConformCase(name=f"setting {number}", problem=problem, source="fault: none", way=way)


@pytest.mark.parametrize("kind", ["attention", "recurrence"])
@pytest.mark.parametrize("numbers", [range(25), pytest.param(range(25, 1000), marks=pytest.mark.slow)], ids=len)
def test_random_right_settings_give_no_false_alarm(
    kind: str, numbers: range, two_ranks: WaitingRanks, ring: Callable[..., LoadedTarget]
) -> None:
    target = ring(kind)
    wrong = {number: two_ranks.ask(target, setting(kind, number)) for number in numbers}
    assert {number: result.sentences for number, result in wrong.items() if result.status != PASSED} == {}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["burst_attention", "burst_linear", "burst_transformers"])
def test_our_own_targets_pass_every_case_that_they_claim(name: str, ranks: int) -> None:
    target = load(name)
    assert ranks in target.ranks
    wrong = {
        each.case.name: each.sentences for each in run(target, cases_of(target.kind), ranks=[ranks]) if each.failed
    }
    assert wrong == {}
