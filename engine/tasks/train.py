"""Task train: optimizer steps on real text, each timed on its slowest rank.

Loss and gradients are those of the mean over all target tokens of all sequences of the step, for any division into
ranks and micro-batches: every rank contributes the sum over its tokens divided by the count of the whole step, and
FSDP2 adds the ranks' gradients.

A short step of one GPU is launched by the host once and then replayed as CUDA graphs (setting `cuda_graph`), with each
step's tokens and learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from engine.attention.context import ContextParallel
from engine.attention.masks import Documents
from engine.attention.masks.pairs import pair_table
from engine.combinations import combination_unsupported_reason, vocabulary_unsupported_reason
from engine.data import open_tokens
from engine.data.sequences import (
    PackedCounts,
    PackedRow,
    PackedSequences,
    Sequences,
    TokenSpan,
    TrainingData,
    joined,
    training_sequences,
)
from engine.distributed import World
from engine.linear.kernels import kernel_of
from engine.linear.shard import Mix
from engine.lm_head.loss_kernel import IGNORE
from engine.measurement import Extra, Measurement
from engine.memory.moments import PiecewiseAdamW
from engine.memory.offload import local_shard
from engine.memory.resources import limit_memory, reset_peaks
from engine.method import NativeMethod
from engine.models.decoder import Block
from engine.ops import OPTIMIZER, STEP
from engine.optimizer import OnePassAdamW, adamw, clip_and_step
from engine.parallelize import TensorParallelMethod, WholeMatrices, build_model, sum_across_nodes
from engine.settings import AdamWSettings, TrialSettings, keeps_whole
from engine.tasks import cuda_graph
from engine.tasks.captured_step import Batch, CapturedStep, PackedMask, Work, page_locked, to_device
from engine.tasks.speeds import LinkProbes, gemm_figures
from engine.tasks.task import (
    DTYPES,
    AroundStep,
    InsideStep,
    OnProgress,
    RefusingAttention,
    StepClock,
    context_parallel,
    documents_of,
    measured,
    of_measured_steps,
    read_gpus,
)
from engine.tasks.tuning import lock_hosted_layers, tune_linear_layers

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Outcome of one optimizer step; seconds are this rank's own."""

    loss: float
    grad_norm: float  # global, before clipping
    forward_seconds: float
    step_seconds: float


def data_of(settings: TrialSettings) -> TrainingData:
    """The tokens of a trial: sequences in order, or packed documents. Raises ValueError for data that do not fit."""
    store = open_tokens(settings.data)
    if settings.packs or store.header.answers_only:
        return training_sequences(store, TokenSpan(start=0, stop=store.header.count), settings)
    return store


