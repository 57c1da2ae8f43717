"""Run the attention of one system on CPU ranks; compare each case with dense float64 and with our native baseline.

`run_ranks` starts a program as the ranks of a group on this machine, and waits for all or for the first that fails.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from baselines.called import REQUEST_FILE, UpstreamAttention, render_program
from baselines.fidelity.cases import BATCH, HEAD_DIM, SEQ_LEN, Case, SystemCases
from baselines.fidelity.table import FidelityError, Row, verdict_of
from baselines.install.places import InstallPlace
from baselines.programs import PROGRAMS
from baselines.upstream import foreign_environment
from engine.measurement import finite_error, relative_error, write_json
from engine.reader import to_json
from engine.settings import TrialSettings
from engine.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

    from baselines.fidelity.native import RankResult

_CHARACTERS = 200
_SECONDS = 240.0  # of one start of ranks
_OUT = "out"
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 5.0  # for ranks that wait for one that failed
_REFUSALS = ("AssertionError", "ValueError")  # a system's own checks


def attention_rows(
    name: str, system: SystemCases, cases: Sequence[Case], place: InstallPlace | None, release: str, scratch: Path
) -> list[Row]:
    """A row for each case. `scratch` is a folder that receives inputs, results and logs of ranks."""
    scratch.mkdir(parents=True, exist_ok=True)
    wanted = {case.name: write_inputs(case, scratch) for case in cases}
    groups: dict[tuple[int, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.ranks, case.name if case.alone else ""), []).append(case)
    rows = []
    for number, ((ranks, _), group) in enumerate(groups.items()):
        ended = _run_system(system, group, place, ranks, scratch / f"theirs{number}", scratch)
        with_native = [case for case in group if case.native]
        native_ended = _run_native(with_native, ranks, scratch / f"ours{number}", scratch) if with_native else ""
        if native_ended:
            raise RuntimeError(f"our own ranks failed beside {name}: {native_ended}")
        for case in group:
            row = Row(
                system=system.title, release=release, case=case.name, form=case.form, kernel=system.kernel,
                ranks=case.ranks, dtype=case.dtype, heads=case.heads, kv_heads=case.kv_heads, verdict="fails",
                native=case.native, reproduce=f"burst setup baselines fidelity {name} --case {case.name}",
            )  # fmt: skip
            row = _with_results(row, case, wanted[case.name], scratch, ended)
            rows.append(_with_native(row, case, wanted[case.name], scratch) if case.native else row)
    order = [case.name for case in cases]
    return sorted(rows, key=lambda row: order.index(row.case))


def settings_of(case: Case, method: str) -> TrialSettings:
    """The case as a trial of a method: what an adapter or a native baseline is asked for."""
    shape = ModelShape(
        name="fidelity", layers=1, hidden=case.heads * HEAD_DIM, ffn=64, heads=case.heads, kv_heads=case.kv_heads,
        head_dim=HEAD_DIM, vocab=256,
    )  # fmt: skip
    return TrialSettings(
        task="attention",
        method=method,
        model=shape,
        seq_len=SEQ_LEN,
        batch_size=BATCH,
        cp_size=case.ranks,
        dtype="fp32" if case.dtype == "fp32" else "bf16",
    )


def write_inputs(case: Case, scratch: Path) -> dict[str, Tensor]:
    """q, k, v and dout to a file, rounded to the case's dtype, so that arithmetic alone can differ; and the float64
    results of dense attention."""
    import torch

    from engine.attention.masks import Causal
    from engine.attention.reference import dense_gradients

    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if case.dtype == "fp32" else torch.bfloat16
    heads = {"q": case.heads, "k": case.kv_heads, "v": case.kv_heads, "dout": case.heads}
    whole = {
        name: torch.randn(BATCH, SEQ_LEN, count, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype).double()
        for name, count in heads.items()
    }
    torch.save(whole, scratch / f"{case.name}.inputs.pt")
    truths = dense_gradients(whole["q"], whole["k"], whole["v"], whole["dout"], Causal())
    return dict(zip((_OUT, "dq", "dk", "dv"), truths, strict=True))


def _run_system(
    system: SystemCases, cases: Sequence[Case], place: InstallPlace | None, ranks: int, folder: Path, scratch: Path
) -> str:
    """Run the cases through the adapter, as a trial of `task: attention` is run; see `run_ranks`."""
    requests = [request_of(system, case, place, scratch) for case in cases]
    request = requests[0] | {"cases": requests}
    if place is None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REQUEST_FILE).write_text(json.dumps(request, indent=1), encoding="utf-8")
        command = [sys.executable, "-u", str(PROGRAMS / "attention.py"), str(folder / REQUEST_FILE)]
        return run_ranks(command, {}, ranks, folder, _SECONDS)
    rendered = render_program("attention.py", request, folder, place)
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in rendered.files.items():
        (folder / path).write_text(content, encoding="utf-8")
    return run_ranks(rendered.command, rendered.environment, ranks, folder, _SECONDS)


def request_of(system: SystemCases, case: Case, place: InstallPlace | None, scratch: Path) -> dict[str, object]:
    """What `programs/attention.py` reads: the adapter's own request, and the case."""
    own = {
        "inputs": str(scratch / f"{case.name}.inputs.pt"),
        "left": str(scratch / f"{case.name}.theirs"),
        "layout": case.layout,
        "dtype": case.dtype,
        **case.options,
    }
    if system.call:
        own["call"] = system.call
    if place is None:
        settings = settings_of(case, "torch")
        shape = {"seq_len": SEQ_LEN, "batch_size": BATCH, "head_dim": HEAD_DIM}
        return shape | {"heads": settings.model.heads, "kv_heads": settings.model.kv_heads} | own
    adapter: UpstreamAttention = importlib.import_module(f"baselines.{system.package}").METHOD
    return adapter.request(settings_of(case, adapter.name), place.source) | own


