"""`python -m baselines.attempt SYSTEM --source DIR`: try one of the paper's programs on one GPU.

The paper's copies want Python 3.10 and torch 2.4. This runs them with the interpreter at hand instead: the adapter's
own command, environment and files, with stand-ins of ours (`baselines/stand_ins`) in the place of packages that cannot
be imported. It ends with the steps that the program printed, or with the file and line where it failed. No file of the
system changes. No record is written: an attempt says how far a system comes, not how fast it is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baselines.install.places import InstallPlace
from baselines.pin import FOLDER
from baselines.stand_ins import python_path
from baselines.upstream import PrintedSteps, Upstream, foreign_environment, seconds_of
from engine.settings import Checkpoint, ModelShape, Steps, TrialSettings

# The stand-ins that each system may need, and the module, or name of a module, that shows that the real one is there.
SYSTEMS: Mapping[str, Mapping[str, str]] = {
    "megatron_deepspeed": {
        "amp_C": "amp_C",
        "apex": "apex.normalization",
        "flash_attn": "flash_attn.flash_attn_interface",
    },
    "internevo": {
        "burst_attn": "burst_attn",
        "datasets": "datasets.distributed",
        "flash_attn": "flash_attn.flash_attn_interface",
        "internevo_names": "transformers.modeling_utils:shard_checkpoint",
    },
    "burst_engine": {
        "flash_attn": "flash_attn.flash_attn_interface",
        "ring_flash_attn": "ring_flash_attn",
    },
}
SHAPE = ModelShape(name="small", layers=4, hidden=1024, ffn=2816, heads=8, kv_heads=8, head_dim=128, vocab=32000)
_FRAME = re.compile(r'^\s*(?:\[rank\d+\]:\s*)?File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
_ERROR = re.compile(
    r"^(?:\[rank\d+\]:\s*)?((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE
)
_DOCUMENTS, _DOCUMENT_TOKENS = 64, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """How one attempt ended."""

    system: str
    code: int  # the program's exit code; -9 where its time was over
    printed: PrintedSteps
    failure: str  # "" where as many steps were printed as were asked for
    stand_ins: tuple[str, ...]


def missing_packages(system: str) -> tuple[str, ...]:
    """The stand-ins that are needed here: those whose real package this interpreter cannot import."""
    found = []
    for name, probe in SYSTEMS[system].items():
        module, _, attribute = probe.partition(":")
        try:
            imported = importlib.import_module(module)
            if attribute:
                getattr(imported, attribute)
        except Exception:  # noqa: BLE001 - whatever a package raises at its import, it cannot be used
            found.append(name)
    return tuple(found)


def failing_line(output: str, source: Path) -> str:
    """The innermost line of the system's own files in the last traceback, and the error; "" without a traceback."""
    # What Python prints while it ends, of objects it takes away, is a consequence.
    _, found, last = output.partition("\nException ignored in")[0].rpartition("Traceback (most recent call last)")
    if not found:
        return ""
    frames = [(str(Path(path).resolve()), line, where) for path, line, where in _FRAME.findall(last)]
    own = [frame for frame in frames if Path(frame[0]).is_relative_to(source)]
    error = (_ERROR.findall(last) or ["an error without a name"])[-1].strip()
    places = []
    for path, line, where in dict.fromkeys([*own[-1:], *frames[-1:]]):
        inside = Path(path).is_relative_to(source)
        short = Path(path).relative_to(source) if inside else Path(*Path(path).parts[-3:])
        places.append(f"{short}:{line} in {where}")
    return f"{', called at '.join(reversed(places))}: {error}" if places else error


def trial(system: str, seq_len: int, data: str) -> TrialSettings:
    """Two steps of a small model on one GPU, with the settings of the paper's runs where one GPU has them."""
    return TrialSettings(
        method=f"{system}_upstream",
        task="train",
        model=SHAPE,
        seq_len=seq_len,
        checkpoint=Checkpoint(every=1, tail=0),
        steps=Steps(warmup=1, measured=1),
        learning_rate=1e-4,
        lm_head_fusion=system
        != "burst_engine",  # its fused loss needs a package of the pinned commit; a default elsewhere
        data=data,
    )


def write_megatron_data(prefix: Path) -> None:
    """A dataset in Megatron's format, `prefix`.bin and .idx, of tokens that repeat. Its layout: magic, version, type of
    the tokens, counts, then the documents' sizes, byte offsets and indices."""
    tokens = array("H", [(7 * index) % 30000 + 1 for index in range(_DOCUMENT_TOKENS)])
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes() * _DOCUMENTS)
    sizes = array("i", [_DOCUMENT_TOKENS] * _DOCUMENTS)
    offsets = array("q", [2 * _DOCUMENT_TOKENS * index for index in range(_DOCUMENTS)])
    uint16 = 8  # its code for the type
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, uint16, _DOCUMENTS, _DOCUMENTS + 1)
    indices = array("q", range(_DOCUMENTS + 1))
    prefix.with_suffix(".idx").write_bytes(head + sizes.tobytes() + offsets.tobytes() + indices.tobytes())


def write_burst_data(folder: Path) -> None:
    """A dataset in the format of BurstEngine's: records between 0x1F and 0x00 in one block, and `meta.bin`."""
    record = pickle.dumps({"input": "what the sea is " * 64, "<ans>": "water " * 256})
    entry = b"\x1f" + struct.pack("I", len(record)) + record
    block = 1 << 20
    folder.mkdir(parents=True)
    (folder / "text").write_bytes((entry * 256).ljust(block, b"\x00"))
    meta = {
        "file_name": "text", "block_begin": 0, "block_end": 1, "nbytes": 256 * len(entry), "nlines": 256, "mask": False,
        "block_size": block,
    }  # fmt: skip
    (folder / "meta.bin").write_text(json.dumps(meta) + "\n", encoding="utf-8")