class TrainTask:
    """Model, optimizer and data of one trial on this rank. Raises ValueError when the settings do not fit together."""

    def __init__(
        self,
        settings: TrialSettings,
        method: NativeMethod,
        world: World,
        *,
        sequences: TrainingData | None = None,
        recipe: AdamWSettings | None = None,
    ) -> None:
        """`sequences` are the training data, by default those of the settings in order, or their documents packed;
        `recipe` is the optimizer's."""
        self.settings, self.method, self.world, self.recipe = settings, method, world, recipe or AdamWSettings()
        self.store: TrainingData = sequences or data_of(settings)
        if unsupported_reason := (
            vocabulary_unsupported_reason(settings, self.store.vocabulary)
            or combination_unsupported_reason(settings)
            or cuda_graph.unsupported_reason(settings, world.device.type)
        ):
            raise ValueError(unsupported_reason)
        limit_memory(settings.memory, world.device)
        self.cp: ContextParallel = context_parallel(settings, method, world)
        self.attend = RefusingAttention(method.attention(self.cp, settings))
        self.matrices = (
            cast(TensorParallelMethod, method).tensor_parallel(self.cp, settings)
            if settings.tp_size > 1
            else WholeMatrices(settings.model)
        )
        self.inside = InsideStep(world.device, world.rank)
        self._attend_in_window = None
        for mask in settings.masks[1:]:  # of one kind of layers at most
            self._attend_in_window = RefusingAttention(method.attention(self.cp, settings, mask))
        self.model, self._recompute = build_model(
            settings,
            self.attend,
            world.fsdp_mesh,
            self.matrices,
            windowed=self._attend_in_window,
            mix=Mix(self.cp, documents_of(settings)),
        )
        if settings.packs:
            self.model.longest = settings.seq_len
        self.inside.watch([block for block in self.model.blocks if isinstance(block, Block)])
        self.optimizer = adamw(
            self.model,
            settings.learning_rate,
            self.recipe,
            offload=float(settings.optimizer_offload),
            one_pass=keeps_whole(settings),
            eight_bit=settings.optimizer_states == "8bit",
        )
        # The same where its updates may run on beside the next forward.
        self._late = self.optimizer if isinstance(self.optimizer, PiecewiseAdamW) else None
        if self._late is not None:
            parts = self.model.embedding, *self.model.blocks, self.model.head
            self._late.update_in_forward(self.model, parts)
            if settings.gradient_offload:
                self._late.take_gradients()
        self.cp.segments(
            settings.steps.warmup_seq_len or settings.row_tokens
        )  # raises for a length that does not split
        self._clock = StepClock(world.device, runs_on=self._late is not None)
        # Why the host launches every step; empty where it launches the first one, and the others are replayed.
        self._not_captured = cuda_graph.not_captured_reason(settings, world.device.type) or ""
        self._captured: CapturedStep | None = None  # after the first step
        self._ahead: tuple[int, list[Batch]] | None = None  # a step that comes next, and its batches

    def run(self, on_progress: OnProgress, around_step: AroundStep = nullcontext) -> Measurement:
        """Warm up, then measure. Raises FloatingPointError when the loss stops being a number."""
        plan = self.settings.steps
        steps: list[StepResult] = []
        before = read_gpus(self.world)
        link = LinkProbes(self.world, self.cp, plan, message_bytes=self._query_bytes())
        for index in range(plan.total):
            link.before_step(index)
            if index == plan.warmup:
                self._before_full_length()
                reset_peaks(self.world.device)
            self.cp.traffic.reset()
            with (
                around_step() if index >= plan.warmup else nullcontext(),
                self.inside.step(on_progress, index + 1, plan.total, self.seq_len(index)),
            ):
                # An update runs into the next step, which has its time: without a warm-up step the first has none.
                steps.append(self.step(index, with_update=not (plan.warmup or plan.settle) and index == plan.total - 1))
            done = steps[-1]
            on_progress({"step": index + 1, "of": plan.total, "loss": done.loss, "seconds": done.step_seconds})
        after = read_gpus(self.world)
        seconds = [step.step_seconds for step in steps], [step.forward_seconds for step in steps]
        figures = measured(
            self.world,
            self.cp,
            before,
            after,
            replace(
                of_measured_steps(self.world, plan, *seconds),
                loss=[step.loss for step in steps],
                grad_norm=[step.grad_norm for step in steps],
                chosen=self._chosen(),
                data=self.store.describe() | self._packed_facts(),
            ),
            captured_bytes=self.captured_bytes,
        )
        if self._late is not None:
            self._late.wait()  # its copies would take time of what is measured now
        # Last, because each would raise every peak.
        figures.extra |= link.figures()
        figures.extra |= gemm_figures(self.world, self.settings)
        return figures

    def check(self) -> Extra:
        """One step of a small problem beside a dense float64 step; see `engine.tasks.check_training`."""
        from engine.tasks.check_training import check_training  # which runs a task of its own

        return check_training(self.settings, self.method, self.world, self._chosen())

    def gradient_norm(self) -> Tensor:
        """Global norm of the gradients that `gradients` has formed, 0-dim. Collective."""
        if self._late is not None and self._late.taken is not None:
            return self._late.taken.norm(self.model.parameters())
        return self.matrices.gradient_norm(self.model)

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """This rank's shard of a gradient after `gradients`, on the device or in host memory; None where none was
        formed."""
        if self._late is not None:
            return self._late.gradient_of(parameter)
        return None if parameter.grad is None else local_shard(parameter.grad)

    def again(self) -> None:
        """The step after the last one measured."""
        self.step(self.settings.steps.total)

    def _before_full_length(self) -> None:
        """After warm-up steps of another length, on all ranks: what the first step of full length would otherwise do
        within its own time. Kernels of linear layers are tuned, and the host memory for what a step saves is locked."""
        settings, model, steps = self.settings, self.settings.model, self.settings.steps
        if not steps.warmup or steps.warmup_seq_len in (0, settings.seq_len):
            return
        dtype, heads = DTYPES[settings.dtype], self.matrices.shape().heads
        attended = settings.seq_len // settings.cp_size  # tensor parallelism divides heads, and tokens elsewhere
        x_BLE, out_BLND, lse_BNL = (
            torch.empty(settings.batch_size, *dims, dtype=kind, device="meta")
            for dims, kind in (
                ((settings.seq_len // self.cp.size, model.hidden), dtype),
                ((attended, heads, model.output_dim), dtype),
                ((heads, attended), torch.promote_types(dtype, torch.float32)),
            )
        )
        taken = None if self._late is None else self._late.taken
        with nullcontext() if taken is None else taken.paused():  # single layers run, whose gradients are of no step
            tune_linear_layers(self.model, x_BLE)
            if self._recompute is not None:
                saved = self.attend.keep(out_BLND, lse_BNL, settings.checkpoint.tail)
                sizes = [one.nbytes for one in saved.tensors] if saved else []
                self._recompute.reserve(x_BLE.nbytes, sizes, self.world.device)
                lock_hosted_layers(self.model, x_BLE, self._recompute.hosted)
        self.world.barrier()  # a rank that was faster would wait for the others within its measured step

    def _query_bytes(self) -> int:
        """Of this rank's queries in a micro-batch of full length."""
        settings, model = self.settings, self.settings.model
        tokens = settings.batch_size * settings.seq_len // self.cp.size
        return tokens * model.heads * model.head_dim * DTYPES[settings.dtype].itemsize

    def _chosen(self) -> dict[str, str]:
        """What every `auto` became."""
        found = self.attend.resolved() | self._parameters() | self._cuda_graph()
        if self._attend_in_window is not None:  # its layers resolve every `auto` for their own mask
            found |= {f"window_{name}": value for name, value in self._attend_in_window.resolved().items()}
        if any(self.settings.model.linear_layers):
            found["linear_kernel"] = kernel_of(self.world.device.type, DTYPES[self.settings.dtype])
        return found

    def _parameters(self) -> dict[str, str]:
        """Whether this rank keeps whole parameters; and over how many ranks hybrid sharding splits them, those of one
        node."""
        found = {"parameters": "kept" if keeps_whole(self.settings) else "gathered"}
        if self.settings.sharding == "hybrid":
            found["sharding_node_size"] = str(self.world.fsdp_mesh.size(-1))
        return found

    def _cuda_graph(self) -> dict[str, str]:
        """Whether the steps were replayed as CUDA graphs, and why not."""
        if self.settings.cuda_graph != "auto":
            return {"cuda_graph": self.settings.cuda_graph}
        reason = self._not_captured
        return {"cuda_graph": "none", "cuda_graph_reason": reason} if reason else {"cuda_graph": "step"}

    @property
    def captured_bytes(self) -> int:
        """Peak of the GPU memory of a step that is replayed, whose allocator no longer counts it; 0 for others."""
        return 0 if self._captured is None else self._captured.allocated_bytes

    def step(self, index: int, *, with_update: bool = False) -> StepResult:
        """One optimizer step on the batch of that index. Collective. `with_update`: it ends when its update has ended,
        which may else run on beside the next forward."""
        self._clock.start()
        with record_function(STEP):
            batches = self._next_batches(index)
            if self._captured is not None:
                total, norm = self._timed(self._captured.run(batches))
            elif self._not_captured:
                total, norm = self._timed(self._whole_step(batches))
            else:
                total, norm = self._before_capture(batches)
            if with_update and self._late is not None:
                self._late.join()
            # Read while the device still computes, which would otherwise wait for the next step's tokens.
            self._ahead = index + 1, self.batches(index + 1)
            forward_seconds, step_seconds = self._clock.stop()

        dist.all_reduce(total)
        outcome = StepResult(
            loss=total.item(), grad_norm=norm.item(), forward_seconds=forward_seconds, step_seconds=step_seconds
        )
        if not (math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)):
            raise FloatingPointError(
                f"step {index + 1} has loss {outcome.loss} and gradient norm {outcome.grad_norm}; try a learning_rate "
                f"below {self.settings.learning_rate}"
            )
        if self._captured is None and not self._not_captured:
            self.inside.pause()
            self._capture(batches)
        return outcome

    def _next_batches(self, index: int) -> list[Batch]:
        """Those of step `index`, which the step before may have read."""
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] == index else self.batches(index)

    def _timed(self, work: Generator[None, None, Result]) -> Result:
        """The result of `work`, whose stops become marks of the clock."""
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: Result = end.value
                return result
            self._clock.mark()

    def _before_capture(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """A step that the host launches, on the stream that is to capture the next one."""
        current = torch.cuda.current_stream(self.world.device)
        self._stream = torch.cuda.Stream(self.world.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            found = self._timed(self._whole_step(batches))
        current.wait_stream(self._stream)
        return found

    def _capture(self, batches: Sequence[Batch]) -> None:
        """Make the later steps replays of one like that on `batches`; raises RuntimeError where that cannot be.

        With `cuda_graph: auto`, only for kernels of attention whose captures are tested.
        """
        kernel = self.attend.resolved().get("kernel", "unknown")
        if self.settings.cuda_graph == "auto" and kernel not in cuda_graph.KERNELS:
            self._not_captured = f"auto captures no step with attention kernel {kernel}"
            return
        assert isinstance(self.optimizer, OnePassAdamW), "parameters are kept whole, and their states beside them"
        try:
            self._captured = CapturedStep(
                self._whole_step, batches, self.optimizer, self.settings.model.vocab, self._stream
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"a step with attention kernel {kernel} could not be captured as a CUDA graph "
                f"({str(error).strip().splitlines()[0]}); set cuda_graph to none"
            ) from error

    def gradients(self, index: int) -> Tensor:
        """Form the gradients of step `index`; returns this rank's share of the mean loss, 0-dim. Collective."""
        return self._timed(self._gradients(self._next_batches(index)))

    def _whole_step(self, batches: Sequence[Batch]) -> Work:
        """Gradients and update: this rank's share of the mean loss, and the global norm of the gradients before
        clipping, both 0-dim. Stops where `_gradients` does. Collective."""
        total = yield from self._gradients(batches)
        self.inside.mark("update")
        with record_function(OPTIMIZER):
            norm = self.gradient_norm()
            clip_and_step(self.model, self.optimizer, self.recipe.max_grad_norm, norm)
            self.optimizer.zero_grad()
        return total, norm

    def _gradients(self, batches: Sequence[Batch]) -> Generator[None, None, Tensor]:
        """Form the gradients; returns what `gradients` does. Stops after every forward, and before each but the first
        one."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for number, batch in enumerate(batches):
            if number:
                yield
            sum_across_nodes(self.model, now=batch is batches[-1])  # gradients cross the slow links once per step
            loss = self.forward(batch)
            yield
            loss.backward()
            total += loss.detach()
        self.matrices.complete_gradients(self.model)
        return total

    def forward(self, batch: Batch) -> Tensor:
        """This rank's share of the mean loss, 0 where no label counts: all ranks' and micro-batches' add up to it."""
        self.inside.forward_begins()
        if batch.packed is not None:
            self.attend_under(batch.packed)
        loss_sum = self.model(batch.tokens_BL, batch.positions_L, batch.labels_BL)
        return loss_sum / batch.targets.clamp(min=1)

    def attend_under(self, packed: PackedMask) -> None:
        """Let the forwards that follow attend inside these documents. A forward that is open keeps its own, also where
        backward runs its layers again."""
        attend = within = self.attend.under(packed.documents, packed.cp)
        if any(self.settings.model.windowed):
            inside = self._inside_window(packed.documents)
            within = (self._attend_in_window or self.attend).under(inside, packed.cp)
        mix = Mix(packed.cp, packed.documents)
        for block in self.model.blocks:
            block.attend, block.mix = within if block.windowed else attend, mix

    def mask_of(self, row: PackedRow) -> PackedMask:
        """The documents of a row, dealt to the ranks where the layout depends on them: by what layers without a window
        see, where there are some. What plans need of them is formed here, on the host, while the device may still
        compute the step before."""
        documents, windowed = row.documents, self.settings.model.windowed
        inside = [self._inside_window(documents)] if any(windowed) else []
        seen = inside if all(windowed) else [documents, *inside]
        cp = self.cp.under(seen[0])
        if cp.size > 1:
            for mask in seen:
                pair_table(mask, cp.layout, len(row.tokens_S), cp.size)  # which is cached
        return PackedMask(documents=documents, cp=cp)

    def _inside_window(self, documents: Documents) -> Documents:
        """What layers with a window see of a row."""
        return replace(documents, left=self.settings.model.window - 1)

    def batches(self, index: int) -> list[Batch]:
        """This rank's tokens of step `index` by micro-batch, with the labels their global neighbours give them.

        One batch of `gradient_accumulation` times the size would hold the same sequences in the same order. Collective.
        """
        settings, device, seq_len = self.settings, self.world.device, self.seq_len(index)
        # A replica's sequences of a step follow one another, so its micro-batches count as replicas here.
        turn, micro_batches = index * settings.dp_size + self.world.replica, settings.gradient_accumulation
        if isinstance(self.store, PackedSequences):
            shards, positions = [], []
            masks: list[PackedMask | None] = []
            for number in range(micro_batches):
                row = self.packed_row(turn * micro_batches + number)
                mask = self.mask_of(row)
                shards.append(tuple(mask.cp.shard(each[None], dim=1) for each in (row.tokens_S, row.labels_S)))
                positions.append(to_device(mask.cp.shard(row.positions_S, dim=0), device))
                masks.append(mask)
        else:
            sequences = cast(Sequences, self.store)
            whole = [
                sequences.batch(turn, number, micro_batches, settings.batch_size, seq_len)
                for number in range(micro_batches)
            ]
            positions = [to_device(self.cp.positions(seq_len), device)] * micro_batches
            masks = [None] * micro_batches
            shards = [(self.cp.shard(tokens, dim=1), self.cp.shard(labels, dim=1)) for tokens, labels in whole]
        targets = to_device(torch.stack([(labels_BL != IGNORE).sum() for _, labels_BL in shards]).sum(), device)
        dist.all_reduce(targets)
        return [
            Batch(
                tokens_BL=to_device(tokens_BL, device),
                positions_L=positions_L,
                labels_BL=page_locked(labels_BL, device),
                targets=targets,
                packed=mask,
            )
            for (tokens_BL, labels_BL), positions_L, mask in zip(shards, positions, masks, strict=True)
        ]

    def packed_row(self, micro_batch: int) -> PackedRow:
        """The rows of a micro-batch, counted over all steps and replicas, as one."""
        store = cast(PackedSequences, self.store)
        rows = (store.row(store.place(number)) for number in store.of_micro_batch(micro_batch))
        return joined(rows, self.settings.row_tokens)

    def packed_counts(self, first: int, steps: int = 1) -> PackedCounts | None:
        """What the rows of `steps` steps from `first` on hold, over all ranks; None where rows are not packed."""
        return self.store.of_steps(first, steps) if isinstance(self.store, PackedSequences) else None

    def _packed_facts(self) -> dict[str, object]:
        """What the measured steps learnt from, for the record."""
        plan = self.settings.steps
        counts = self.packed_counts(plan.warmup, plan.measured)
        if counts is None:
            return {}
        per_step = {"tokens_per_step": counts.tokens / plan.measured, "pairs_per_step": counts.pairs / plan.measured}
        return {"packed": {**per_step, "padding": counts.padding}}

    def seq_len(self, index: int) -> int:
        """Tokens of a sequence of step `index`: warm-up steps may be shorter."""
        steps = self.settings.steps
        return (index < steps.warmup and steps.warmup_seq_len) or self.settings.seq_len
