"""From an experiment to its trials: pure data, the same every time, torch never imported.

A combination that cannot run stays in the plan with its reason: in a sweep that is a result, not a failure.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

from engine.attention.masks import parse_mask
from engine.checkpoint.planning.memory_settings import left_open
from engine.measurement import Forecast
from engine.settings import Checkpoint, Task, TrialSettings, to_json
from engine.shape import ModelShape
from harness.base.errors import UsageError
from harness.machine.this_machine import Machine
from harness.metrics.hardware import Hardware
from harness.plan.checkpointing import with_plan
from harness.plan.forecast import forecast
from harness.plan.predict import gpu_room, ranks_of_node
from harness.plan.unsupported import unsupported_reason
from harness.predict.packed import step_work
from harness.records.forecasts import correction_of
from harness.records.record import Record
from harness.spec.experiment import Experiment
from harness.spec.methods import is_native, method_named
from harness.spec.table import EQUAL, origin_of, values_for
from harness.spec.trial import Trial, is_named

MAX_TRIALS = 100_000  # combinations of a sweep: more are a mistake, and would fill the memory

_MOST_TOLD = 3  # settings, and values of one, that a message lists


def plan(
    experiment: Experiment, machine: Machine, earlier: Sequence[Record] = (), *, hardware: Hardware | None = None
) -> tuple[Trial, ...]:
    """All trials of an experiment on a machine: tasks, then the sweep with its last axis fastest, then seeds.

    Where `checkpoint` is auto, its values are chosen here for this machine (harness.plan.checkpointing), by what
    `earlier` trials took as well; at the speeds of `hardware`, by default of the shipped file of the machine's GPU.

    Combinations with equal settings become one trial. Raises UsageError when model settings contradict each other, and
    before any is formed when there are too many.
    """
    given = _given(experiment)
    one_of_each: dict[str, Trial] = {}  # a value and the `auto` that stands for it are one trial
    for asked in asked_for(experiment):
        each, planned = _with_plan(asked, machine, earlier, hardware)
        trial = Trial(
            experiment=experiment.name,
            title=experiment.title,
            settings=each,
            deadline_seconds=experiment.limits.trial_seconds,
            start_seconds=experiment.limits.start_seconds,
            hang_seconds=experiment.limits.hang_seconds,
            unsupported_reason=unsupported_reason(each, machine),
            table=origin_of(each.method, each.settings, given),
            plan=planned,
        )
        one_of_each.setdefault(trial.id, trial)
    return tuple(one_of_each.values())


def asked_for(experiment: Experiment) -> list[TrialSettings]:
    """The settings of all trials as the experiment gives them, before the planner chooses what it leaves open."""
    _check_count(experiment)
    return list(
        dict.fromkeys(settings for settings in _combinations(experiment) if not _excluded(settings, experiment.exclude))
    )


def unused_exclusions(experiment: Experiment) -> list[str]:
    """A sentence for each entry of `exclude` that drops nothing, as one with a misspelt value does. For a file as it
    stands: a scale, and `--set`, may sweep less than the entries were written for."""
    combinations = list(_combinations(experiment)) if experiment.exclude else []
    unused = [each for each in experiment.exclude if not any(_excluded(one, [each]) for one in combinations)]
    return [f"note: exclude drops nothing by {{{_entry_words(each)}}}; check its values" for each in unused]


def _entry_words(entry: Mapping[str, tuple[Any, ...]]) -> str:
    listed = {
        key: str(values[0]) if len(values) == 1 else f"[{', '.join(map(str, values))}]" for key, values in entry.items()
    }
    return ", ".join(f"{key}: {values}" for key, values in listed.items())


def planned_again(trial: Trial, machine: Machine, earlier: Sequence[Record]) -> Trial:
    """A trial whose plan knows what `earlier` trials of its run took; the trial itself where that changes nothing."""
    settings, plan = _with_plan(trial.settings, machine, earlier)
    if plan == trial.plan:
        return trial
    return replace(trial, settings=settings, plan=plan, unsupported_reason=unsupported_reason(settings, machine))


def at_length(
    trial: Trial, seq_len: int, machine: Machine, earlier: Sequence[Record], hardware: Hardware | None = None
) -> Trial:
    """The same trial with sequences of another length, planned and judged for that length."""
    settings, plan = _with_plan(replace(trial.settings, seq_len=seq_len), machine, earlier, hardware)
    return replace(trial, settings=settings, plan=plan, unsupported_reason=unsupported_reason(settings, machine))


def _with_plan(
    settings: TrialSettings, machine: Machine, earlier: Sequence[Record], hardware: Hardware | None = None
) -> tuple[TrialSettings, Forecast | None]:
    if not settings.planned:  # most trials; all earlier records would be searched for a correction
        return settings, None
    correction = correction_of(settings, machine.gpu_name or "cpu", earlier)
    return with_plan(settings, machine, correction, hardware)


def _check_count(experiment: Experiment) -> None:
    """Raise UsageError for a product of more than MAX_TRIALS combinations; those that `exclude` drops count."""
    axes = {"task": experiment.tasks} | dict(experiment.sweep) | {"seeds": experiment.seeds}
    count = math.prod(len(values) for values in axes.values())
    if count > MAX_TRIALS:
        factors = " x ".join(f"{len(values)} of {key}" for key, values in axes.items() if len(values) > 1)
        raise UsageError(
            f"{experiment.source}: the sweep has {count:,} combinations ({factors}), and a plan takes at most "
            f"{MAX_TRIALS:,}; sweep fewer values, or split the experiment"
        )


def named(
    trials: Sequence[Trial], names: Sequence[str], option: str = "--only", *, search: bool = False
) -> tuple[Trial, ...]:
    """The trials that any of `names` means, in the plan's order: an id, the beginning of ids, or a pattern with `*`.

    Raises UsageError, with the nearest id, for one that means none. `search`: the run adds lengths, which no plan has.
    """
    ids = [trial.id for trial in trials]
    found: set[str] = set()
    for name in names:
        means = [each for each in ids if is_named(each, name)]
        if not means:
            near = difflib.get_close_matches(name, ids, n=1, cutoff=0.0)
            step = f"did you mean {near[0]}?" if near else "`burst plan --json` lists the ids"
            if search:
                step = "a length that the search added can be named where it is put into sweep.seq_len"
            raise UsageError(f"{option} {name!r} means none of the {len(ids)} trials; {step}")
        found.update(means)
    return tuple(trial for trial in trials if trial.id in found)


def nothing_can_run(trials: Sequence[Trial]) -> str | None:
    """One sentence when no trial of a plan can run, or None when at least one can."""
    if not trials:
        return "the plan is empty because exclude drops every combination; remove an entry of exclude"
    reasons = Counter(trial.unsupported_reason for trial in trials)
    if None in reasons:
        return None
    [(reason, count)] = reasons.most_common(1)
    if len(trials) == 1:
        return f"the plan's only trial cannot run: {reason}"
    if count == len(trials):
        return f"none of the {len(trials)} trials can run: {reason}"
    return f"none of the {len(trials)} trials can run, {count} of them because {reason}"


def varying_settings(trials: Sequence[Trial]) -> list[str]:
    """Dotted keys of the settings in which the trials differ, in the order of the settings; a model counts as one."""
    return _varying([_flat(trial.settings) for trial in trials])


def told_apart(others: Sequence[TrialSettings], ours: Sequence[TrialSettings]) -> str:
    """The settings that alone tell all `others` apart from `ours`: `steps.measured 2, not 3`; empty where these are no
    few, or have many values. What a planner chose tells no trials apart."""
    planned = {key for settings in (*others, *ours) for key in ("planned", *settings.planned.split())}
    flats = [[_flat(settings) for settings in side] for side in (others, ours)]
    models = {flat["model"] for side in flats for flat in side}
    keys = [key for key in flats[0][0] if key not in planned]
    if len(models) > 1:  # a model's fields go with its name
        keys = [key for key in keys if not key.startswith("model.")]
    theirs, values = ({key: dict.fromkeys(str(flat[key]) or "''" for flat in side) for key in keys} for side in flats)
    telling = [key for key in keys if theirs[key].keys().isdisjoint(values[key])]
    if not 0 < len(telling) <= _MOST_TOLD:
        return ""
    if any(len(found[key]) > _MOST_TOLD for found in (theirs, values) for key in telling):
        return ""
    # In all else each of the others has to be one of ours: then nothing is left to be told.
    rest, expected = ({tuple(str(flat[key]) for key in keys if key not in telling) for flat in side} for side in flats)
    if not rest <= expected:
        return ""
    return ", and ".join(f"{key} {' or '.join(theirs[key])}, not {' or '.join(values[key])}" for key in telling)


def _varying(flats: Sequence[Mapping[str, Any]]) -> list[str]:
    return [key for key in flats[0] if any(flat[key] != flats[0][key] for flat in flats)] if flats else []


def _model_tflop(settings: TrialSettings) -> float | None:
    """1e12 model FLOPs of one step or call, None where the mask does not describe a sequence of that length."""
    described = parse_mask(settings.mask).unsupported_reason(settings.seq_len) is None
    return step_work(settings).model / 1e12 if described else None


def plan_table(
    trials: Sequence[Trial], hosts: Machine | None = None, hardware: Hardware | None = None
) -> list[dict[str, object]]:
    """A plan as rows: trial id, task, method, model, sizes, every other setting that varies, and whether it can run.

    `model_tflop` is what one step or call computes over all ranks, in 1e12 model FLOPs. With `hosts`, several as one
    machine, also how many of them a trial takes and its ranks on each, empty where it does not spread. With `hardware`,
    the prediction of `harness.plan.forecast`: seconds of a step or call, GiB of a rank on its GPU and on the host, and
    whether the former fits the GiB that the trial may take of the GPU (`gpu_room_gib`); None where there is no
    prediction. Where the planner chose for some of the trials, what it chose and why, in words; without `hardware` also
    whether that fits.

    A row of `settings: as_published` or `tuned` says in `from_table` which settings came from the table, with their
    values, in `by_hand` which of those that the table may fill the experiment gave, in `notes` what no setting says.
    """
    always = ["task", "method", "model", "seq_len", "cp_size", "world_size"]
    # Fields of the model are left out: its name, which is there, changes with them.
    flats = [_flat(trial.settings) for trial in trials]
    keys = always + [key for key in _varying(flats) if key not in always and not key.startswith("model.")]
    planning = any(trial.plan for trial in trials)
    rows = []
    for trial, flat in zip(trials, flats, strict=True):
        rows.append(
            {"trial_id": trial.id}
            | {key: flat[key] for key in keys}
            | {"model_tflop": _model_tflop(trial.settings)}
            | (_origin(trial, flat) if trial.settings.settings != EQUAL else {})
            | (_spread(trial.settings.world_size, hosts) if hosts else {})
            | (_predicted(trial, hardware, hosts) if hardware else {})
            | (_chosen(trial.plan, judged=hardware is not None) if planning else {})
            | {"can_run": trial.unsupported_reason is None, "reason": trial.unsupported_reason or ""}
        )
    return rows


def _origin(trial: Trial, flat: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "settings": trial.settings.settings,
        "from_table": {name: flat[name] for name in trial.table.filled},
        "by_hand": list(trial.table.by_hand),
        "notes": list(trial.table.notes),
    }


def _spread(ranks: int, hosts: Machine) -> dict[str, Any]:
    count = hosts.nodes_for(ranks)
    return {"nodes": count or "", "ranks_per_node": ranks // count if count else ""}


def _predicted(trial: Trial, hardware: Hardware, hosts: Machine | None) -> dict[str, Any]:
    settings = trial.settings
    found = forecast(settings, hardware, node_ranks=ranks_of_node(settings, hosts), plan=trial.plan)
    return {
        "predicted_seconds": found.time.seconds if found.time else None,
        "predicted_gpu_gib": found.gpu_gib,
        "predicted_host_gib": found.host_gib,
        "gpu_room_gib": gpu_room(settings, hardware),
        "predicted_to_fit": found.fits,
    }


def _chosen(plan: Forecast | None, *, judged: bool) -> dict[str, Any]:
    """What the planner chose in words, and where nothing else judges that, whether it fits."""
    fits = {} if judged else {"predicted_to_fit": plan.fits if plan else None}
    return fits | {"checkpoint_plan": plan.words if plan else None}


def _combinations(experiment: Experiment) -> Iterator[TrialSettings]:
    axes = experiment.sweep
    for task in experiment.tasks:
        for values in itertools.product(*axes.values()):
            chosen = {**experiment.fixed, **dict(zip(axes, values, strict=True))}
            for seed in experiment.seeds:
                yield _settings(experiment, task, chosen, seed)


def _given(experiment: Experiment) -> frozenset[str]:
    """Settings that the experiment gives itself, by dotted name."""
    return frozenset({*experiment.sweep, *experiment.fixed})


def _settings(experiment: Experiment, task: Task, chosen: Mapping[str, Any], seed: int) -> TrialSettings:
    """One combination, with dotted keys put into the values they reach into.

    `settings: as_published` and `tuned` fill from their table what the experiment does not give.
    """
    chosen = {**values_for(chosen["method"], chosen.get("settings", EQUAL), _given(experiment)), **chosen}
    top = {key: value for key, value in chosen.items() if "." not in key}
    nested: dict[str, dict[str, Any]] = {"model": {}, "checkpoint": {}}
    for key, value in chosen.items():
        if "." in key:
            owner, field = key.split(".")
            nested[owner][field] = value
    try:
        settings = TrialSettings(
            **top | {"model": _model(top["model"], nested["model"])},
            checkpoint=Checkpoint(**_planner(task, top["method"], nested["checkpoint"])),
            task=task,
            steps=experiment.steps,
            seed=seed,
        )
        return left_open(settings, chosen)
    except ValueError as error:
        raise UsageError(f"{experiment.source}: {error}") from error


def _planner(task: Task, method: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of `checkpoint` that a file gives, with a planner: auto where it gives none at all. Tasks that save
    nothing, and systems that decide for themselves, have no planner."""
    if task != "train" or not is_native(method_named(method)):
        return {**given, "plan": "hand"}
    return given or {"plan": "auto"}


