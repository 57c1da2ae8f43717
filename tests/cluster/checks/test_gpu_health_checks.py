"""Checks that read nvidia-smi -q, judged on the outputs of four models, healthy and with one broken GPU."""

from __future__ import annotations

import pytest

from cluster.checks import Check
from cluster.checks.gpu import gpu_persistence, gpu_recovery, gpu_versions
from cluster.checks.gpu_health import gpu_clocks, gpu_ecc, gpu_rows, gpu_thermal
from cluster.checks.links import gpu_fabric
from cluster.inventory.site import GpuExpectation, Site
from cluster.probing.nvidia_smi import REPORT, parse_report
from cluster.probing.probe import Output, parse_outputs, render_script
from cluster.transport.reach import LocalRunner
from tests.cluster.gpu_outputs import EIGHT, MODELS, NO_GPUS, OUTPUTS, STRANGER, board, judge, report, setting
from tests.patience import AMPLE

CHECKS = [gpu_clocks, gpu_ecc, gpu_fabric, gpu_persistence, gpu_recovery, gpu_rows, gpu_thermal, gpu_versions]
EVERY_CHECK = pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
EVERY_MODEL = pytest.mark.parametrize("model", MODELS)


@EVERY_MODEL
@EVERY_CHECK
def test_eight_healthy_gpus_are_ok(check: Check, model: str) -> None:
    verdict = judge(check, report(model), EIGHT, board(model))
    assert verdict.level == "ok", verdict.summary


@EVERY_CHECK
def test_the_report_of_a_real_gpu_in_a_virtual_machine_is_ok(check: Check) -> None:
    text = (OUTPUTS / "h200_virtual_q.txt").read_text()
    verdict = judge(check, text, Site(), board("h200", 1))
    assert verdict.level == "ok", verdict.summary
    assert "GPUs" not in verdict.summary


BROKEN = [
    (gpu_ecc, "ECC Mode/Current", "Disabled", "fail", "reset", "ECC disabled"),
    (gpu_ecc, "ECC Errors/Volatile/DRAM Uncorrectable", "3", "fail", "reset", "3 uncorrected errors"),
    (gpu_rows, "Remapped Rows/Remapping Failure Occurred", "Yes", "fail", "isolate", "return it"),
    (gpu_rows, "Remapped Rows/Pending", "Yes", "warn", "reset", "next reset"),
    (gpu_rows, "Remapped Rows/Pending", "N/A", "unknown", "none", "does not report"),
    (gpu_clocks, "HW Slowdown/HW Thermal Slowdown", "Active", "fail", "isolate", "HW Thermal Slowdown"),
    (gpu_clocks, "Sync Boost/SW Thermal Slowdown", "Active", "warn", "monitor", "it is hot"),
    (gpu_thermal, "Temperature/GPU Current Temp", "N/A", "unknown", "none", "does not state its temperature"),
]


@EVERY_MODEL
@pytest.mark.parametrize(("check", "path", "value", "level", "action", "words"), BROKEN)
def test_one_broken_gpu_is_found_and_named(check, path, value, level, action, words, model):
    verdict = judge(check, report(model, setting(path, value)), EIGHT, board(model))
    assert (verdict.level, verdict.action) == (level, action)
    assert verdict.summary.startswith("GPU 2 ")
    assert words in verdict.summary


def test_a_software_power_cap_is_normal() -> None:
    text = report("h200", setting("Clocks Event Reasons/SW Power Cap", "Active"))
    assert judge(gpu_clocks, text, EIGHT, board("h200")).level == "ok"


@pytest.mark.parametrize(("clock", "level"), [(1951, "ok"), (1950, "warn"), (1906, "warn"), (1905, "fail")])
def test_clocks_below_the_models_are_graded(clock: int, level: str) -> None:
    text = report("h100", setting("Max Clocks/SM", f"{clock} MHz"))
    assert judge(gpu_clocks, text, EIGHT, board("h100")).level == level


def test_application_clocks_below_their_default_are_graded() -> None:
    text = report("a100", setting("Applications Clocks\n/Graphics", "1335 MHz"))
    verdict = judge(gpu_clocks, text, EIGHT, board("a100"))
    assert (verdict.level, verdict.action) == ("fail", "reset")
    assert "75 MHz below" in verdict.summary


