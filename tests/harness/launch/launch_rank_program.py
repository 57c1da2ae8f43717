"""The program the launcher tests run as ranks: `python -m launch_rank_program TRIAL_DIR BEHAVIOUR`."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

trial_dir, behaviour = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])


def leave_error(kind: str, reason: str) -> None:
    (trial_dir / "errors").mkdir(exist_ok=True)
    (trial_dir / "errors" / f"rank{rank}.json").write_text(
        json.dumps({"kind": kind, "reason": reason, "traceback": ""})
    )


def note(name: str, text: str) -> None:
    aside = trial_dir / f".{name}.{os.getpid()}"
    aside.write_text(text)
    aside.rename(trial_dir / name)


def wait_for(name: str) -> None:
    path = str(trial_dir / name)
    while not os.access(path, os.F_OK):  # no function of Python's: a stack taken at any time ends in this one
        time.sleep(0.01)


def stuck() -> None:
    time.sleep(600)


def main() -> None:
    note(f"pid{rank}", str(os.getpid()))
    if behaviour == "well":
        print(f"rank {rank} speaks")
        note(f"env{rank}.json", json.dumps(dict(os.environ)))
        note(f"session{rank}", f"{os.getsid(0)} {os.getppid()}")
        if rank == 0:
            with open(trial_dir / "progress.jsonl", "a") as file:
                for step in (1, 2):
                    file.write(json.dumps({"step": step, "of": 2}) + "\n")
    elif behaviour == "rank1_killed":
        if rank == 1:
            wait_for("pid0")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    elif behaviour == "rank1_killed_peer_complains":
        if rank == 1:
            wait_for("pid0")
            os.kill(os.getpid(), signal.SIGKILL)
        while "State:\tZ" not in Path(f"/proc/{(trial_dir / 'pid1').read_text()}/status").read_text():
            time.sleep(0.001)
        leave_error("failed", "connection closed by peer")
        sys.exit(1)
    elif behaviour == "hangs_deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(f"deaf{rank}", "")
        time.sleep(600)
    elif behaviour == "stops_after_two_steps":  # rank 1 stops, and the others wait for it
        faulthandler.register(signal.SIGTERM, chain=True)
        note(f"writes_stacks{rank}", "")
        if rank == 0:
            with open(trial_dir / "progress.jsonl", "a") as file:
                for step in (0, 1, 2):
                    file.write(json.dumps({"step": step, "of": 9}) + "\n")
        if rank == 1:
            stuck()
        wait_for("never")
    elif behaviour == "saves_when_asked":

        def save(*_: object) -> None:
            time.sleep(float(os.environ["SECONDS"]))
            note(f"saved{rank}", "")
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        note(f"ready{rank}", "")
        time.sleep(600)
    elif behaviour == "rank1_oom":
        if rank == 1:
            leave_error("oom", "CUDA out of memory: tried to allocate 3 GiB")
            sys.exit(1)
        time.sleep(600)
    elif behaviour == "rank1_raises_others_follow":
        if rank == 1:
            raise RuntimeError("the first failure")
        wait_for("pid1")
        while (state := Path(f"/proc/{(trial_dir / 'pid1').read_text()}/status")).exists() and "\tZ" not in (
            state.read_text()
        ):
            time.sleep(0.01)
        time.sleep(0.2)
        leave_error("failed", "a peer went away")
        sys.exit(1)
    elif behaviour == "refuses":
        leave_error("refused", "8 heads do not divide over 3 ranks; choose cp_size 1, 2, 4 or 8")
        sys.exit(1)
    elif behaviour == "error_then_hangs":
        if rank == 0:
            leave_error("failed", "shapes differ")
        time.sleep(600)
    elif behaviour == "grandchildren":
        same_group = subprocess.Popen(["sleep", "600"])
        own_session = subprocess.Popen(["sleep", "600"], start_new_session=True)
        note(f"grandchildren{rank}", f"{same_group.pid} {own_session.pid}")
    elif behaviour == "grandchildren_then_hang":
        own_session = subprocess.Popen(["sleep", "600"], start_new_session=True)
        note(f"grandchildren{rank}", str(own_session.pid))
        time.sleep(600)
    else:
        raise AssertionError(behaviour)


if __name__ == "__main__":
    main()
