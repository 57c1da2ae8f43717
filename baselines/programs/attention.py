"""Run by the interpreter of a compared system: times its attention function, forward and forward with backward.

`python attention.py REQUEST.json`, one process per rank, with torchrun's variables. `call.py` of the system has
`prepare`, which takes the request and the ranks' group and returns a function of this rank's q, k, v in [batch, tokens,
heads, head_dim]. Each step is timed on its slowest rank from a common start; rank 0 prints one line of JSON per step.

With `cases` in the request nothing is timed (`burst setup baselines fidelity`). Each case gives whole tensors in a
file. The rank takes its tokens of them, as the case's `layout` or `positions` of `call.py` says. It leaves out, dq, dk,
dv and the bytes it sent, or the error that the system raised.
"""

import datetime
import json
import os
import sys
import time
import traceback

from attention_bytes import counted
from program_parts import leave, load, say, say_peaks

sys.path[:1] = []  # the folder of this program, whose neighbours would hide modules of the same name

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FLUSH_BYTES = 1 << 28  # several times the L2 cache of any GPU, which no model leaves filled between two calls
CASE_SECONDS = 60  # after which a rank no longer waits for another: some errors are raised on one rank alone


def positions(call, request, rank, size):
    """Positions in the whole sequence of this rank's tokens, in their order."""
    if hasattr(call, "positions"):
        return call.positions(request, rank, size)
    return laid_out(request["layout"], request["seq_len"], rank, size)


def laid_out(layout, length, rank, size):
    if layout == "striped":
        return list(range(rank, length, size))
    if layout == "contiguous":
        return list(range(length // size * rank, length // size * (rank + 1)))
    chunk = length // (2 * size)
    return [first + token for first in (rank * chunk, (2 * size - 1 - rank) * chunk) for token in range(chunk)]


def compare(call, request, device):
    """Forward and backward of one case; what came out goes to the case's own file of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kept = {}
    try:
        whole = torch.load(request["inputs"])
        kept["positions"] = positions(call, request, rank, size)
        dtype = DTYPES[request["dtype"]]
        own = {name: whole[name][:, kept["positions"]].to(device, dtype) for name in ("q", "k", "v", "dout")}
        q, k, v = (own[name].requires_grad_() for name in "qkv")
        attend = call.prepare(request, dist.group.WORLD)
        dist.barrier()
        with counted() as sent:
            out = attend(q, k, v)
            out.backward(own["dout"])
        tensors = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
        kept |= {"tensors": {name: tensor.cpu() for name, tensor in tensors.items()}, "sent": sent}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a foreign function raises is the result
        traceback.print_exc()
        where = [
            f"{os.path.basename(each.filename)}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)
        ]
        text = " ".join(str(error).split())[:300] or "no text"
        kept |= {"error": type(error).__name__, "text": text, "where": where[-1]}
    torch.save(kept, f"{request['left']}.rank{rank}.pt")


def finish(cuda):
    """End the process, after all ranks have come here."""
    if cuda:
        dist.barrier()
    else:
        dist.destroy_process_group()
    leave()


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "cases" in request:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=CASE_SECONDS))
        for case in request["cases"]:
            compare(load(request["call"]), request | case, device)
        finish(cuda)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    attend = load(request["call"]).prepare(request, dist.group.WORLD)
    generator = torch.Generator(device).manual_seed(request["seed"] + 1 + rank)

    def random(heads):
        shape = (request["batch_size"], request["seq_len"] // size, heads, request["head_dim"])
        values = torch.randn(shape, generator=generator, device=device)
        return values.to(DTYPES[request["dtype"]])

    q, k, v = (random(heads).requires_grad_() for heads in (request["heads"], request["kv_heads"], request["kv_heads"]))
    gradient = random(request["heads"])
    flush = torch.empty(FLUSH_BYTES if cuda else 0, dtype=torch.int8, device=device)

    def timed(work):
        flush.zero_()
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def forward():
        with torch.no_grad():
            attend(q, k, v)

    def both():
        q.grad = k.grad = v.grad = None
        attend(q, k, v).backward(gradient)

    for step in range(request["steps"]):
        say(rank, step=step + 1, forward_seconds=timed(forward), seconds=timed(both))
    say_peaks(rank, size)
    finish(cuda)


main()