def prepared(system: str, source: Path, folder: Path) -> InstallPlace:
    """A place below `folder` whose source is the given one and whose interpreter is this one; nothing is installed."""
    place = InstallPlace(system=system, flavour="paper", base=folder / "systems")
    place.folder.mkdir(parents=True)
    (place.base / system / "pin.yaml").write_bytes((FOLDER / system / "pin.yaml").read_bytes())
    place.source.symlink_to(source)
    place.python.parent.mkdir(parents=True)
    place.python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    place.python.chmod(0o755)
    return place


def attempt(
    system: str,
    source: Path,
    folder: Path,
    *,
    seq_len: int,
    seconds: float,
    paths: Sequence[Path],
    words: dict[str, str],
) -> Attempt:
    """Run the program once; its output goes to `folder`/output.log. `words` are replaced in its command."""
    method: Upstream = importlib.import_module(f"baselines.{system}").METHOD
    data = folder / "data"
    if system == "burst_engine":
        write_burst_data(data)
    else:
        write_megatron_data(data)
    settings = trial(system, seq_len, str(data))
    place, names = prepared(system, source, folder), missing_packages(system)
    rendered = method.render(settings, folder, place)
    for path, content in rendered.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")
    environment = foreign_environment(os.environ, rendered.environment, []) | {
        "PYTHONPATH": os.pathsep.join(filter(None, [python_path(names), *map(str, paths)])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "FLASH_ATTN_STAND_IN": "2.6", "FLASH_ATTN_STAND_IN_ATTEMPT": "1",
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        # InternEvo puts it in brackets, in which Python takes IPv6 alone since 3.11.4.
        "MASTER_ADDR": "::1" if system == "internevo" else "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }  # fmt: skip
    command = [words.get(word, word) for word in rendered.command]
    log = folder / "output.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=rendered.folder or folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            _end(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    printed = method.parse(text)
    failure = ""
    if len(seconds_of(printed, settings)) < method.steps(settings):
        failure = failing_line(text, source.resolve()) or (
            f"no traceback after {seconds:g} s" if code == -signal.SIGKILL else f"exit code {code} without a traceback"
        )
        if failure.endswith("without a traceback"):
            failure += "; last line: " + next(
                (line.strip() for line in reversed(text.splitlines()) if line.strip()), "-"
            )
    return Attempt(system=system, code=code, printed=printed, failure=failure, stand_ins=names)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the program, its own processes included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def main(words: Sequence[str]) -> int:
    """Exit code 0 where the steps were printed, 1 where not."""
    parser = argparse.ArgumentParser(prog="python -m baselines.attempt", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument(
        "--source", type=Path, required=True, metavar="DIR", help="the system's checkout, as its pin says"
    )
    parser.add_argument(
        "--path", type=Path, action="append", default=[], metavar="DIR", help="a folder with packages it needs"
    )
    parser.add_argument("--word", action="append", default=[], metavar="OLD=NEW", help="replace a word of its command")
    parser.add_argument(
        "--seq-len", type=int, default=8192, metavar="N", help="tokens of the one sequence (default: 8192)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="the program is ended after this (default: 60)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="an empty folder for its files and output.log")
    arguments = parser.parse_args(words)
    if not arguments.source.is_dir():
        parser.error(f"--source is {arguments.source}, and no such folder exists; name the system's checkout")
    program = InstallPlace(system=arguments.system, flavour="paper").pinned.entry
    if not (arguments.source / program).is_file():
        parser.error(f"--source is {arguments.source}, which has no {program}; name the folder that its pin names")
    if missing := next((path for path in arguments.path if not path.is_dir()), None):
        parser.error(f"--path is {missing}, and no such folder exists; name a folder with packages")
    if arguments.seq_len < 1:
        parser.error(f"--seq-len is {arguments.seq_len}; give at least one token")
    if not 0 < arguments.seconds < math.inf:
        parser.error(f"--seconds is {arguments.seconds:g}; give a number above 0")
    pairs = [word.partition("=") for word in arguments.word]
    if wrong := next((old for old, sign, _ in pairs if not sign), None):
        parser.error(f"--word is {wrong}; expected OLD=NEW")
    try:
        folder = arguments.out or Path(tempfile.mkdtemp(prefix="attempt-"))
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
    except OSError as error:
        parser.error(f"--out is {arguments.out}, which cannot be written ({error.strerror}); name another folder")
    if not empty:
        parser.error(f"--out is {folder}, which is not empty; name a new folder")
    done = attempt(
        arguments.system,
        arguments.source.resolve(),
        folder.resolve(),
        seq_len=arguments.seq_len,
        seconds=arguments.seconds,
        paths=[path.resolve() for path in arguments.path],
        words={old: new for old, _, new in pairs},
    )
    print(f"{done.system}: stand-ins for {', '.join(done.stand_ins) or 'nothing'}")
    if done.failure:
        print(f"{done.system}: failed at {done.failure}")
    else:
        losses = ", ".join(f"{loss:.4f}" for loss in done.printed.loss)
        print(
            f"{done.system}: {len(done.printed.loss)} losses {losses}; own figures {json.dumps(dict(done.printed.own))}"
        )
    print(f"{done.system}: output in {folder / 'output.log'}")
    return 1 if done.failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