def _model(model: ModelShape, changes: Mapping[str, Any]) -> ModelShape:
    """A shape with some of its fields changed; its name says so, because tables and figures print the name."""
    changed = {key: value for key, value in changes.items() if value != getattr(model, key)}
    if not changed:
        return model
    named = {} if "name" in changed else {"name": f"{model.name}({', '.join(f'{k}={v}' for k, v in changed.items())})"}
    return replace(model, **changed | named)


def _flat(settings: TrialSettings) -> dict[str, Any]:
    """Settings by dotted key; the model by its name, adapters in words."""
    flat: dict[str, Any] = {}
    for key, value in cast(dict[str, Any], to_json(replace(settings, lora=None))).items():
        if key == "model":
            flat |= {"model": value["name"]} | {f"model.{name}": field for name, field in value.items()}
        elif isinstance(value, dict):
            flat |= {f"{key}.{name}": field for name, field in value.items()}
        else:
            flat[key] = value
    return flat | {"lora": settings.lora and str(settings.lora)}


def _excluded(settings: TrialSettings, exclude: Sequence[Mapping[str, tuple[Any, ...]]]) -> bool:
    """Whether an entry names the settings. A plan asks this of every combination, so only the named keys are read."""
    return any(
        all(attrgetter("model.name" if key == "model" else key)(settings) in values for key, values in entry.items())
        for entry in exclude
    )
