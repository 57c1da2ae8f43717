"""Systems to results, results to the table. A system that was run before with the same pin and cases is kept."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from baselines.fidelity.attention import attention_rows
from baselines.fidelity.cases import SYSTEMS, TRAINING, Case, SystemCases, TrainingCase, TrainingSystem
from baselines.fidelity.table import Result, Row, as_csv, as_markdown
from baselines.fidelity.training import training_rows
from baselines.install.places import InstallPlace
from baselines.pin import load_pin
from cluster.files.errors import UsageError, nearest
from engine.atomic import write_atomic
from engine.reader import from_json, parse_json, read_regular, to_json

NAMES = (*SYSTEMS, *TRAINING)
RESULTS, CSV, MARKDOWN = "fidelity.jsonl", "fidelity.csv", "fidelity.md"

Say = Callable[[str], None]


def run_systems(names: Sequence[str], out: Path, commit: str, *, anew: bool = False, say: Say = print) -> list[Row]:
    """Run those systems, or all; keep their results in OUT/fidelity.jsonl, and write the table of all that are there.

    Raises UsageError for an unknown system, and where nothing can be written to `out`.
    """
    for name in names:
        system_named(name)
    results = read_results(out)
    for name in names or NAMES:
        kept = results.get(name)
        place = place_of(name)
        if kept is not None and not anew and _is_of(kept, name, place):
            say(f"{name}: {len(kept.rows)} cases are there already; --anew runs them again")
            continue
        if place is not None and place.condition()[0] != "installed":
            say(f"{name}: {absent_row(name, place).found}")
            continue
        say(f"{name}: {len(system_named(name).cases)} cases")
        results[name] = run_system(name, commit)
        lines = (json.dumps(to_json(results[name]), separators=(",", ":")) for name in NAMES if name in results)
        write_atomic(out / RESULTS, "".join(f"{line}\n" for line in lines))
    return write_table(out)


def run_system(name: str, commit: str, cases: Sequence[str] = (), keep: Path | None = None) -> Result:
    """All cases of an installed system, or those named; with `keep`, inputs, results and logs stay there.

    Raises UsageError for an unknown case and for a system that is not installed.
    """
    system, place = system_named(name), place_of(name)
    if place is not None and (reason := place.not_installed_reason(system.title)) is not None:
        raise UsageError(reason)
    known = [case.name for case in system.cases]
    for case in cases:
        if case not in known:
            raise UsageError(f"{name} has no case {case}; {nearest(case, known)}")
    with tempfile.TemporaryDirectory(prefix="fidelity-") as scratch:
        folder = Path(scratch) if keep is None else keep.absolute()
        if isinstance(system, SystemCases):
            chosen = [case for case in system.cases if not cases or case.name in cases]
            rows = attention_rows(name, system, chosen, place, _release(place), folder)
        else:
            training = [case for case in system.cases if not cases or case.name in cases]
            assert place is not None  # torch itself is attention alone
            rows = training_rows(name, system, training, place, _release(place), folder)
    state = place.state() if place else None
    return Result(
        name=name,
        commit=commit,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        pin=place.pinned.digest if place else "",
        python=state.python if state else platform.python_version(),
        torch=state.torch if state else metadata.version("torch"),
        packages=state.packages if state else {},
        stand_ins=place.stand_ins if place else [],
        rows=rows,
    )


def write_table(out: Path) -> list[Row]:
    """The table of the results in OUT; a system that is neither there nor installed is a row that says so."""
    results = read_results(out)
    rows: list[Row] = []
    for name in NAMES:
        place = place_of(name)
        if name in results:
            rows += results[name].rows
        elif place is not None and place.condition()[0] != "installed":
            rows.append(absent_row(name, place))
    write_atomic(out / CSV, as_csv(rows))
    write_atomic(out / MARKDOWN, as_markdown([results[name] for name in NAMES if name in results], rows))
    return rows


def absent_row(name: str, place: InstallPlace) -> Row:
    """The row of a system that is not installed: the line that installs it."""
    system = system_named(name)
    condition, sentence = place.condition()
    return Row(
        system=system.title, release=_release(place), case="", form="", kernel="", ranks=0, dtype="",
        verdict="not installed", found=f"{condition}; {sentence}", reproduce=place.install_command,
    )  # fmt: skip


def read_results(out: Path) -> dict[str, Result]:
    """The results in OUT by system, one on each line of the file; none where there is no file. Raises UsageError for a
    line that is no result."""
    path = out / RESULTS
    found: dict[str, Result] = {}
    try:
        for line in read_regular(path).splitlines():
            result = from_json(Result, parse_json(line))
            if result.name not in NAMES or result.name in found:
                raise ValueError(f"{result.name} is no system, or stands twice")
            found[result.name] = result
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: line {len(found) + 1} is no result of a system ({error}); remove it, then repeat the command"
        ) from error
    return found


def system_named(name: str) -> SystemCases | TrainingSystem:
    """Raises UsageError with the nearest name."""
    if name not in NAMES:
        raise UsageError(f"there are no cases for {name}; {nearest(name, NAMES)}")
    return SYSTEMS[name] if name in SYSTEMS else TRAINING[name]


def place_of(name: str) -> InstallPlace | None:
    """The installation that is compared: a release before the paper's copy; None of torch itself."""
    package = system_named(name).package
    return InstallPlace(system=package, flavour=load_pin(package).flavours[-1]) if package else None


def _release(place: InstallPlace | None) -> str:
    """Package and version, or commit."""
    if place is None:
        return f"torch {metadata.version('torch')}"
    checkout = place.pinned.checkout
    if checkout is not None:
        return f"{checkout.repository.rpartition('/')[2]} {checkout.commit[:12]}"
    return next(iter(place.pinned.packages)).replace("==", " ")


def _is_of(result: Result, name: str, place: InstallPlace | None) -> bool:
    """Whether the result is of this pin and of these cases."""
    cases: Sequence[Case | TrainingCase] = system_named(name).cases
    torch = metadata.version("torch") if place is None else result.torch
    return (
        result.pin == (place.pinned.digest if place else "")
        and result.torch == torch
        and [row.case for row in result.rows] == [case.name for case in cases]
    )
