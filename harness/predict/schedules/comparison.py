"""What the cost model would choose where several schedules of a problem were measured in one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.attention.cost import HardwareModel, choose_num_head_chunks, choose_schedule
from harness.predict.schedules.measured import CallShape, MeasuredCall, Side


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleComparison:
    """The model's choice for one problem beside the calls measured in one folder."""

    folder: str
    problem: CallShape
    calls: Sequence[MeasuredCall]  # one of each schedule, the fastest first
    schedule: str
    num_head_chunks: int  # that the model would take; the call measured may have had another number

    @property
    def side(self) -> Side:
        return self.calls[0].side

    @property
    def chosen(self) -> MeasuredCall:
        return next(call for call in self.calls if call.schedule == self.schedule)

    @property
    def best(self) -> MeasuredCall:
        return self.calls[0]

    @property
    def behind(self) -> float:
        """Measured seconds of the choice over those of the fastest schedule, less one."""
        return self.chosen.seconds / self.best.seconds - 1

    @property
    def within_noise(self) -> bool:
        """Whether the medians differ by at most the larger interquartile range of the two schedules' steps."""
        return self.chosen.seconds - self.best.seconds <= max(self.chosen.spread, self.best.spread)


def comparisons(calls: Iterable[MeasuredCall], model: HardwareModel) -> list[ScheduleComparison]:
    """Of every problem and folder with several schedules. Where one ran twice, its last call counts."""
    found: dict[tuple[str, CallShape], dict[str, MeasuredCall]] = {}
    for call in calls:
        found.setdefault((call.folder, call.problem), {})[call.schedule] = call
    return [
        _comparison(sorted(by_schedule.values(), key=lambda call: call.seconds), model)
        for by_schedule in found.values()
        if len(by_schedule) > 1
    ]


def _comparison(calls: Sequence[MeasuredCall], model: HardwareModel) -> ScheduleComparison:
    call = calls[0]
    schedule = choose_schedule(call.workload, call.layout, model).best
    return ScheduleComparison(
        folder=call.folder,
        problem=call.problem,
        calls=calls,
        schedule=schedule,
        num_head_chunks=choose_num_head_chunks(schedule, call.workload, model),
    )
