"""Where the time of a training step on one GPU goes, and what each part of its linear work saves. Not a test:

    python -m tests.engine.measure_step                        # 1b shape at 16K, 32K and 64K; on a CPU a tiny one
    python -m tests.engine.measure_step --lengths 16384 --variants today gathered --steps 10
    python -m tests.engine.measure_step --products             # the three projections as one product, and MLP's two
    python -m tests.engine.measure_step --short                # 1K to 8K: launched by the host, and as CUDA graphs

Nothing is recomputed (`checkpoint: {every: 0}`), kernel FlashAttention-4 where it is installed. Each variant switches
one thing off and is one trial of this process; the order turns from length to length. A line holds the median step of
some, tokens per second, peak GiB, and the milliseconds of one traced step by category, with its idle time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import engine.models.decoder
from engine.attention.kernels import kernel_named
from engine.burst import METHOD
from engine.distributed import World, join
from engine.lm_head import loss
from engine.models.decoder import project_whole
from engine.ops import elementwise, norm
from engine.ops.copies import product
from engine.optimizer import OnePassAdamW
from engine.profile.breakdown import breakdown_of
from engine.settings import Checkpoint, ModelShape, Steps, TrialSettings
from engine.tasks.train import TrainTask
from harness.spec.models import load_model

TINY = ModelShape(name="tiny", layers=2, hidden=64, ffn=192, heads=4, kv_heads=2, head_dim=16, vocab=512)
LENGTHS, SHORT = (16384, 32768, 65536), (1024, 2048, 4096, 8192)
Patch = Callable[[], contextlib.AbstractContextManager[object]]


def one_b() -> ModelShape:
    return load_model(Path(__file__).parents[2] / "experiments" / "models" / "1b.yaml")


@contextlib.contextmanager
def replaced(holder: object, name: str, value: object) -> Iterator[None]:
    """`holder.name` is `value` inside."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def torch_norms() -> contextlib.AbstractContextManager[object]:
    """Norms and residual sums by torch, one after another."""
    return replaced(norm, "_kernels", lambda x: None)


def apart_swiglu() -> contextlib.AbstractContextManager[object]:
    """SwiGLU's product in a pass of its own after its gradients."""
    from engine.layers import tiled_mlp

    def again(dhidden: Tensor, gate: Tensor, up: Tensor, *, saved: bool) -> tuple[Tensor, Tensor, Tensor]:
        if not saved:
            return elementwise.swiglu_again(dhidden, gate, up)
        dgate, dup = elementwise.swiglu_gradients(dhidden, gate, up)
        return elementwise.swiglu(gate, up), dgate, dup

    return replaced(tiled_mlp, "swiglu_again", again)


def labels_on_device() -> contextlib.AbstractContextManager[object]:
    """Labels that are read back from the GPU in the middle of the step."""
    read = loss.runs_with_labels
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return replaced(loss, "runs_with_labels", lambda labels, *rest: read(labels.to(device), *rest))


def two_passes() -> contextlib.AbstractContextManager[object]:
    """Clipping, torch's fused AdamW and the copies, each a pass of its own."""

    def step(self: OnePassAdamW, closure: None = None) -> None:
        if self.gradient_scale is not None:
            torch._foreach_mul_([each.grad for each in self._with_gradient()], self.gradient_scale)
        torch.optim.AdamW.step(self)

    return replaced(OnePassAdamW, "step", step)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Norms, SwiGLU and labels as above, all of them."""
    with torch_norms(), apart_swiglu(), labels_on_device():
        yield


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Everything between attentions by torch's own operations, under torch.compile, in place of the kernels here."""

    def plain_rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = (table[:, None] for table in rotary)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    def plain_linear(x: Tensor, matrices: list[Tensor], biases: Sequence[Tensor] = ()) -> Tensor:
        assert not biases, "the shapes here have none"
        return F.linear(x, torch.cat([matrix.to(x.dtype) for matrix in matrices]))

    def rest(block: torch.nn.Module, x: Tensor, out: Tensor) -> Tensor:
        x = x + block.attention.output(out.flatten(-2))
        return x + block.mlp(block.mlp_norm(x))

    project, after = torch.compile(project_whole), torch.compile(rest)

    def layer(self: torch.nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[..., object]) -> Tensor:
        q, k, v, x = project(self.attention_norm, self.attention, x, rotary)
        out, _ = attend(q, k, v)
        return after(self, x, out)

    torch._dynamo.config.recompile_limit = 64
    low = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with contextlib.ExitStack() as stack:
        for holder, name, value in (
            (engine.models.decoder, "rotate", plain_rotate),
            (engine.models.decoder, "linear", plain_linear),
            (engine.models.decoder, "computed", lambda parameter: parameter.to(low)),
            (norm, "computed", lambda parameter: parameter.to(low)),
            (engine.models.decoder, "swiglu", lambda gate, up: F.silu(gate) * up),
            (engine.models.decoder.Block, "layer", layer),
        ):
            stack.enter_context(replaced(holder, name, value))
        yield


