"""GPU checks judged on what nvidia-smi prints.

Captured from an H200 (driver 580.159.04): one healthy GPU, a busy one, an index that does not exist (status 6). Node
outputs with eight GPUs repeat the captured row; the other broken ones are written after the vendor's documented
messages and exit statuses, since no broken board was at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.checks import conclude
from cluster.checks.gpu import gpu_memory, gpus
from cluster.inventory.site import GpuExpectation, GpuMemoryLimit, Site
from cluster.probing.probe import Output, parse_outputs, render_script
from cluster.profiles import Board
from cluster.transport.reach import LocalRunner
from tests.patience import AMPLE

UUID = "GPU-10597eaf-9a20-6f3c-deae-3420ff422ae3"
H200 = f"0, {UUID}, 00000000:00:06.0, NVIDIA H200, 580.159.04, 143771"
BUSY = f"gpu 0, {UUID}, 1643\nprocess {UUID}, 608, 1634, python3\nowner 608 root"
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running."
)

EIGHT_H200 = Site(gpus=GpuExpectation(count=8, model="H200"))
ANYTHING = Site()
NO_GPUS = Site(gpus=GpuExpectation(count=0))


def rows(count: int, row: str = H200) -> str:
    return "\n".join(f"{index}{row[1:]}" for index in range(count))


SOUND = "8 x NVIDIA H200, driver 580.159.04"
SEVEN = "7 x NVIDIA H200, but the site expects 8 GPUs; GPUs that answer: 0, 1, 2, 3, 4, 5, 6"
TWO_MODELS = rows(1) + "\n" + H200.replace("0, ", "1, ", 1).replace("H200", "H100 PCIe")


@pytest.mark.parametrize(
    ("text", "site", "level", "action", "words"),
    [
        (rows(8), EIGHT_H200, "ok", "none", SOUND),
        (rows(8), ANYTHING, "ok", "none", SOUND),
        (rows(7), EIGHT_H200, "fail", "reboot", SEVEN),
        (rows(1), NO_GPUS, "fail", "isolate", ""),
        (rows(8, H200.replace("H200", "H100 80GB HBM3")), EIGHT_H200, "fail", "isolate", "expects H200"),
        (TWO_MODELS, ANYTHING, "warn", "monitor", ""),
        ("Segmentation fault", ANYTHING, "unknown", "none", ""),
    ],
)
def test_the_gpus_that_answer_are_counted_and_compared_with_the_site(text, site, level, action, words):
    verdict = gpus.judge(Output(text=text), site)
    assert (verdict.level, verdict.action) == (level, action)
    assert words in verdict.summary
    assert "count" not in verdict.facts or verdict.facts["count"] == text.count("NVIDIA")


@pytest.mark.parametrize("judge", [gpus.judge, gpu_memory.judge])
@pytest.mark.parametrize("site", [ANYTHING, NO_GPUS])
@pytest.mark.parametrize(
    "output", [Output(text="", exit_status=127), Output(text="No devices were found", exit_status=6)]
)
def test_no_gpu_is_ok_where_none_is_expected(judge, site, output):
    assert judge(output, site).level == "ok"


def test_no_driver_program_fails_where_gpus_are_expected() -> None:
    output = Output(text="", exit_status=127)
    assert gpus.judge(output, EIGHT_H200).level == "fail"
    assert gpu_memory.judge(output, EIGHT_H200).level == "unknown"


@pytest.mark.parametrize("judge", [gpus.judge, gpu_memory.judge])
@pytest.mark.parametrize(
    ("status", "text", "level", "action"),
    [
        (8, "WARNING: external power cables are not attached", "fail", "isolate"),
        (9, NO_DRIVER, "fail", "reboot"),
        (10, "interrupt issue", "fail", "reboot"),
        (14, "WARNING: infoROM is corrupted at gpu 0000:00:06.0", "fail", "isolate"),
        (15, "The GPU at 0000:00:06.0 has fallen off the bus", "fail", "reboot"),
        (18, "Failed to initialize NVML: Driver/library version mismatch", "fail", "reboot"),
        (255, "Unable to determine the device handle for GPU 0000:00:06.0: Unknown Error", "fail", "reboot"),
        (0, rows(7) + "\nUnable to determine the device handle for GPU7: 0000:E3:00.0: GPU is lost.", "fail", "reboot"),
        (0, rows(7) + f"\n7, {UUID}, 00000000:E3:00.0, [GPU requires reset], 580.159.04, 1", "fail", "reset"),
        (2, 'Field "wat" is not a valid field to query.', "unknown", "none"),
        (4, "Insufficient Permissions", "unknown", "none"),
    ],
)
def test_what_nvidia_smi_complains_about_is_the_verdict(judge, status, text, level, action):
    verdict = judge(Output(text=text, exit_status=status), EIGHT_H200)
    assert (verdict.level, verdict.action) == (level, action)


@pytest.mark.parametrize("output", [Output(text=rows(8), exit_status=124), Output(text="", exit_status=None), None])
def test_a_probe_that_hangs_or_never_ran_is_unknown(output: Output | None) -> None:
    verdict = conclude(gpus, gpus.probe(EIGHT_H200), output, "sh: not found", EIGHT_H200, Board())
    assert verdict.level == "unknown"


BY_ROOT = "busy: 1643 MiB of GPU memory in use on GPU 0 by root: python3 (pid 608, GPU 0, 1634 MiB)"


@pytest.mark.parametrize(
    ("text", "level", "busy", "words"),
    [
        ("\n".join(f"gpu {index}, GPU-{index}, 4" for index in range(8)), "ok", False, ""),
        (BUSY, "warn", True, BY_ROOT),
        (
            "\n".join(f"gpu {index}, GPU-{index}, 14" for index in range(8)),
            "warn", True, "112 MiB of GPU memory in use over 8 GPUs",
        ),
        (BUSY.partition("\nowner")[0], "warn", True, "a process this user cannot see"),
        (f"gpu 0, {UUID}, 0\nprocess {UUID}, 608, 1634, python3", "ok", False, ""),  # which vanished
        (f"gpu 0, {UUID}, [N/A]", "unknown", False, ""),  # the device does not report it
        ("Segmentation fault", "unknown", False, ""),
    ],
)  # fmt: skip
def test_memory_in_use_makes_a_node_busy_and_says_whose_it_is(text, level, busy, words):
    verdict = gpu_memory.judge(Output(text=text), ANYTHING)
    assert (verdict.level, verdict.busy) == (level, busy)
    assert words in verdict.summary


FAKE = """
case $1 in
    --query-gpu=*) echo x >> $STATE/samples; {memory} ;;
    --query-compute-apps=*) echo "{uuid}, $PPID, 1634, /usr/bin/python3, with comma" ;;
