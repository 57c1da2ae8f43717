"""What `nvidia-smi -q` reports of each GPU's health: memory errors, replaced rows, clocks, temperature and power."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cluster.checks import Rise, check
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.nvidia_smi import REPORT, GpuReport, judge_each, parse_report
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict, fail, unknown, warn, with_facts
from cluster.profiles import Board, Clocks

_WEARS_OUT = Rise(level="warn", action="monitor", meaning="GPU memory is wearing out")


@check(REPORT, "facebookresearch/gcm; stas00/ml-engineering (more than 4 SRAM errors: return)", rise=_WEARS_OUT)
def gpu_ecc(output: Output, site: Site, board: Board) -> Verdict:
    """Fails on uncorrected errors since the driver was loaded, on disabled ECC, beyond the vendor's life limit and on
    memory that cannot be repaired; warns while a repair waits for a reset."""

    def findings(gpu: GpuReport) -> Iterator[Verdict]:
        mode = gpu.text("ECC Mode/Current")
        if mode is None:
            yield unknown("does not say whether ECC is on")
            return
        if mode != "Enabled":
            yield fail(f"has ECC {mode.lower()}; run nvidia-smi -e 1 and reset it", "reset")
            return
        if volatile := _errors(gpu, "Volatile", "Uncorrectable"):
            yield fail(f"has {volatile} uncorrected errors since it was started", "reset")
        # Stated by driver 580, and absent before.
        if gpu.text("ECC Errors/Unrepairable Memory") == "Yes":
            yield fail("has memory that cannot be repaired: return it")
        if waiting := [part for part in ("Channel", "TPC") if gpu.text(f"ECC Errors/{part} Repair Pending") == "Yes"]:
            yield warn(f"repairs itself at its next reset ({' and '.join(waiting)} repair is pending)", "reset")
        sram = _errors(gpu, "Aggregate", "Uncorrectable", "SRAM")
        if gpu.text("ECC Errors/Aggregate/SRAM Threshold Exceeded") == "Yes":
            yield fail("has more SRAM errors than its vendor allows: return it")
        elif sram and board.profile is None:
            yield unknown(f"has {sram} SRAM errors over its life; {board.no_profile}")
        elif board.profile and sram > (limit := board.profile.ecc.return_above_sram_errors):
            yield fail(f"has {sram} uncorrected SRAM errors over its life; above {limit} its vendor takes it back")

    verdict = judge_each(output, site, findings, "ECC on and no uncorrected error on {gpus}")
    return _counted(
        verdict,
        output,
        site,
        uncorrected=lambda gpu: _errors(gpu, "Aggregate", "Uncorrectable"),
        corrected=lambda gpu: _errors(gpu, "Aggregate", " Correctable"),
    )


def _errors(gpu: GpuReport, period: str, kind: str, memory: str = "") -> int:
    """Counts whose name holds `kind`; drivers split uncorrectable SRAM errors by how they were found, or do not."""
    counts = gpu.below(f"ECC Errors/{period}")
    return sum(int(value) for name, value in counts.items() if kind in name and memory in name and value.isdigit())


def _counted(verdict: Verdict, output: Output, site: Site, **counters: Callable[[GpuReport], int]) -> Verdict:
    """The verdict with these counters of every GPU for the history."""
    if nvidia_smi.blocked(output, site):
        return verdict
    reports = parse_report(output.text)[1]
    return with_facts(
        verdict, counters={f"{gpu.bus_id} {name}": count(gpu) for gpu in reports for name, count in counters.items()}
    )


@check(REPORT, "NVIDIA GPU memory error management; pending as a warning is this project's judgement", rise=_WEARS_OUT)
def gpu_rows(output: Output, site: Site, board: Board) -> Verdict:
    """Fails when a bad row of memory could not be replaced, warns while one waits for the next reset."""

    def findings(gpu: GpuReport) -> Iterator[Verdict]:
        failed = gpu.text("Remapped Rows/Remapping Failure Occurred")
        pending = gpu.text("Remapped Rows/Pending")
        if failed is None or pending is None:
            yield unknown("does not report remapped rows; it or its driver is too old")
        elif failed != "No":
            yield fail("could not replace a bad row: return it")
        elif pending != "No":
            yield warn("replaces a bad row at its next reset", "reset")

    def remapped(gpu: GpuReport) -> int:
        kinds = ("Correctable", "Uncorrectable")
        return int(sum(gpu.number(f"Remapped Rows/{kind} Error") or 0 for kind in kinds))

    verdict = judge_each(output, site, findings, "no row remapping failed or pending on {gpus}")
    return _counted(verdict, output, site, remapped_rows=remapped)


_REASONS = ("Clocks Event Reasons", "Clocks Throttle Reasons")  # the second before driver 535
_HARDWARE = ("HW Slowdown", "HW Slowdown/HW Thermal Slowdown", "HW Slowdown/HW Power Brake Slowdown")


@check(REPORT, "facebookresearch/gcm, clock_policy (30 and 75 MHz); NVML clocks event reasons")
def gpu_clocks(output: Output, site: Site, board: Board) -> Verdict:
    """Fails on a hardware slowdown and on clocks far below the model's; a software power cap is normal under load."""

    def findings(gpu: GpuReport) -> Iterator[Verdict]:
        states = {
            reason.rpartition("/")[2]: gpu.text(*(f"{section}/{reason}" for section in _REASONS))
            for reason in _HARDWARE
        }
        if not any(states.values()):
            yield unknown("does not report the reasons for its clocks")
        elif active := [reason for reason, state in states.items() if state == "Active"]:
            yield fail(f"is slowed down by its hardware ({', '.join(active)}): look at cooling and power")
        elif gpu.text(*(f"{section}/SW Thermal Slowdown" for section in _REASONS)) == "Active":
            yield warn("is slowed down by its driver because it is hot")
        if board.profile:
            yield from _drift(gpu, board.profile.clocks)

    verdict = judge_each(output, site, findings, "no slowdown on {gpus}")
    if verdict.level == "ok" and board.profile is None and not nvidia_smi.blocked(output, site):
        return unknown(f"no slowdown, but the clocks themselves: {board.no_profile}")
    return verdict