# What is changed, in settings and in the program.
VARIANTS: dict[str, tuple[dict[str, object], Patch]] = {
    "today": ({}, contextlib.nullcontext),
    "all_apart": ({}, apart),  # everything off but the one product of q, k and v
    "two_passes": ({}, two_passes),
    "torch_norms": ({}, torch_norms),
    "apart_swiglu": ({}, apart_swiglu),
    "labels_on_device": ({}, labels_on_device),
    "tiles8": ({"mlp_tiles": 8}, contextlib.nullcontext),
    "every1": ({"checkpoint": Checkpoint(every=1)}, contextlib.nullcontext),
    "compiled": ({}, compiled),
}
AT_LENGTH = {
    16384: [name for name in VARIANTS if name != "tiles8"],
    32768: ["today", "all_apart"],
    65536: ["today", "all_apart", "tiles8"],
}


def settings_of(length: int, changed: dict[str, object]) -> TrialSettings:
    on_gpu = torch.cuda.is_available()
    kernel = "fa4" if on_gpu and kernel_named("fa4").unsupported_reason() is None else "auto"
    return TrialSettings(
        task="train", method="burst", model=one_b() if on_gpu else TINY, seq_len=length, dtype="bf16", kernel=kernel,
        learning_rate=3e-5, steps=Steps(), **{"checkpoint": Checkpoint(every=0), "cuda_graph": "none", **changed},
    )  # fmt: skip


def task_of(world: World, length: int, changed: dict[str, object]) -> TrainTask:
    """A task of these settings, after the memory of the task before it has been freed: nothing may refer to that."""
    gc.collect()
    torch._dynamo.reset()  # graphs of another length would be compiled for any length
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return TrainTask(settings_of(length, changed), METHOD, world)