esac
"""


def run_memory_probe(site: Site) -> Output:
    script = render_script({"gpu_memory": gpu_memory.probe(site)}, "abc")
    done = LocalRunner().run(["sh", "-s"], stdin=script, deadline_seconds=AMPLE)
    return parse_outputs(done.stdout, "abc")["gpu_memory"]


PATIENT = Site(gpu_memory=GpuMemoryLimit(tries=3, wait_seconds=0.05))


def test_a_busy_node_is_sampled_again_before_it_is_called_busy(install_nvidia_smi: Callable[[str], Path]) -> None:
    state = install_nvidia_smi(FAKE.format(uuid=UUID, memory=f'echo "0, {UUID}, 1643"'))
    verdict = gpu_memory.judge(run_memory_probe(PATIENT), PATIENT)
    assert verdict.busy
    assert "python3, with comma (pid " in verdict.summary
    assert (state / "samples").read_text().count("x") == 3


def test_memory_of_a_process_that_has_just_ended_does_not_make_the_node_busy(install_nvidia_smi):
    memory = f'[ $(wc -l < $STATE/samples) -gt 1 ] && echo "0, {UUID}, 0" || echo "0, {UUID}, 1643"'
    state = install_nvidia_smi(FAKE.format(uuid=UUID, memory=memory))
    verdict = gpu_memory.judge(run_memory_probe(PATIENT), PATIENT)
    assert (verdict.level, verdict.busy) == ("ok", False)
    assert (state / "samples").read_text().count("x") == 2


def test_the_status_of_a_failing_nvidia_smi_reaches_the_judge(install_nvidia_smi: Callable[[str], Path]) -> None:
    install_nvidia_smi(f'echo "{NO_DRIVER}"; exit 9')
    output = run_memory_probe(PATIENT)
    assert (output.exit_status, output.text) == (9, NO_DRIVER)