@pytest.mark.parametrize(("errors", "level"), [(4, "ok"), (5, "fail")])
def test_more_than_four_sram_errors_over_its_life_return_a_board(errors: int, level: str) -> None:
    for model, name in (("a800", "SRAM Uncorrectable"), ("h200", "SRAM Uncorrectable SEC-DED")):
        text = report(model, setting(f"ECC Errors/Aggregate/{name}", str(errors)))
        verdict = judge(gpu_ecc, text, EIGHT, board(model))
        assert verdict.level == level
        assert verdict.action == ("isolate" if level == "fail" else "none")


@pytest.mark.parametrize(
    ("entry", "level", "action", "words"),
    [
        ("Unrepairable Memory", "fail", "isolate", "GPU 0 has memory that cannot be repaired: return it"),
        ("Channel Repair Pending", "warn", "reset", "GPU 0 repairs itself at its next reset (Channel repair"),
        ("TPC Repair Pending", "warn", "reset", "GPU 0 repairs itself at its next reset (TPC repair"),
    ],
)
def test_what_the_newest_drivers_say_of_repairs_is_graded(entry: str, level: str, action: str, words: str) -> None:
    text = (OUTPUTS / "h200_virtual_q.txt").read_text().replace(f"{entry}: No", f"{entry}: Yes")
    verdict = judge(gpu_ecc, text, Site(), board("h200", 1))
    assert (verdict.level, verdict.action) == (level, action)
    assert verdict.summary.startswith(words)


def test_a_device_that_says_its_sram_limit_is_exceeded_is_believed_without_a_profile() -> None:
    text = report("h100", setting("Aggregate/SRAM Threshold Exceeded", "Yes"))
    assert judge(gpu_ecc, text, EIGHT, STRANGER).level == "fail"


@pytest.mark.parametrize(
    ("model", "path", "value", "level"),
    [
        ("a100", "Temperature/GPU Current Temp", "88 C", "ok"),
        ("a100", "Temperature/GPU Current Temp", "89 C", "fail"),
        ("a100", "Temperature/Memory Current Temp", "96 C", "fail"),
        ("h200", "Temperature/GPU T.Limit Temp", "-1 C", "ok"),
        ("h200", "Temperature/GPU T.Limit Temp", "-2 C", "fail"),
        ("a100", "Power Readings/Power Draw", "420.00 W", "ok"),
        ("a100", "Power Readings/Power Draw", "421.00 W", "fail"),
        ("h200", "GPU Power Readings/Average Power Draw", "736.00 W", "fail"),
        ("a100", "Power Readings/Enforced Power Limit", "300.00 W", "warn"),
        ("h200", "GPU Power Readings/Current Power Limit", "500.00 W", "warn"),
    ],
)
def test_the_devices_own_limits_of_temperature_and_power_judge(model: str, path: str, value: str, level: str) -> None:
    verdict = judge(gpu_thermal, report(model, setting(path, value)), EIGHT, board(model))
    assert verdict.level == level, verdict.summary


@pytest.mark.parametrize(
    ("word", "level", "action"),
    [
        ("None", "ok", "none"),
        ("Reset", "fail", "reset"),
        ("Reboot", "fail", "reboot"),
        ("Drain P2P", "fail", "isolate"),
    ],
)
def test_the_drivers_own_recovery_action_is_taken(word: str, level: str, action: str) -> None:
    verdict = judge(gpu_recovery, report("h200", setting("Product Name/GPU Recovery Action", word)), EIGHT, NO_GPUS)
    assert (verdict.level, verdict.action) == (level, action)


@pytest.mark.parametrize(
    ("path", "value", "level"),
    [
        ("Fabric/State", "In Progress", "fail"),
        ("Fabric/State", "Not Started", "fail"),
        ("Fabric/Status", "Insufficient Resources", "fail"),
        ("Fabric/State", "N/A", "unknown"),
    ],
)
def test_a_gpu_outside_its_fabric_fails(path: str, value: str, level: str) -> None:
    verdict = judge(gpu_fabric, report("h100", setting(path, value)), EIGHT, board("h100"))
    assert verdict.level == level


def test_a_lone_gpu_joins_no_fabric() -> None:
    text = report("h200", setting("Fabric/State", "N/A"), count=1)
    assert judge(gpu_fabric, text, Site(), board("h200", 1)).level == "ok"
    one_left = Site(gpus=GpuExpectation(count=8))
    assert judge(gpu_fabric, text, one_left, board("h200", 1)).level == "unknown"


