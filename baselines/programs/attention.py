"""Run by the interpreter of a compared system: times its attention function, forward and forward with backward.

`python attention.py REQUEST.json`, one process per rank, with torchrun's variables. `call.py` of the system has
`prepare`, which takes the request and the ranks' group and returns a function of this rank's q, k, v in [batch, tokens,
heads, head_dim]. Each step is timed on its slowest rank from a common start; rank 0 prints one line of JSON per step.
"""

import importlib.util
import json
import os
import sys
import time

sys.path[:1] = []  # the folder of this program, whose neighbours would hide modules of the same name

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

MARK = "UPSTREAM "
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FLUSH_BYTES = 1 << 28  # several times the L2 cache of any GPU, which no model leaves filled between two calls


def load(path):
    """The module at a path."""
    spec = importlib.util.spec_from_file_location("call", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
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
        line = {"step": step + 1, "forward_seconds": timed(forward), "seconds": timed(both)}
        if rank == 0:
            print(MARK + json.dumps(line), flush=True)
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if cuda else []
    gathered = [None] * size
    dist.all_gather_object(gathered, peaks)
    if rank == 0:
        allocated, reserved = ([each[kind] for each in gathered] if cuda else [] for kind in (0, 1))
        print(MARK + json.dumps({"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}), flush=True)
    if cuda:
        dist.barrier()
    else:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by returning: a thread of gloo that drops tensors while the interpreter ends aborts the process.
    os._exit(0)


main()
