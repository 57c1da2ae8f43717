"""One rank of a training run: `python -m engine.training.loop ATTEMPT_DIR`, started torchrun-style.

Reads ATTEMPT_DIR/order.json and writes the files of `engine.training.files`. The loop is step, save, evaluate, until
the steps are done or a stop is requested: SIGTERM or SIGINT lets all ranks finish the current step, save, and exit with
0; a second one ends the process at once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from engine.attention.masks import parse_mask
from engine.data.sequences import (
    PackedCounts,
    PackedRow,
    PackedSequences,
    joined,
)
from engine.distributed import World, leave
from engine.lm_head.loss_kernel import IGNORE, loss_sum_of
from engine.measurement import write_json
from engine.memory.resources import reset_peaks, usage
from engine.method import NativeMethod
from engine.models.architecture import not_exported_reason
from engine.models.decoder import Decoder
from engine.settings import from_json
from engine.tasks.task import OnProgress, Refused, progress_to
from engine.tasks.train import TrainTask
from engine.training.config import Order, learning_rate
from engine.training.files import ORDER_FILE, OUTCOME_FILE, MetricsWriter, checkpoints_directory, run_of
from engine.training.manifest import checkpoint_path
from engine.training.preflight import (
    RunData,
    check_shape,
    check_steps,
    check_weights,
    facts_of,
    needs_weights,
    training_data,
)
from engine.training.state import Checkpoints
from engine.training.trackers import open_tracker
from engine.worker import exit_on_error, prepare, silent

_Found = TypeVar("_Found")


GIB = 1 << 30


def main(arguments: list[str]) -> int:
    """Run the attempt of the given directory and end the process; returns the exit code of a command line that names no
    directory."""
    if len(arguments) != 1:
        print("usage: python -m engine.training.loop ATTEMPT_DIR", file=sys.stderr)
        return 2
    attempt = Path(arguments[0])
    rank = int(os.environ.get("RANK", "0"))
    stop = StopRequest()
    with exit_on_error(attempt, rank):
        training = set_up(attempt, stop)
        finished = training.run(progress_to(attempt) if rank == 0 else silent)
        if rank == 0:
            write_json(attempt / OUTCOME_FILE, {"step": training.steps_done, "finished": finished})
        leave()
    raise AssertionError("a rank does not outlive its run")


def set_up(attempt: Path, stop: StopRequest) -> TrainingRun:
    """The run, after all checks of its order. Raises Refused."""
    try:
        data = json.loads((attempt / ORDER_FILE).read_text(encoding="utf-8"))
        order = from_json(Order, data)
        method = cast(NativeMethod, importlib.import_module(order.method).METHOD)
        return TrainingRun(order, method, prepare(order.config.settings, method), run_of(attempt), stop)
    except ValueError as error:
        raise Refused(str(error)) from error


class TrainingRun:
    """One start of a run on this rank. Constructing it is the set-up: a ValueError there refuses the run.

    `steps_done` counts optimizer steps since the run began, those of earlier starts included.
    """

    def __init__(self, order: Order, method: NativeMethod, world: World, run: Path, stop: StopRequest) -> None:
        config = order.config
        self.order, self.config, self.world = order, config, world
        self._stop = stop
        data = agreed(world, lambda: training_data(config))
        facts = facts_of(order, data.store.header, data.held_out)
        check_same(world, facts)
        self.task = TrainTask(config.settings, method, world, sequences=data.training, recipe=config.optimizer)
        self.evaluator = Evaluator(self.task, data, config.evaluate.sequences) if config.evaluate.every else None
        self.checkpoints = Checkpoints(
            checkpoints_directory(run),
            world,
            self.task.model,
            self.task.optimizer,
            facts=facts,
            keep=config.save.keep,
            lora=config.settings.lora,
        )
        self.notes = self._about_storage()  # sentences for the user about the start of the run
        if isinstance(data.training, PackedSequences):
            self.notes.insert(0, data.training.packing.words)
        if parse_mask(config.settings.mask).shows_later_keys(config.settings.seq_len):
            self.notes.append(
                f"mask {config.settings.mask} shows tokens the ones that they are to predict, so that the loss says "
                "little; leave mask at causal to train a language model"
            )
        if config.settings.lora is None and (reason := not_exported_reason(config.settings.model)):
            self.notes.append(f"transformers has no such model, and `burst train export` will refuse it: {reason}")
        self.steps_done = 0
        if needs_weights(order):
            agreed(world, lambda: check_weights(config, data.store.header))
            start_from(self.task.model, Path(config.init_from))
        if order.resume:
            self.steps_done, skipped = self.checkpoints.restore()
            self.notes += skipped
            check_steps(config, self.steps_done)
            if self.steps_done < config.steps:
                source = checkpoint_path(checkpoints_directory(run), self.steps_done)
                self.notes.append(f"going on after step {self.steps_done}, from {source}")
        self.writer = None
        if world.rank == 0:
            tracker = open_tracker(run, config, from_step=self.steps_done)
            self.writer = MetricsWriter(run, from_step=self.steps_done, tracker=tracker)

    def _about_storage(self) -> list[str]:
        """Where checkpoints are, unless all ranks see one directory. Collective."""
        storage = self.checkpoints.storage
        if storage.shared:  # on every rank, or on none
            return []
        hosts = self.world.gather(socket.gethostname())
        names = " and on ".join(hosts[rank] for rank in storage.keepers)
        return [f"the hosts do not share the run directory: each checkpoint is gathered, whole on {names}"]

    def run(self, on_progress: OnProgress) -> bool:
        """Train until the last step; False when asked to stop before. Collective.

        Raises FloatingPointError when the loss stops being a number.
        """
        config = self.config
        for note in self.notes:
            on_progress(self._progress(note=note))
        if self.evaluator is not None and self.steps_done == 0:
            self._evaluate(on_progress)
        stopping = False
        while self.steps_done < config.steps and not stopping:
            stopping = self._step(on_progress)
            last = self.steps_done == config.steps
            # Saved first: should time run out after a request to stop, only the evaluation is lost.
            if last or stopping or _is_due(self.steps_done, config.save.every):
                self._save(on_progress)
            if self.evaluator is not None and (last or _is_due(self.steps_done, config.evaluate.every)):
                self._evaluate(on_progress)
        if self.writer is not None:
            self.writer.close()
        return self.steps_done == config.steps

    def _step(self, on_progress: OnProgress) -> bool:
        """One optimizer step and its line of metrics; whether any rank was asked to stop."""
        config, task = self.config, self.task
        rate = learning_rate(self.steps_done, config.steps, config.settings.learning_rate, config.lr_schedule)
        for group in task.optimizer.param_groups:
            group["lr"] = rate
        task.cp.traffic.reset()
        reset_peaks(self.world.device)
        number, length = self.steps_done + 1, task.seq_len(self.steps_done)
        with task.inside.step(on_progress, number, config.steps, length):
            done = task.step(self.steps_done)
        self.steps_done += 1

        traffic = task.cp.traffic
        used = usage(self.world.device, traffic.sent_bytes, traffic.window_bytes, task.captured_bytes)
        # One reduction for all of it: the largest of each over the ranks, so that all agree on whether to stop.
        seconds, allocated, resident, asked = self.world.slowest(
            [done.step_seconds, float(used.allocated_bytes or 0), float(used.rss_bytes), float(self._stop.asked)]
        )
        packed = task.packed_counts(self.steps_done - 1)
        tokens = config.tokens_per_step if packed is None else packed.tokens  # padding is no work done
        speed = tokens / (seconds * self.world.size)
        self._write(
            "step",
            loss=done.loss,
            grad_norm=done.grad_norm,
            learning_rate=rate,
            seconds=seconds,
            tokens_per_gpu_per_second=speed,
            padding=None if packed is None else packed.padding,
            mfu=self._mfu(seconds, packed),
            peak_memory_gib=allocated / GIB if used.allocated_bytes is not None else None,
            peak_rss_gib=resident / GIB,
        )
        on_progress(
            self._progress(loss=done.loss, seconds=seconds, learning_rate=rate, tokens_per_gpu_per_second=speed)
        )
        return bool(asked)

    def _save(self, on_progress: OnProgress) -> None:
        if self.writer is not None:
            self.writer.flush()
        self.checkpoints.save(self.steps_done)
        on_progress(self._progress(saved=self.steps_done))

    def _evaluate(self, on_progress: OnProgress) -> None:
        assert self.evaluator is not None
        loss = self.evaluator.loss()
        self._write("evaluation", loss=loss)
        on_progress(self._progress(evaluation_loss=loss))

    def _write(self, kind: str, **figures: float | None) -> None:
        if self.writer is not None:
            self.writer.write(kind, self.steps_done, self.steps_done * self.config.tokens_per_step, **figures)

    def _mfu(self, seconds: float, packed: PackedCounts | None) -> float | None:
        if self.order.peak_tflops is None:
            return None
        flops = self.order.model_flops_per_step if packed is None else self.order.packed_flops(packed)
        return flops / (seconds * self.world.size * self.order.peak_tflops * 1e12)

    def _progress(self, **figures: object) -> dict[str, object]:
        return {"step": self.steps_done, "of": self.config.steps, **figures}


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """`asked` turns true at the first signal. Only the process's main thread may make one."""

    def __init__(self) -> None:
        self.asked = False
        for number in _SIGNALS:
            signal.signal(number, self._ask)

    def _ask(self, _: int, __: FrameType | None) -> None:
        self.asked = True
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)