def test_another_vbios_on_one_gpu_fails_and_names_both() -> None:
    verdict = judge(gpu_versions, report("h100", setting("VBIOS Version", "96.00.61.00.01")), EIGHT, board("h100"))
    assert (verdict.level, verdict.action) == ("fail", "isolate")
    assert "96.00.61.00.01, 96.00.89.00.01" in verdict.summary


@pytest.mark.parametrize("check", [gpu_clocks, gpu_fabric])
def test_a_model_without_a_profile_is_unknown_where_its_profile_would_judge(check: Check) -> None:
    verdict = judge(check, report("h100"), EIGHT, STRANGER)
    assert verdict.level == "unknown"
    assert "--profiles" in verdict.summary


@EVERY_CHECK
def test_no_gpu_is_ok_where_none_is_expected_and_unknown_where_some_are(check: Check) -> None:
    assert judge(check, "", Site(), NO_GPUS, 127).level == "ok"
    assert judge(check, "No devices were found", Site(), NO_GPUS, 6).level == "ok"
    assert judge(check, "", EIGHT, NO_GPUS, 127).level == "unknown"


@EVERY_CHECK
def test_a_driver_in_trouble_leaves_these_checks_unknown(check: Check) -> None:
    verdict = judge(check, "NVIDIA-SMI has failed because it couldn't communicate", EIGHT, board("h200"), 9)
    assert verdict.level == "unknown"
    assert "see gpus" in verdict.summary


def test_counters_of_every_gpu_are_kept() -> None:
    text = report("h200", setting("ECC Errors/Aggregate/DRAM Correctable", "7"))
    counters = judge(gpu_ecc, text, EIGHT, board("h200")).facts["counters"]
    assert isinstance(counters, dict)
    assert counters["00000000:47:00.0 corrected"] == 7
    assert len(counters) == 16
    rows = judge(gpu_rows, report("h200", setting("Remapped Rows/Correctable Error", "2")), EIGHT, board("h200"))
    assert rows.facts["counters"]["00000000:47:00.0 remapped_rows"] == 2  # type: ignore[index]


@EVERY_MODEL
def test_the_probe_keeps_all_that_the_checks_read_and_little_else(model, install_nvidia_smi):
    whole = (OUTPUTS / f"{model}_q.txt").read_text()
    install_nvidia_smi(f"[ $1 = -q ] && cat {OUTPUTS}/{model}_q.txt")
    done = LocalRunner().run(["sh", "-s"], stdin=render_script({"report": REPORT}, "abc"), deadline_seconds=AMPLE)
    kept = parse_outputs(done.stdout, "abc")["report"].text
    for check in CHECKS:
        one, other = (judge(check, text, Site(), board(model, 1)) for text in (whole, kept))
        assert one == other, check.name
    assert len(kept) < len(whole) / 1.5


def test_entries_are_found_by_their_headings_whatever_follows() -> None:
    node, (gpu,) = parse_report((OUTPUTS / "h200_q.txt").read_text())
    assert node["Driver Version"] == "580.159.04"
    assert gpu.bus_id == "00000000:07:00.0"
    assert gpu.text("Clocks Event Reasons/HW Slowdown") == "Not Active"
    assert gpu.text("Clocks Event Reasons/HW Slowdown/HW Thermal Slowdown") == "Not Active"
    assert gpu.text("Applications Clocks/Graphics") is None
    assert gpu.number("GPU Power Readings/Max Power Limit") == 700.0


def test_a_report_cut_in_the_middle_is_not_taken_for_health() -> None:
    text = report("h200", count=1)
    for check in (gpu_ecc, gpu_rows, gpu_clocks, gpu_thermal):
        cut = text[: text.index("    VBIOS Version")]
        assert judge(check, cut, Site(), board("h200", 1)).level == "unknown"
    assert gpu_versions.judge(Output(text="Driver Version : 1"), Site()).level == "unknown"


def test_persistence_mode_that_is_off_is_a_warning_and_unstated_unknown() -> None:
    off = judge(gpu_persistence, report("h200", setting("Persistence Mode", "Disabled")), EIGHT, board("h200"))
    assert (off.level, off.action) == ("warn", "monitor")
    assert off.summary.startswith("GPU 2 has persistence mode disabled; start nvidia-persistenced")
    unstated = judge(gpu_persistence, report("h200", setting("Persistence Mode", "N/A")), EIGHT, board("h200"))
    assert unstated.level == "unknown"
