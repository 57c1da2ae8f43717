"""Which implementation of LM head and loss a trial runs, and the sentence when it cannot."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.lm_head.loss import plain_loss_sum
from engine.lm_head.loss_kernel import LIBRARIES, available, loss_sum_of, unsupported_reason
from engine.settings import TrialSettings
from engine.shape import ModelShape
from harness.commands.doctor import examine
from harness.machine.this_machine import Machine
from harness.plan.matrix import plan, plan_table
from harness.spec.experiment import load_experiment

ROOT = Path(__file__).parents[3]
SHAPE = ModelShape(name="head", layers=1, hidden=8, ffn=8, heads=1, kv_heads=1, head_dim=8, vocab=30)


def settings(**changes: Any) -> TrialSettings:
    return TrialSettings(task="lm_head", method="burst", model=SHAPE, seq_len=16, **changes)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries can be found, as empty packages: nothing here calls them."""
    for library in LIBRARIES.values():
        (tmp_path / library.module).mkdir()
        (tmp_path / library.module / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "device", "sentence"),
    [
        ({"loss_kernel": "liger"}, "cpu", "loss_kernel liger needs a GPU, and this machine has none; choose"),
        ({"loss_kernel": "cce"}, "cpu", "loss_kernel cce needs a GPU, and this machine has none; choose"),
        ({"loss_kernel": "cce", "dtype": "fp32"}, "cuda", "loss_kernel cce takes dtype bf16, found fp32; choose"),
        ({"loss_kernel": "liger", "dtype": "fp64"}, "cpu", "loss_kernel liger takes dtype bf16 or fp32, found fp64"),
        ({"loss_kernel": "cce", "z_loss": 1e-4}, "cuda", "loss_kernel cce has no z-loss, found z_loss 0.0001; choose"),
        ({"loss_kernel": "liger", "lm_head_fusion": False}, "cuda", "is fused, but lm_head_fusion is false"),
    ],
)
def test_settings_that_a_library_lacks_are_refused_with_a_next_step(installed, changes, device, sentence) -> None:
    reason = unsupported_reason(settings(**changes), device)
    assert reason is not None
    assert sentence in reason
    with pytest.raises(ValueError, match="loss_kernel"):
        loss_sum_of(settings(**changes), device)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_not_installed_is_refused_with_the_line_that_installs_it(name, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    library = LIBRARIES[name]
    line = f"{library.module} is not installed; pip install {library.requirement}"
    assert unsupported_reason(settings(loss_kernel=name), "cuda") == f"loss_kernel {name} cannot run: {line}"
    assert (name, False, line) in available("cuda")


def test_an_installed_library_runs_on_a_gpu_and_is_listed_as_ready(installed) -> None:
    assert [unsupported_reason(settings(loss_kernel=name), "cuda") for name in ("own", "liger", "cce")] == [None] * 3
    assert unsupported_reason(settings(loss_kernel="liger", z_loss=1e-4, dtype="fp32"), "cuda") is None
    assert [(name, ok) for name, ok, _ in available("cuda")] == [("own", True), ("liger", True), ("cce", True)]
    assert ("liger", False, "liger-kernel is installed, but needs a GPU") in available("cpu")


def test_the_engines_own_needs_nothing() -> None:
    assert all(
        unsupported_reason(settings(dtype=dtype), device) is None
        for dtype in ("fp64", "bf16")
        for device in ("cpu", "cuda")
    )
    assert available("cpu")[0] == ("own", True, "ready")


@pytest.mark.parametrize("fused", [True, False])
def test_the_trials_z_loss_reaches_the_loss(fused) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 8), torch.randn(30, 8), torch.randint(30, (16,))
    loss_sum = loss_sum_of(settings(lm_head_fusion=fused, z_loss=0.1), "cpu")
    torch.testing.assert_close(loss_sum(*inputs), plain_loss_sum(*inputs, z_loss=0.1))
    assert not torch.allclose(loss_sum(*inputs), plain_loss_sum(*inputs))


def test_the_pins_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {library.requirement for library in LIBRARIES.values()} <= set(project["optional-dependencies"]["peers"])


NODE = Machine(hostname="node", device="cuda", cores=64, memory_gib=512, gpu_name="NVIDIA H200", gpu_count=1)
LAPTOP = Machine(hostname="laptop", device="cpu", cores=8, memory_gib=16)


def reasons(machine: Machine, *overrides: str) -> dict[tuple[str, bool], set[str | None]]:
    """Refusals of experiments/lm_head.yaml by loss kernel and fusion."""
    found: dict[tuple[str, bool], set[str | None]] = {}
    for trial in plan(load_experiment(ROOT / "experiments" / "lm_head.yaml", overrides=overrides), machine):
        found.setdefault((trial.settings.loss_kernel, trial.settings.lm_head_fusion), set()).add(
            trial.unsupported_reason
        )
    return found


def test_the_experiment_compares_four_forms_where_there_is_a_gpu(installed) -> None:
    forms = [("own", True), ("liger", True), ("cce", True), ("own", False)]
    assert reasons(NODE) == {form: {None} for form in forms}


def test_its_plan_shows_models_by_name_and_the_settings_that_vary() -> None:
    rows = plan_table(plan(load_experiment(ROOT / "experiments" / "lm_head.yaml"), LAPTOP))
    assert {row["model"] for row in rows} == {"llama3_8b", "7b"}
    assert {"lm_head_fusion", "loss_kernel"} <= rows[0].keys()
    assert not [column for column in rows[0] if column.startswith("model.")]


def test_the_plan_refuses_only_the_libraries_without_a_gpu(installed) -> None:
    found = reasons(LAPTOP)
    assert found["own", True] == found["own", False] == {None}
    assert found["cce", True] == {"loss_kernel cce needs a GPU, and this machine has none; choose loss_kernel own"}


def test_another_method_has_no_part_in_the_head() -> None:
    [[reason]] = {tuple(each) for each in reasons(LAPTOP, "fixed.method=ulysses", "fixed.loss_kernel=own").values()}
    assert reason == "task lm_head runs no attention, so ulysses would measure the same as burst; set method to burst"


def test_doctor_has_a_line_for_every_loss_kernel() -> None:
    assert [finding.name for finding in examine() if finding.section == "loss kernels"] == ["own", *LIBRARIES]