def _drift(gpu: GpuReport, clocks: Clocks) -> Iterator[Verdict]:
    """How far the highest clock is below the model's, or the application clock below its own default."""
    highest = gpu.number("Max Clocks/SM")
    if highest is None:
        yield unknown("does not state its highest SM clock")
        return
    chosen = gpu.number("Applications Clocks/Graphics")
    usual = gpu.number("Default Applications Clocks/Graphics")
    drift, reference = clocks.sm_mhz - highest, float(clocks.sm_mhz)
    if usual is not None and chosen is not None and usual - chosen >= drift:
        drift, reference = usual - chosen, usual
    summary = f"is set {drift:g} MHz below its model's clock of {reference:g} MHz"
    if drift >= clocks.fail_below_mhz:
        yield fail(f"{summary}; run nvidia-smi -rac and -rgc", "reset")
    elif drift >= clocks.warn_below_mhz:
        yield warn(summary)


_POWER = ("GPU Power Readings", "Power Readings")  # the second before driver 525


@check(REPORT, "NVML temperature and power limits of the device itself")
def gpu_thermal(output: Output, site: Site, board: Board) -> Verdict:
    """Fails from the device's own slowdown temperature or above its highest power; warns when its power is capped."""

    def findings(gpu: GpuReport) -> Iterator[Verdict]:
        yield from _temperature(gpu)
        yield from _power(gpu, board.limits.power_fail_above_share)

    return judge_each(output, site, findings, "temperature and power within the limits of {gpus}")


def _temperature(gpu: GpuReport) -> Iterator[Verdict]:
    """Hopper states the distance to its limits (T.Limit), older boards the limits themselves."""
    current = gpu.number("Temperature/GPU Current Temp")
    distance = gpu.number("Temperature/GPU T.Limit Temp")
    slowdown_distance = gpu.number("Temperature/GPU Slowdown T.Limit Temp")
    limit = gpu.number("Temperature/GPU Slowdown Temp")
    if current is not None and distance is not None and slowdown_distance is not None:
        limit = current + distance - slowdown_distance
    if current is None or limit is None:
        yield unknown("does not state its temperature or its slowdown limit")
        return
    if current >= limit:
        yield fail(f"is at {current:g} C, its slowdown limit is {limit:g} C: look at cooling")
    memory, highest = gpu.number("Temperature/Memory Current Temp"), gpu.number("Temperature/Memory Max Operating Temp")
    if memory is not None and highest is not None and memory > highest:
        yield fail(f"has memory at {memory:g} C, at most {highest:g} C is allowed: look at cooling")


def _power(gpu: GpuReport, fail_above_share: float) -> Iterator[Verdict]:
    def watts(*names: str) -> float | None:
        return gpu.number(*(f"{section}/{name}" for section in _POWER for name in names))

    draw = watts("Average Power Draw", "Power Draw", "Instantaneous Power Draw")
    limit, usual = watts("Current Power Limit", "Enforced Power Limit", "Power Limit"), watts("Default Power Limit")
    highest = watts("Max Power Limit")
    if draw is None or limit is None:
        yield unknown("does not state its power or its limit")
    elif highest is not None and draw > highest * fail_above_share:
        yield fail(f"draws {draw:g} W, its highest limit is {highest:g} W")
    elif usual is not None and limit < usual:
        yield warn(f"is capped at {limit:g} W, by default {usual:g} W")
