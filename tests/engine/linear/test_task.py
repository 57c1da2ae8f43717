"""Task linear as a launcher sees it: exact over ranks, its work, what is refused; and the library's own call."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from baselines.flash_linear_attention.recurrence import plain_call
from engine.burst import METHOD
from engine.distributed import arrange
from engine.linear import kernels
from engine.linear.reference import recurrence
from engine.linear.runs import runs_of
from engine.settings import Steps, TrialSettings
from engine.tasks.linear import CHECKED_STATES, LinearTask
from engine.worker import silent
from harness.machine.this_machine import Machine
from harness.metrics.flops import work_of
from harness.plan.unsupported import unsupported_reason
from harness.records.judging import bound_of
from harness.report.figures import shown_of
from harness.report.results import rows_of
from harness.spec.models import named_model
from tests.engine.linear import library
from tests.engine.linear.test_hybrid_step import DELTA, MAMBA
from tests.harness.metrics.test_second_formulas import differing
from tests.harness.synthetic_records import H200, record
from tests.ranks import run_on_ranks

LAPTOP = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=8)
NODE = Machine(hostname="node", device="cuda", cores=64, memory_gib=999, gpu_name="NVIDIA H200", gpu_count=8)
DOCUMENTS = "documents:5,1,20,..."


def trial(**changes: Any) -> TrialSettings:
    fields: dict[str, Any] = {"task": "linear", "method": "burst", "model": DELTA, "seq_len": 48, "batch_size": 2}
    return TrialSettings(**{**fields, "dtype": "fp64", "steps": Steps(warmup=1, measured=2), **changes})


CASES = {
    f"{model.linear}, {dtype}, {mask}": trial(model=model, dtype=dtype, mask=mask)
    for model, dtype, mask in (
        (DELTA, "fp64", "causal"), (MAMBA, "fp64", DOCUMENTS), (DELTA, "fp32", DOCUMENTS), (MAMBA, "fp32", "causal"),
        (DELTA, "bf16", "causal"), (MAMBA, "bf16", "causal"),
    )
}  # fmt: skip


def measure(cases: dict[str, TrialSettings], cp_size: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, settings in cases.items():
        settings = replace(settings, cp_size=cp_size, world_size=cp_size)
        task = LinearTask(settings, METHOD, arrange(settings, torch.device("cpu")))
        figures = task.run(silent)
        found[name] = asdict(figures) | task.check()
        found[name] |= {"dtypes": [str(each.dtype) for each in task.inputs], "kept": [x.grad for x in task.inputs]}
    CHECKED_STATES["cpu"] = 1
    return found | {"longer": LinearTask(settings, METHOD, arrange(settings, torch.device("cpu"))).check()}


@pytest.mark.parametrize("cp_size", [1, 2])
def test_out_and_every_gradient_are_those_of_the_recurrence_and_every_figure_is_left(cp_size: int) -> None:
    measured = run_on_ranks(cp_size, measure, CASES, cp_size)[0]
    assert measured.pop("longer") == {}, "there is no float64 run of more states"
    for name, found in measured.items():
        of_delta = name.startswith("gated")
        names = ["out", "dq", "dk", "dv", "ddecay", *(["dbeta"] if of_delta else [])]
        assert list(found["error"]) == names, name
        bounds = {each: bound_of(CASES[name], each) for each in names}
        assert {each for each in names if not found["error"][each] < bounds[each]} == set(), name
        assert len(found["step_seconds"]) == len(found["forward_seconds"]) == 2
        assert all(0 < f < s for f, s in zip(found["forward_seconds"], found["step_seconds"], strict=True))
        assert found["chosen"] == {"linear_kernel": "torch"}
        assert found["kept"] == [None] * (len(names) - 1)
        assert any(found["sent_bytes"]) == (cp_size > 1)
        own, wide = (f"torch.{bits}" for bits in ({"fp64": ("float64", "float64"), "fp32": ("float32", "float32"),
                     "bf16": ("bfloat16", "float32")}[CASES[name].dtype]))  # fmt: skip
        assert found["dtypes"] == [own] * 3 + [wide] + [own] * of_delta


def test_its_work_is_that_of_one_recurrence() -> None:
    """3 x 2 FLOPs of a product: the delta rule has three of a head's state, Mamba-2 two."""
    for model, products in ((DELTA, 3), (MAMBA, 2)):
        work = work_of(trial(model=model, cp_size=2, world_size=4))
        assert (work.head, work.attention, work.recomputed_layers) == (0.0, 0.0, 0.0)
        assert work.model == work.hardware == 6 * (48 * 2 * 2) * products * 4 * 4 * 5


