"""`python -m baselines.fidelity.native REQUEST.json`: a native method's attention, as one rank of the same cases.

Leaves what `baselines/programs/attention.py` leaves of a system, and the bytes that the engine says beforehand.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist

from baselines.programs import attention_bytes
from engine import ContextParallel
from engine.distributed import serve_store
from engine.reader import from_json, read_json
from engine.settings import TrialSettings

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class NativeCase(TypedDict):
    """One case of a request."""

    settings: object  # `TrialSettings` as JSON
    module: str  # of the method
    node_size: int
    inputs: str  # file of the whole tensors
    left: str  # start of the names of the files that ranks leave


class RankResult(TypedDict, total=False):
    """What a rank leaves of one case."""

    positions: list[int]  # of its tokens
    tensors: dict[str, torch.Tensor]  # out, dq, dk, dv of these tokens
    sent: dict[str, int]  # bytes by operation
    expected: int  # bytes, by the engine's arithmetic
    counted: int  # bytes, by the engine's counters
    error: str  # the exception's class, where a system raised one; then only these three are there
    text: str  # its message
    where: str  # the function that raised it


def run_case(case: NativeCase) -> RankResult:
    """Attention of one case on this rank, forward and backward. Collective."""
    settings = from_json(TrialSettings, case["settings"])
    method: Any = importlib.import_module(case["module"]).METHOD
    cp = ContextParallel(layout=method.layout(settings), node_size=case["node_size"])
    whole = torch.load(case["inputs"])
    own = {name: cp.shard(whole[name]).to(_DTYPES[settings.dtype]).contiguous() for name in ("q", "k", "v", "dout")}
    q, k, v = (own[name].requires_grad_() for name in "qkv")
    attend = method.attention(cp, settings)
    dist.barrier()
    with attention_bytes.counted() as sent:
        out, _ = attend(q, k, v)
        out.backward(own["dout"])
    return {
        "positions": cp.positions(settings.seq_len).tolist(),
        "tensors": {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad},
        "sent": sent,
        "expected": attend.computed_sent().total,
        "counted": cp.traffic.sent_bytes,
    }


def main() -> None:
    request = cast(dict[str, Any], read_json(Path(sys.argv[1])))
    if os.environ["RANK"] == "0":
        serve_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for case in request["cases"]:
        torch.save(run_case(case), f"{case['left']}.rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as baselines/programs/attention.py ends, and for its reason


if __name__ == "__main__":
    main()