def start_from(model: Decoder, directory: Path) -> None:
    """Put the weights of `directory` into a model, sharded or not; at most one whole tensor exists at a time. Adapters
    stay as they are.

    Raises ValueError when they cannot be read, belong to another shape or are not all finite.
    """
    from engine.hf import import_hugging_face

    found, tensors = import_hugging_face(directory)
    check_shape(directory, found, model.shape)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, whole in tensors:
            parameter = parameters.pop(name)
            whole = whole.to(dtype=parameter.dtype, device=parameter.device)
            # In parts, because `isfinite` makes tensors of the size of its own.
            if wrong := sum(int((~part.isfinite()).sum()) for part in whole.reshape(-1).split(1 << 24)):
                raise ValueError(
                    f"init_from {directory} has NaN or infinity in {wrong} of the {whole.numel()} weights of {name}; "
                    "give weights that are all finite"
                )
            if isinstance(parameter, DTensor):
                # Every rank has read the whole tensor, so its shard is cut out here and nothing is sent.
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(whole)
    missing = [name for name in parameters if not name.endswith((".lora_A", ".lora_B"))]
    assert not missing, f"no weights for {missing}"


class Evaluator:
    """Always the same sequences: the first ones of the held-out span, or of its packed rows."""

    def __init__(self, task: TrainTask, data: RunData, sequences: int) -> None:
        """At least that many `sequences` are held out: `training_data` raises for a run where they are not."""
        self._packed, span = data.held_out_rows, data.held_out
        there = span.sequences(task.settings.seq_len) if self._packed is None else len(self._packed.packing)
        assert there >= sequences, (span, sequences)
        self._task, self._store, self._span, self._sequences = task, data.store, span, sequences
        # Training may add a z-loss; evaluation is the cross-entropy alone.
        self._loss_sum = loss_sum_of(replace(task.settings, z_loss=0.0), task.world.device.type)

    def loss(self) -> float:
        """Mean loss per target token. Collective."""
        task = self._task
        total = torch.zeros(2, dtype=torch.float64, device=task.world.device)  # sum of the losses, target tokens
        with torch.no_grad(), self._evaluation_loss():
            for tokens_BS, labels_BS, row in self._rounds():
                if row is None:
                    cp = task.cp
                    positions_L = cp.positions(task.settings.seq_len, device=task.world.device)
                else:
                    mask = task.mask_of(row)
                    cp = mask.cp
                    positions_L = cp.shard(row.positions_S, dim=0).to(task.world.device)
                    task.attend_under(mask)
                labels_BL = cp.shard(labels_BS, dim=1).to(task.world.device)
                tokens_BL = cp.shard(tokens_BS, dim=1).to(task.world.device)
                total[0] += task.model(tokens_BL, positions_L, labels_BL).double()
                total[1] += (labels_BL != IGNORE).sum()
        dist.all_reduce(total)
        loss_sum, targets = total.tolist()
        return float(loss_sum / targets)

    @contextlib.contextmanager
    def _evaluation_loss(self) -> Iterator[None]:
        """The model with the loss of evaluation."""
        head = self._task.model.head
        training_loss, head.loss_sum = head.loss_sum, self._loss_sum
        try:
            yield
        finally:
            head.loss_sum = training_loss

    def _rounds(self) -> Iterator[tuple[Tensor, Tensor, PackedRow | None]]:
        """Batches of this replica, tokens and labels, with the boundaries of packed rows. All replicas take part in all
        rounds, because their ranks hold each other's parameters: a replica without sequences left computes one that
        does not count."""
        settings = self._task.settings
        per_round = settings.batch_size * settings.dp_size
        for first in range(0, self._sequences, per_round):
            mine = first + self._task.world.replica * settings.batch_size
            numbers = range(mine, mine + settings.batch_size)
            if self._packed is not None:
                row = joined(map(self._packed_row, numbers), settings.row_tokens)
                yield row.tokens_S[None], row.labels_S[None], row
                continue
            rows = [self._row(number) for number in numbers]
            tokens, labels = (torch.stack(part) for part in zip(*rows, strict=True))
            yield tokens, labels, None

    def _packed_row(self, number: int) -> PackedRow:
        assert self._packed is not None
        counts = self._sequences > number
        row = self._packed.row(number if counts else 0)
        return row if counts else replace(row, labels_S=torch.full_like(row.labels_S, IGNORE))

    def _row(self, number: int) -> tuple[Tensor, Tensor]:
        seq_len = self._task.settings.seq_len
        counts = number < self._sequences
        start = self._span.start + (number if counts else 0) * seq_len
        tokens_S = self._store.window(start, seq_len + 1)
        labels_S = tokens_S[1:] if counts else torch.full_like(tokens_S[1:], IGNORE)
        return tokens_S[:-1], labels_S


def agreed(world: World, check: Callable[[], _Found]) -> _Found:
    """What `check` finds on this rank. Collective.

    Raises ValueError on every rank when it does on one, naming that rank's host unless all have a problem.
    """
    found, problems = world.attempt(check, ValueError)
    if problems:
        hosts = world.gather(socket.gethostname())
        rank, words = min(problems.items())
        raise ValueError(words if len(problems) == world.size else f"{hosts[rank]}: {words}")
    return cast(_Found, found)


def check_same(world: World, facts: dict[str, object]) -> None:
    """Raises ValueError on every rank when a host's facts about the run differ from those of the first. Collective."""
    answers = world.gather((socket.gethostname(), facts))
    first, expected = answers[0]
    for host, found in answers[1:]:
        for name, value in expected.items():
            if found.get(name) != value:
                raise ValueError(
                    f"the data on {host} are not those on {first} ({name}: {found.get(name)} there, {value} on "
                    f"{first}); give every host the same text or store at the same path"
                )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