LIBRARY = {"method": "flash_linear_attention"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model": named_model("1b")},
            "task linear runs a linear layer, and model 1b has none; choose one such as",
        ),
        ({"mask": "full"}, "mask is full, and model hybrid has linear layers, which are causal"),
        (
            {"mask": "documents:16,32:left-8"},
            "mask is documents:16,32:left-8, and model hybrid has linear layers, which have no window; leave out",
        ),
        (
            {"mask": "documents:16,32:left-8", "task": "train"},
            "mask is documents:16,32:left-8, and model hybrid has linear layers, which have no window; leave out",
        ),
        ({"layout": "zigzag", "cp_size": 2}, "layout is zigzag, and ranks of task linear have consecutive tokens"),
        ({"tp_size": 2}, "tp_size is 2, and model hybrid has linear layers"),
        ({"method": "ulysses"}, "task linear runs no attention, so ulysses would measure the same as burst; set "),
        ({"method": "trl_upstream"}, "trl_upstream runs task"),
        (LIBRARY | {"task": "attention"}, "flash_linear_attention is one call of a recurrence, found task attention"),
        (LIBRARY | {"cp_size": 2}, "flash_linear_attention takes whole sequences, found cp_size 2; set cp_size to 1"),
        (LIBRARY, "flash_linear_attention computes in 16 bits, found dtype fp64; set dtype to bf16"),
        (LIBRARY | {"dtype": "bf16"}, "flash_linear_attention has kernels for GPUs alone"),
        ({"cp_size": 2, "seq_len": 4}, None),
    ],
)
def test_a_trial_is_refused_in_one_sentence(changes: dict[str, Any], sentence: str | None) -> None:
    reason = unsupported_reason(trial(**changes), LAPTOP)
    assert reason is None if sentence is None else reason is not None and reason.startswith(sentence), reason


@pytest.mark.parametrize("installed", [True, False])
def test_the_librarys_call_needs_the_library(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "library_installed", lambda: installed)
    monkeypatch.setattr(kernels, "refused_here", lambda: "")
    reason = unsupported_reason(trial(method="flash_linear_attention", dtype="bf16"), NODE)
    assert reason is None if installed else "pip install flash-linear-attention" in str(reason)


@pytest.mark.parametrize("lengths", [None, (5, 1, 13)])
def test_the_library_gets_what_its_own_layers_give_it(
    lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.install(monkeypatch, with_state=False)
    out, chance = plain_call(runs_of(lengths, 0, 19)), torch.Generator().manual_seed(0)
    sizes = ((2, 4), (2, 4), (4, 5), (4,), (4,))
    q, k, v, decay, beta = (torch.randn(2, 19, *size, generator=chance, dtype=torch.float64) for size in sizes)
    inputs = [q, k, v, -decay.square(), beta.sigmoid()]
    for given in (inputs, inputs[:4]):
        leaves = [each.clone().requires_grad_() for each in given]
        expected = recurrence(*leaves[:4], leaves[4] if len(leaves) > 4 else None, lengths or ())
        found = out(*leaves)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), leaves) for each in (found, expected)))


def test_its_figures_have_a_second_formula_and_are_drawn_by_length_without_a_ceiling() -> None:
    records = [
        record(
            task="linear", gpu=H200, dtype="bf16", model=named_model(model), method=method, seq_len=1 << power,
            seconds=seconds * 2**power / 1e6,
        )
        for model in ("hybrid_1b", "mamba_1b") for power in (13, 14, 15)
        for method, seconds in (("burst", 1.0), ("flash_linear_attention", 1.5))
    ]  # fmt: skip
    assert [differing(one) for one in records] == [{}] * len(records)
    rows = rows_of(records)
    assert all(row["mfu"] for row in rows)
    assert not any(row["tflops_ceiling"] for row in rows)
    assert "speed" in shown_of(rows[:6])
