"""The fidelity table: how it is made, and that a fresh run of the systems says what the committed one says."""

from __future__ import annotations

import csv
import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from baselines.fidelity import run as fidelity
from baselines.fidelity.attention import compared, error_of, run_ranks
from baselines.fidelity.cases import SEQ_LEN, SYSTEMS, TRAINING
from baselines.fidelity.table import FidelityError, Row, as_csv, as_markdown, verdict_of
from baselines.install.places import InstallPlace
from baselines.programs import attention_bytes
from baselines.stand_ins.flash_attn.flash_attn import flash_attn_interface as stand_in
from engine.attention.masks import Causal, Documents, Full
from engine.attention.reference import dense_gradients
from engine.reader import to_json
from harness.cli import main
from tests.baselines.installing import installed
from tests.ranks import run_on_ranks
from tests.slow import slow

PUBLISHED = Path(__file__).parents[2] / "results" / "published" / "cpu"
# Few cases of the systems that need no installation, or one of seconds, which is slow as all cases of all systems are.
QUICK = {
    "torch_ring": ["zigzag-2-fp32", "public-2-fp32"],
    "ring_flash_attn": ["zigzag-2-fp32", "zigzag-2-bf16", "plain-2-bf16"],
    "yunchang": ["1x2-fp32", "1x2-bf16"],
}


def published_rows(name: str) -> dict[str, Row]:
    return {row.case: row for row in fidelity.read_results(PUBLISHED)[name].rows}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("systems")


