"""From settings whose checkpointing is open to settings with a value for everything, and what these are predicted to
take. A forecast says in words what was chosen and why, and stands in the trial's record."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.checkpoint.planning.choice import Choice, choice_of, open_names, with_choice
from engine.checkpoint.planning.cost import CostModel, Speeds
from engine.checkpoint.planning.memory import GIB, MemoryModel, RankMemory
from engine.checkpoint.planning.search import Grid, Problem, cheapest, leanest
from engine.lm_head.loss_kernel import forms_tiles
from engine.measurement import Forecast
from engine.settings import TrialSettings

# Error of the memory model, which every plan leaves room for (tests/engine/checkpoint/test_planning_memory.py).
ALLOCATED_WITHIN, RESERVED_WITHIN = 0.04, 0.08

_ROOM = 1.01  # over what is predicted to be reserved: beyond a budget it is slow to reserve, but no failure
_CPU_SHARE = 0.5  # of the host's memory, where ranks compute on it: data, other processes and the file cache need some
_HOST_SHARE = 0.9  # of the host's memory beside GPUs
_ONLY_WITH_GPU = frozenset({"checkpoint.offload", "optimizer_offload"})  # on a CPU all is host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Memory that one rank may take, in bytes; infinite where nothing is known."""

    gpu: float | None  # None: the rank computes on a CPU
    host: float = float("inf")  # its share of the host's
    source: str = ""  # where the figure of the GPU, or without one of the host, comes from

    @property
    def bytes(self) -> float:
        """Of the device that computes."""
        return _CPU_SHARE * self.host if self.gpu is None else self.gpu

    def share(self, memory: RankMemory, correction: float) -> float:
        """The part of the budget that a rank's memory takes; it fits up to 1. `correction` multiplies the prediction.

        On a GPU that is what the allocator reserves, so that it never has to give memory back in the middle of a step,
        and what is allocated with the model's error on top.
        """
        if self.gpu is None:
            return correction * memory.without_gpu / self.bytes
        device = max(_ROOM * memory.reserved, (1 + ALLOCATED_WITHIN) * memory.allocated)
        return max(correction * device / self.gpu, memory.host / (_HOST_SHARE * self.host))


def planned(
    settings: TrialSettings,
    budget: Budget,
    speeds: Speeds | None = None,
    *,
    correction: float = 1.0,
    correction_source: str = "",
    grid: Grid | None = None,
) -> tuple[TrialSettings, Forecast]:
    """The settings with the cheapest values of those that `planned` names, and the forecast.

    Where no values fit, those that take least memory, and the forecast says so: whether they run is then measured.
    """
    names = open_names(settings)
    problem = Problem(
        memory=MemoryModel(settings, on_gpu=budget.gpu is not None),
        cost=CostModel(settings, speeds or Speeds()),
        share=lambda memory: budget.share(memory, correction),
        start=choice_of(settings),
        open_names=names - without_effect(settings, on_gpu=budget.gpu is not None),
        layers=settings.model.layers,
        grid=grid or Grid(),
    )
    found = cheapest(problem)
    choice = found or leanest(problem)
    memory = problem.memory.of(choice)
    seconds = problem.cost.seconds(choice)
    forecast = Forecast(
        words=_words(choice, problem, budget, memory, seconds, fits=found is not None),
        fits=found is not None,
        budget_bytes=None if budget.bytes == float("inf") else int(budget.bytes),
        allocated_bytes=int(memory.allocated if budget.gpu is not None else memory.without_gpu),
        reserved_bytes=int(memory.reserved if budget.gpu is not None else memory.without_gpu),
        host_bytes=int(memory.host),
        added_seconds=seconds,
        correction=correction,
    )
    if correction != 1:
        shown = f" ({correction_source})" if correction_source else ""
        forecast = replace(forecast, words=f"{forecast.words}; the prediction is taken {correction:.3g} times{shown}")
    return with_choice(settings, choice), forecast


def without_effect(settings: TrialSettings, *, on_gpu: bool) -> frozenset[str]:
    """Names of settings of which every value is the same: there is nothing to choose."""
    names = frozenset() if on_gpu else _ONLY_WITH_GPU
    if not forms_tiles(settings) or settings.tp_size > 1:
        names |= {"head_tiles"}
    return names


def _words(choice: Choice, problem: Problem, budget: Budget, memory: RankMemory, seconds: float, *, fits: bool) -> str:
    """What was chosen, and why, in one sentence."""
    kept = "; ".join(kept_in_words(choice, problem.layers))
    needed = memory.without_gpu if budget.gpu is None else memory.reserved
    if budget.bytes == float("inf"):
        room = f"{needed / GIB:.3g} GiB predicted, budget unknown"
    else:
        room = f"{needed / GIB:.3g} of {budget.bytes / GIB:.3g} GiB ({budget.source})"
    if not fits:
        return f"nothing fits: {room} with the least that can be kept: {kept}"
    added = f"adds {seconds:.2g} s to a step, the least that fits" if seconds else "nothing is repeated"
    return f"{kept}; {room}; {added}"


def kept_in_words(choice: Choice, layers: int) -> list[str]:
    """What a choice keeps and where, one phrase each."""
    checkpoint = choice.checkpoint
    again = checkpoint.layers_again(layers)
    words = []
    if whole := layers - again:
        which = f"all {layers}" if not again else f"the last {whole} of {layers}"
        mlp = checkpoint.mlp
        gates = "all" if mlp == 1 else "none" if mlp == 0 else f"{mlp:.0%}"
        words.append(f"{which} layers whole, with {gates} of the MLP's first products")
    if again:
        where = {"none": "", "inputs": ", inputs on the host", "all": ", both on the host"}[checkpoint.offload]
        inputs = "input" if checkpoint.every == 1 else f"input of every {checkpoint.every}th ({checkpoint.replay})"
        part = "" if checkpoint.tail == 1 else f"{checkpoint.tail:.0%} of "
        attention = f"{part}attention" if checkpoint.tail else ""
        which = f"all {layers} layers" if not whole else f"{again} layer{'s' if again > 1 else ''}"
        kept = f"{inputs} and {attention}" if attention else inputs
        words.append(f"of {which} {kept}{where}")
    words += [f"MLP in {choice.mlp_tiles} tiles"] * (choice.mlp_tiles > 1)
    words += [f"projections in {choice.projection_tiles} tiles"] * (choice.projection_tiles > 1)
    words += [f"LM head in {choice.head_tiles} tiles"] * (choice.head_tiles > 0)
    words += ["moments on the host"] * choice.optimizer_offload
    return words