def traced(task: TrainTask, index: int, kernels: int) -> str:
    """Milliseconds of one step by category, and its longest kernels that are neither products nor attention."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities, acc_events=False) as tracing:
        task.step(index)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        tracing.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    found = breakdown_of(events)
    parts = [f"{name} {1e3 * seconds:.1f}" for name, seconds in found.seconds.items() if seconds > 5e-5]
    text = f"    of {1e3 * found.span_seconds:.1f} ms: " + ", ".join(parts)
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name = event["name"].removeprefix("void ")[:90]
            spent[name] += event["dur"]
            calls[name] += 1
    lines = [
        f"      {duration / 1e3:7.2f} ms {calls[name]:5d} x {name}" for name, duration in spent.most_common(kernels)
    ]
    return "\n".join([text, *lines])


def measure(world: World, length: int, name: str, steps: int, kernels: int) -> None:
    changed, patch = VARIANTS[name]
    started = time.perf_counter()
    with patch():
        task = task_of(world, length, changed)
        losses = [task.step(index).loss for index in range(2)]
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        done = [task.step(2 + index) for index in range(steps)]
        seconds = statistics.median(step.step_seconds for step in done)
        peak = torch.cuda.max_memory_allocated() / 2**30 if world.device.type == "cuda" else 0.0
        print(
            f"{length:6d} {name:17s} {1e3 * seconds:8.2f} ms {length / seconds / 1e3:7.2f}K tok/s {peak:6.1f} GiB  "
            f"losses {losses[0]:.6f} {losses[1]:.6f} {done[-1].loss:.6f}"
        )
        print(traced(task, 2 + steps, kernels))
    print(f"      ({time.perf_counter() - started:.1f} s with its set-up)", flush=True)


def measure_products() -> None:
    """Milliseconds of some products of one layer at 16K tokens, one by one and as one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, hidden = (16384, 2048) if device.type == "cuda" else (64, 32)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, widths in (("q, k, v", (hidden, hidden // 2, hidden // 2)), ("gate, up", (4 * hidden, 4 * hidden))):
        x = torch.randn(tokens, hidden, device=device, dtype=dtype)
        weights = [torch.randn(width, hidden, device=device, dtype=dtype) for width in widths]
        grads = [torch.randn(tokens, width, device=device, dtype=dtype) for width in widths]
        for case, (apart, together) in product_cases(x, weights, grads).items():
            print(f"{name:8s} {case:20s} apart {_ms(apart):7.3f}  together {_ms(together):7.3f} ms", flush=True)


def product_cases(
    x: Tensor, weights: list[Tensor], grads: list[Tensor]
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By direction: the products of several weights one by one, and as one."""
    whole, dwhole, wide = torch.cat(weights), torch.cat(grads, dim=1), torch.float32

    def apart_dgrad() -> None:
        total = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            total.addmm_(grad, weight)

    return {
        "forward": (lambda: [F.linear(x, w) for w in weights], lambda: F.linear(x, whole)),
        "dgrad": (apart_dgrad, lambda: dwhole @ whole),
        "wgrad": (lambda: [g.T @ x for g in grads], lambda: dwhole.T @ x),
        "wgrad in fp32": (lambda: [product(g.T, x, wide) for g in grads], lambda: product(dwhole.T, x, wide)),
        "join of the weights": (lambda: None, lambda: torch.cat(weights)),
    }


def _ms(call: Callable[[], object], repeats: int = 20) -> float:
    found = []
    for _ in range(5):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append((time.perf_counter() - started) / repeats)
    return 1e3 * min(found)


def measure_short(world: World, steps: int) -> None:
    """Short sequences, where the host's launches are the bound: launched by the host, then replayed as CUDA graphs."""
    on_gpu = world.device.type == "cuda"
    for length in SHORT if on_gpu else (64,):
        for how in ("none", "step") if on_gpu else ("none",):
            seconds = step_seconds(world, length, how, steps)
            print(f"{length:6d} {how} {1e3 * seconds:8.2f} ms {length / seconds / 1e3:7.2f}K tok/s", flush=True)


def step_seconds(world: World, length: int, cuda_graph: str, steps: int) -> float:
    """Median seconds of some steps of a task, after three others."""
    task = task_of(world, length, {"cuda_graph": cuda_graph})
    for index in range(3):
        task.step(index)
    return statistics.median(task.step(3 + index).step_seconds for index in range(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kernels", type=int, default=14, help="longest kernels to print of each trace")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    if given.products:
        return measure_products()
    os.environ.setdefault("BURST_CACHE", tempfile.mkdtemp())
    world = join(settings_of(64, {}))
    if given.short:
        return measure_short(world, given.steps)
    lengths = given.lengths or (LENGTHS if world.device.type == "cuda" else (64,))
    for turn, length in enumerate(lengths):
        names = given.variants or AT_LENGTH.get(length, list(VARIANTS))
        last = [name for name in names if name == "compiled"]  # it compiles for tens of seconds: the others come first
        names = [name for name in names if name not in last]
        for name in (*names[turn % len(names) :], *names[: turn % len(names)], *last) if names else last:
            try:
                measure(world, length, name, given.steps, given.kernels)
            except Exception as error:  # noqa: BLE001 - the other variants are measured all the same
                print(f"{length:6d} {name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # an orderly end of the process groups would take seconds