def fresh(name: str, cases: list[str], base: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """Those cases, run now. Skips where the system cannot be installed in seconds."""
    package = fidelity.system_named(name).package
    if package:
        place = installed(package, base, fetch=name in QUICK)
        monkeypatch.setattr(fidelity, "place_of", lambda _: place)
    return fidelity.run_system(name, "", cases).rows


@pytest.mark.parametrize("name", slow("torch_ring", "ring_flash_attn", "yunchang"))
def test_a_fresh_run_says_what_the_committed_table_says(name: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = published_rows(name)
    rows = fresh(name, QUICK[name], base, monkeypatch)
    assert [(row.case, row.verdict) for row in rows] == [(case, said[case].verdict) for case in QUICK[name]]
    assert {"equal"} < {row.verdict for row in rows}  # each has a fault too
    for row in rows:
        assert row.sent_bytes == row.sent_expected == said[row.case].sent_bytes
        if row.native:
            assert row.native_sent_bytes == row.native_sent_expected
            assert verdict_of(row.native_errors, row.dtype) == ("equal", "")


@pytest.mark.slow  # minutes: every case of every system that is installed
@pytest.mark.parametrize("name", fidelity.NAMES)
def test_all_cases_say_what_the_committed_table_says(name: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fresh(name, [], base, monkeypatch)
    said = published_rows(name)
    assert {row.case: row.verdict for row in rows} == {case: row.verdict for case, row in said.items()}
    assert {row.case: row.sent_bytes for row in rows} == {case: row.sent_bytes for case, row in said.items()}


def test_the_committed_table_is_what_its_results_give() -> None:
    results = list(fidelity.read_results(PUBLISHED).values())
    rows = [row for result in results for row in result.rows]
    assert as_markdown(results, rows) == (PUBLISHED / fidelity.MARKDOWN).read_text("utf-8")
    for name, result in zip(fidelity.NAMES, results, strict=True):
        assert [row.case for row in result.rows] == [case.name for case in fidelity.system_named(name).cases]
        assert len(result.commit) == 40, "a commit without changes"


def test_in_the_committed_table_every_counted_byte_follows_from_a_formula() -> None:
    rows = [row for result in fidelity.read_results(PUBLISHED).values() for row in result.rows]
    lines = list(csv.DictReader(io.StringIO(as_csv(rows))))
    counted = [line for line in lines if line["sent_expected"]]
    assert counted
    assert [line["case"] for line in counted if line["sent_bytes"] != line["sent_expected"]] == []
    assert all(line["native_sent_bytes"] == line["native_sent_expected"] for line in lines if line["native"])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("release", ["2.6", "2.8"])
def test_the_stand_in_is_dense_attention_with_grouped_heads(
    causal: bool, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTN_STAND_IN", release)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 24, heads, 8) for heads in (4, 2, 2, 4))
    returned = stand_in._flash_attn_forward(q, k, v, 0.0, None, causal=causal)
    assert len(returned) == (8 if release == "2.6" else 4)
    out, lse = returned[0], returned[5 if release == "2.6" else 1]
    gradients = tuple(torch.empty_like(each) for each in (q, k, v))
    stand_in._flash_attn_backward(dout, q, k, v, out, lse, *gradients, 0.0, None, causal)
    truths = dense_gradients(q, k, v, dout, Causal() if causal else Full(), return_lse=True)
    for found, truth in zip((out, lse, *gradients), truths, strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=0, atol=1e-5)


def test_the_stand_in_aligns_the_last_query_with_the_last_key() -> None:
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 3, 1, 8), torch.eye(3, 8)[None, :, None]
    out = stand_in._flash_attn_forward(q, k, v, causal=True)[0]
    assert out[0, 0, 0, 2] == 0  # the first query sees two keys
    assert out[0, 1, 0, 2] > 0


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("lengths", "left"), [((24,), 5), ((3, 1, 20), None), ((10, 14), 4)])
def test_the_stand_in_has_windows_softcaps_and_packed_sequences(
    lengths: tuple[int, ...], left: int | None, softcap: float
) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(24, heads, 8) for heads in (4, 2, 2, 4))
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    given: dict[str, Any] = {"causal": True, "window_size": (-1 if left is None else left, 0), "softcap": softcap}
    longest = max(lengths)
    out, lse, *_ = stand_in._flash_attn_varlen_forward(q, k, v, bounds, bounds, longest, longest, **given)
    found = tuple(torch.empty_like(each) for each in (q, k, v))
    stand_in._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *found, bounds, bounds, longest, longest, **given
    )  # fmt: skip
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    by_autograd = stand_in.flash_attn_varlen_func(*leaves, bounds, bounds, longest, longest, **given)
    by_autograd.backward(dout)
    torch.testing.assert_close(by_autograd, out)
    truths = dense_gradients(
        q[None], k[None], v[None], dout[None], Documents(lengths, left=left), softcap=softcap or None
    )  # fmt: skip
    for one, other, truth in zip((out, *found), (out, *(each.grad for each in leaves)), truths, strict=True):
        torch.testing.assert_close(one.double(), truth[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(one, other)


def test_the_stand_in_refuses_what_it_does_not_compute() -> None:
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(NotImplementedError, match="no dropout on cpu; install flash-attn 2"):
        stand_in._flash_attn_forward(q, q, q, dropout_p=0.1)
    with pytest.raises(RuntimeError, match="a stand-in for CPU ranks, found q on meta; install flash_attn"):
        stand_in._flash_attn_forward(q.to("meta"), q, q)


def test_a_stand_in_is_used_where_the_interpreter_has_no_real_package(tmp_path: Path) -> None:
    own = InstallPlace(system="ring_flash_attn", flavour="current")
    (tmp_path / "ring_flash_attn").mkdir()
    (tmp_path / "ring_flash_attn" / "pin.yaml").write_text((own.base / own.system / "pin.yaml").read_text("utf-8"))
    place = InstallPlace(system="ring_flash_attn", flavour="current", base=tmp_path)
    assert place.stand_ins == ["flash_attn"]
    assert Path(place.environment["PYTHONPATH"], "flash_attn", "__init__.py").exists()
    (place.folder / "borrowed" / "flash_attn").mkdir(parents=True)
    (place.folder / "borrowed" / "flash_attn" / "__init__.py").touch()
    assert place.stand_ins == []
    assert "PYTHONPATH" not in place.environment
    assert InstallPlace(system="transformer_engine", flavour="current").stand_ins == []  # GPUs alone


def _sent_by_each_way() -> dict[str, int]:
    size, rank = dist.get_world_size(), dist.get_rank()
    one, into = torch.zeros(8), torch.zeros(8)
    with attention_bytes.counted() as sent:
        peers = [
            dist.P2POp(dist.isend, one, (rank + 1) % size),
            dist.P2POp(dist.irecv, into, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(peers):
            work.wait()
        dist.all_to_all_single(into, one)
        dist.all_reduce(one)
        dist.all_gather([torch.zeros(8) for _ in range(size)], one)
        dist.barrier()
    dist.all_reduce(one)  # after the block: as it was before, and not counted
    return sent


def test_bytes_are_counted_by_what_leaves_the_rank() -> None:
    for sent in run_on_ranks(2, _sent_by_each_way):
        exchanged = sent.pop("all_to_all_single", 0) + sent.pop("alltoall_base", 0)  # by the release of torch
        assert exchanged == 16
        assert sent == {"send": 32, "allreduce": 32, "allgather": 32}


def test_tensors_are_put_together_from_the_ranks_positions() -> None:
    truth = torch.arange(1.0, SEQ_LEN + 1).double().reshape(1, SEQ_LEN, 1, 1)
    even, odd = (list(range(first, SEQ_LEN, 2)) for first in (0, 1))
    left: list[dict[str, Any]] = [
        {"positions": held, "tensors": {"out": truth[:, held].float()}} for held in (even, odd)
    ]
    assert compared(left, {"out": truth}) == {"out": FidelityError(relative=0.0, largest=0.0)}
    left[1]["tensors"]["out"] += 2
    error = compared(left, {"out": truth})["out"]
    assert error.largest == 2
    assert error.relative == pytest.approx((4 * SEQ_LEN / 2) ** 0.5 / float(truth.norm()))
    left[1]["positions"] = even
    with pytest.raises(ValueError, match="expected each of 128 once"):
        compared(left, {"out": truth})


def test_a_tensor_that_is_not_finite_is_wrong() -> None:
    error = error_of(torch.tensor([float("nan"), 1.0]).double(), torch.ones(2).double())
    assert verdict_of({"out": error}, "bf16")[0] == "wrong"
    assert "inf" not in f"{error.relative:g} {error.largest:g}"


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ({"out": 1e-6, "dq": 9e-6}, ("equal", "")),
        ({"out": 1e-6, "dq": 2e-5}, ("gradients wrong", "dq off by up to 2e-05 of the norm")),
        ({"out": 2e-5, "dq": 3e-5}, ("wrong", "out, dq off by up to 3e-05 of the norm")),
    ],
)
def test_the_verdict_follows_from_the_errors(errors: dict[str, float], verdict: tuple[str, str]) -> None:
    found = {name: FidelityError(relative=value, largest=0.0) for name, value in errors.items()}
    assert verdict_of(found, "fp32") == verdict


def test_ranks_that_fail_or_do_not_end_are_said_and_stopped(tmp_path: Path) -> None:
    code = "import os, sys, time; print('as planned', flush=True); os.environ['RANK'] == '1' and sys.exit(3)"
    code += "; time.sleep(99)"
    said = run_ranks([sys.executable, "-c", code], {}, 2, tmp_path, 60)
    assert said == "rank 1 ended with code 3: as planned"
    said = run_ranks(["/usr/bin/env", "sleep", "99"], {}, 2, tmp_path, 0.2)
    assert said == "the ranks did not end within 0.2 s"


def test_a_system_that_is_not_installed_is_a_row_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = InstallPlace(system="yunchang", flavour="current", base=tmp_path)
    (tmp_path / "yunchang").mkdir()
    pin = InstallPlace(system="yunchang", flavour="current").base / "yunchang" / "pin.yaml"
    (tmp_path / "yunchang" / "pin.yaml").write_text(pin.read_text("utf-8"))
    monkeypatch.setattr(fidelity, "place_of", lambda _: place)
    out = tmp_path / "out"
    assert main(["setup", "baselines", "fidelity", "yunchang", "--out", str(out)]) == 0
    assert "burst setup baselines install yunchang --flavour current" in " ".join(capsys.readouterr().out.split())
    line = next(one for one in csv.DictReader(io.StringIO((out / "fidelity.csv").read_text())) if one["system"])
    assert (line["verdict"], line["out_relative"], line["sent_bytes"]) == ("not installed", "", "")
    assert main(["setup", "baselines", "fidelity", "yunchang", "--case", "1x2-bf16"]) == 2
    assert "yunchang (USP) is not installed; install it:" in capsys.readouterr().err


def test_a_system_that_is_there_is_kept_until_its_pin_or_its_cases_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs are those of torch's ring that the table has; whether another one starts is the question."""
    result = fidelity.read_results(PUBLISHED)["torch_ring"]
    monkeypatch.setattr(fidelity.metadata, "version", lambda _: result.torch)
    path = tmp_path / fidelity.RESULTS
    path.write_text(json.dumps(to_json(result)) + "\n")
    started: list[str] = []

    def start(name: str, commit: str) -> Any:
        started.append(name)
        return result

    monkeypatch.setattr(fidelity, "run_system", start)
    fidelity.run_systems(["torch_ring"], tmp_path, "")
    assert (started, "--anew runs them again" in capsys.readouterr().out) == ([], True)
    fidelity.run_systems(["torch_ring"], tmp_path, "", anew=True)
    assert started == ["torch_ring"]
    fewer = to_json(result)
    fewer["rows"] = fewer["rows"][1:]
    path.write_text(json.dumps(fewer) + "\n")
    fidelity.run_systems(["torch_ring"], tmp_path, "")
    assert started == ["torch_ring", "torch_ring"]
    path.write_text("[]")
    with pytest.raises(fidelity.UsageError, match="line 1 is no result of a system"):
        fidelity.run_systems(["torch_ring"], tmp_path, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["torch_rin"], "there are no cases for torch_rin; did you mean torch_ring"),
        (["torch_ring", "--case", "zigzag-2-fp31"], "torch_ring has no case zigzag-2-fp31; did you mean zigzag-2-fp32"),
        (["--case", "zigzag-2-fp32"], "--case is one case of one system, found 0 systems; name one"),
    ],
)
def test_what_does_not_exist_is_refused_with_its_nearest_name(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["setup", "baselines", "fidelity", *words]) == 2
    assert expected in capsys.readouterr().err


def test_every_case_has_its_own_name() -> None:
    systems: list[Any] = [*SYSTEMS.values(), *TRAINING.values()]
    for system in systems:
        names = [case.name for case in system.cases]
        assert len(set(names)) == len(names)
        assert {case.ranks for case in system.cases} >= {2}


def test_markdown_cells_hold_no_column_marks() -> None:
    row = Row(
        system="A | B", release="a 1", case="one", form="f", kernel="k", ranks=2, dtype="fp32", verdict="fails",
        found="x | y", reproduce="burst",
    )  # fmt: skip
    assert "A / B" in as_markdown([], [row])
    assert len(as_csv([row]).splitlines()) == 2