def _run_native(cases: Sequence[Case], ranks: int, folder: Path, scratch: Path) -> str:
    requests = [
        {
            "settings": to_json(settings_of(case, case.native)),
            "module": f"baselines.{case.native}",
            "node_size": case.node_size,
            "inputs": str(scratch / f"{case.name}.inputs.pt"),
            "left": str(scratch / f"{case.name}.ours"),
        }
        for case in cases
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / REQUEST_FILE, {"cases": requests})
    command = [sys.executable, "-m", "baselines.fidelity.native", str(folder / REQUEST_FILE)]
    return run_ranks(command, own_environment(), ranks, folder, _SECONDS)


def _with_results(row: Row, case: Case, wanted: Mapping[str, Tensor], scratch: Path, ended: str) -> Row:
    """The row with what the system's ranks left, or why they left nothing."""
    left = _left(scratch, f"{case.name}.theirs", case.ranks)
    errors = [each for each in left if each is not None and "error" in each]
    if errors:
        kind, text, where = errors[0]["error"], errors[0]["text"], errors[0]["where"]
        return replace(
            row, verdict="refused" if kind in _REFUSALS else "fails", found=f"{kind} at {where}: {_short(text)}"
        )
    whole = [each for each in left if each is not None]
    if len(whole) < case.ranks:
        return replace(row, found=ended or "a rank left no result")
    found = compared(whole, wanted)
    verdict, sentence = verdict_of(found, case.dtype)
    expected = None if case.formula is None else round(case.formula.count(case))
    return replace(
        row,
        verdict=verdict,
        found=sentence,
        errors=found,
        sent_bytes=max(sum(each["sent"].values()) for each in whole),
        sent_formula=case.formula.words if case.formula else "",
        sent_expected=expected,
    )


def _with_native(row: Row, case: Case, wanted: Mapping[str, Tensor], scratch: Path) -> Row:
    left = [each for each in _left(scratch, f"{case.name}.ours", case.ranks) if each is not None]
    return replace(
        row,
        native_errors=compared(left, wanted),
        native_sent_bytes=max(sum(each["sent"].values()) for each in left),
        native_sent_expected=max(each["expected"] for each in left),
    )


def compared(left: Sequence[RankResult], wanted: Mapping[str, Tensor]) -> dict[str, FidelityError]:
    """The error of each tensor, put together from the ranks' tokens. Raises ValueError for tokens that overlap."""
    import torch

    held = sorted(position for each in left for position in each["positions"])
    if held != list(range(SEQ_LEN)):
        raise ValueError(f"the ranks hold {len(held)} positions, expected each of {SEQ_LEN} once")
    errors = {}
    for name, truth in wanted.items():
        found = torch.empty_like(truth)
        for each in left:
            found[:, each["positions"]] = each["tensors"][name].double().reshape(found[:, each["positions"]].shape)
        errors[name] = error_of(found, truth)
    return errors


def error_of(found: Tensor, truth: Tensor) -> FidelityError:
    """The error of a float64 tensor; NOT_FINITE for one that is not finite everywhere."""
    return FidelityError(
        relative=relative_error(found, truth), largest=finite_error((found - truth).abs().max().item())
    )


def _left(scratch: Path, name: str, ranks: int) -> list[RankResult | None]:
    """What each rank left; None where it left nothing."""
    import torch

    paths = [scratch / f"{name}.rank{rank}.pt" for rank in range(ranks)]
    return [torch.load(path) if path.exists() else None for path in paths]


def _short(text: str) -> str:
    """The start of an error's text, without addresses, which differ from run to run, and paths of torch's build."""
    text = re.sub(r"\[[\d.]+\]:\d+[^\s)]*", "another rank", text)
    text = re.sub(r"\[(enforce fail at )?/[^\]\s]*\]\s*", "", text)
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 3] + "..."


def run_ranks(
    command: Sequence[str], environment: Mapping[str, str], world_size: int, folder: Path, seconds: float
) -> str:
    """Run `command` on gloo ranks with torchrun's variables; their output goes to FOLDER/rank<r>.log.

    Returns "" when all ended with code 0, else one sentence. No process of the ranks outlives the call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    programs, processes = [Path(command[0]).parent], []
    with socket.socket() as port:  # open to the end, so that no other program is given this port
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        common = {
            "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.getsockname()[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo", **environment,
        }  # fmt: skip
        try:
            for rank in range(world_size):
                own = foreign_environment(os.environ, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, programs)
                with open(folder / f"rank{rank}.log", "w", encoding="utf-8") as log:
                    started = subprocess.Popen(
                        command, env=own, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True,
                    )  # fmt: skip
                processes.append(started)
            return _wait(processes, seconds, folder)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def own_environment() -> dict[str, str]:
    """What this program's own interpreter needs to find our packages."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float, folder: Path) -> str:
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end:
            if any(process.poll() for process in processes):
                break
            return f"the ranks did not end within {seconds:g} s{last_line(folder)}"
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_LOOK_SECONDS)
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if not failed:
        return ""
    code = processes[failed[0]].returncode
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"rank {failed[0]} {ended}{last_line(folder, failed[0])}"


def last_line(folder: Path, rank: int = 0) -> str:
    """The last line that a rank printed, as the end of a sentence."""
    lines = (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {lines[-1].strip()[:200]}" if lines else ""
