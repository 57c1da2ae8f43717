"""The loop: step, save, evaluate, until the steps are done or a stop is requested.

SIGTERM or SIGINT lets the run finish its step and save; a second one ends the process at once.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import cast

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from engine.data.sequences import ShuffledSequences
from engine.distributed import World
from engine.memory.resources import reset_peaks, usage
from engine.method import NativeMethod
from engine.model import Decoder
from engine.tasks.task import OnProgress
from engine.tasks.train import Step, TrainTask
from engine.training.agreement import agreed, check_same
from engine.training.config import Order, learning_rate
from engine.training.evaluate import Evaluator
from engine.training.files import checkpoints_directory
from engine.training.metrics import MetricsWriter
from engine.training.preflight import check_shape, check_steps, check_weights, facts_of, training_data
from engine.training.saving import Checkpoints

GIB = 1 << 30


class TrainingRun:
    """One start of a run on this rank. Constructing it is the set-up: a ValueError there refuses the run.

    `steps_done` counts optimizer steps since the run began, those of earlier starts included.
    """

    def __init__(self, order: Order, method: NativeMethod, world: World, run: Path, stop: StopRequest) -> None:
        config = order.config
        self.order, self.config, self.world = order, config, world
        self._stop = stop
        store, training, held_out = agreed(world, lambda: training_data(config))
        facts = facts_of(order, store.header, held_out)
        check_same(world, facts)
        sequences = ShuffledSequences(store, training, config.settings.seed)
        self.task = TrainTask(config.settings, method, world, sequences=sequences, recipe=config.optimizer)
        self.evaluator = (
            Evaluator(self.task, store, held_out, config.evaluate.sequences) if config.evaluate.every else None
        )
        self.checkpoints = Checkpoints(
            checkpoints_directory(run),
            world,
            self.task.model,
            self.task.optimizer,
            facts=facts,
            keep=config.save.keep,
        )
        self.notes = self._about_storage()  # sentences for the user about the start of the run
        self.steps_done = 0
        if order.resume:
            self.steps_done, skipped = self.checkpoints.restore()
            self.notes += skipped
            check_steps(config, self.steps_done)
        elif config.init_from:
            agreed(world, lambda: check_weights(config, store.header))
            self.notes += start_from(self.task.model, Path(config.init_from))
        self.writer = (
            MetricsWriter(run, from_step=self.steps_done, tensorboard=config.metrics.tensorboard)
            if world.rank == 0
            else None
        )

    def _about_storage(self) -> list[str]:
        """Where checkpoints are, unless all ranks see one directory. Collective."""
        storage = self.checkpoints.storage
        if storage.shared:  # on every rank, or on none
            return []
        hosts = cast(list[str], self.world.gather(socket.gethostname()))
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
        speed = config.tokens_per_step / (seconds * self.world.size)
        self._write(
            "step",
            **_measured(done),
            learning_rate=rate,
            seconds=seconds,
            tokens_per_gpu_per_second=speed,
            mfu=self._mfu(seconds),
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

    def _mfu(self, seconds: float) -> float | None:
        if self.order.peak_tflops is None:
            return None
        return self.order.model_flops_per_step / (seconds * self.world.size * self.order.peak_tflops * 1e12)

    def _progress(self, **figures: object) -> dict[str, object]:
        return {"step": self.steps_done, "of": self.config.steps, **figures}


def _measured(done: Step) -> dict[str, float]:
    return {"loss": done.loss, "grad_norm": done.grad_norm}


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """`asked` turns true at the first of `signals`. Only the process's main thread may make one."""

    def __init__(self, signals: Sequence[signal.Signals] = _SIGNALS) -> None:
        self.asked = False
        self._signals = signals
        for number in signals:
            signal.signal(number, self._ask)

    def _ask(self, _: int, __: FrameType | None) -> None:
        self.asked = True
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)


def start_from(model: Decoder, directory: Path) -> list[str]:
    """Put the weights of `directory` into a model, sharded or not; at most one whole tensor exists at a time.

    Returns sentences for the user on what training makes of them. Raises ValueError when they cannot be read or belong
    to another shape.
    """
    from engine.hf import import_hugging_face, ties_head

    found, tensors = import_hugging_face(directory)
    check_shape(directory, found, model.shape)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, whole in tensors:
            parameter = parameters.pop(name)
            whole = whole.to(dtype=parameter.dtype, device=parameter.device)
            if isinstance(parameter, DTensor):
                # Every rank has read the whole tensor, so its shard is cut out here and nothing is sent.
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(whole)
    assert not parameters, f"no weights for {sorted(parameters)}"
    if not ties_head(directory):
        return []
    return [
        f"{directory} has one matrix for the embedding and the LM head: both start from it here, each is trained by "
        "itself, and an export holds both"
    ]
