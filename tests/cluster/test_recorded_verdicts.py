"""What every check says about every recorded output, whole: outputs/verdicts.txt, one verdict a line.

A change of a check shows here as a change of lines. `python -m tests.cluster.test_recorded_verdicts` writes the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.checks import discover
from cluster.inventory.site import NetworkExpectation, Site
from cluster.profiles import Board
from tests.cluster.gpu_outputs import EIGHT, MODELS, NO_GPUS, OUTPUTS, STRANGER, board, judge, nvlink, report, setting

RECORD = OUTPUTS / "verdicts.txt"
OF_THE_REPORT = (
    "gpu_clocks", "gpu_ecc", "gpu_fabric", "gpu_persistence", "gpu_recovery", "gpu_rows", "gpu_thermal", "gpu_versions",
)  # fmt: skip
OF_THE_LOG = ("disk_errors", "link_flaps", "sxid", "xid")
BROKEN = (
    ("ECC Mode/Current", "Disabled"),
    ("ECC Errors/Volatile/DRAM Uncorrectable", "2"),
    ("ECC Errors/Aggregate/DRAM Correctable", "9"),
    ("Remapped Rows/Pending", "Yes"),
    ("Remapped Rows/Remapping Failure Occurred", "Yes"),
    ("Persistence Mode", "Disabled"),
    ("VBIOS Version", "96.00.99.00.FF"),
    ("Max Clocks/SM", "1200 MHz"),
)
BROKEN_HOPPER = (
    ("GPU Recovery Action", "Reset"),
    ("Fabric/State", "In Progress"),
    ("ECC Errors/Aggregate/SRAM Threshold Exceeded", "Yes"),
)


def cases() -> Iterator[tuple[str, str, str, Site, Board]]:
    """Case, check, output, site and board."""
    for model in MODELS:
        texts = {f"{model} healthy": report(model), f"{model} of no profile": report(model)}
        for path, value in BROKEN + (BROKEN_HOPPER if model == "h200" else ()):
            texts[f"{model} {path} {value}"] = report(model, setting(path, value))
        for case, text in texts.items():
            for check in OF_THE_REPORT:
                yield case, check, text, EIGHT, STRANGER if "no profile" in case else board(model)
        for case, broken in (
            ("healthy", str),
            ("a link down", lambda gpu: gpu.replace("Link 3: 2", "Link 3: <inactive> ")),
        ):
            text = f"gpus 8\n{nvlink(model, 's', broken)}\nerrors\n{nvlink(model, 'e')}"
            yield f"{model} {case}", "nvlink", text, EIGHT, board(model)
    virtual = (OUTPUTS / "h200_virtual_q.txt").read_text()
    for check in OF_THE_REPORT:
        yield "one H200 of a virtual machine", check, virtual, Site(), board("h200", 1)
    four = [(OUTPUTS / f"h200x4_virtual_nvlink_{form}.txt").read_text() for form in "se"]
    yield "four H200 of a virtual machine", "nvlink", f"gpus 4\n{four[0]}\nerrors\n{four[1]}", Site(), board("h200", 4)
    for uptime in ("91000.0", "300000.0"):
        log = f"uptime {uptime}\nadapter ibp26s0\nsource dmesg\n" + (OUTPUTS / "dmesg.txt").read_text()
        for check in OF_THE_LOG:
            yield f"dmesg at {uptime} s", check, log, Site(network=NetworkExpectation(interface="eth0")), board("h100")
    for check in sorted(set(discover()) - {"software"}):  # whose sentence names an interpreter of this machine
        for case, text in (("silence", ""), ("noise", "command not found")):
            yield case, check, text, EIGHT, board("h200")
    for check in ("gpus", "docker", "nvlink", "xid", "gpu_ecc"):
        yield "noise on any machine", check, "command not found", Site(), NO_GPUS


def rendered() -> str:
    """The verdicts; of a model's broken reports, only those that are not ok."""
    checks = discover()
    lines = []
    for case, check, text, site, gpus in cases():
        one = judge(checks[check], text, site, gpus)
        if one.level != "ok" or "healthy" in case or " of a " in case:
            lines.append(f"{case} | {check} | {one.level} | {one.action} | {one.summary}")
    return "\n".join(lines) + "\n"


def test_every_verdict_on_a_recorded_output_is_the_recorded_one() -> None:
    assert rendered().splitlines() == RECORD.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    RECORD.write_text(rendered(), encoding="utf-8")
