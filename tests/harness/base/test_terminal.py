"""Tables on terminals of every width: what a reader came for is never cut away."""

import io
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table

from cluster.files.progress import Progress
from harness.base.terminal import print_table
from harness.report.results import rows_of
from harness.report.tables.trials import terminal_table
from harness.run.progress import LiveView
from harness.training.progress import TrainingView
from tests.harness.synthetic_records import cpu_sweep


def printed(table: Table, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    print_table(console, table)
    assert console.width == width
    return [line for line in console.export_text().splitlines() if line.strip()]


def demo_table() -> Table:
    return terminal_table(rows_of([record for record in cpu_sweep() if record.status == "ok"]))


def test_a_terminal_of_80_columns_shows_every_number_and_status_of_the_demo():
    lines = printed(demo_table(), 80)
    assert all(len(line.rstrip()) <= 80 for line in lines)
    wide = printed(demo_table(), 160)
    rule = 1
    assert [line.split() for line in lines if line != lines[rule]] == [
        line.split() for line in wide if line != wide[rule]
    ]


def test_reasons_wrap_beside_whole_numbers_on_80_columns():
    lines = printed(terminal_table(rows_of(cpu_sweep())), 80)
    assert not any("…" in line for line in lines)
    assert any("refused: 4 KV" in line and not line.rstrip().endswith("them") for line in lines)


@pytest.mark.parametrize("width", [1, 20, 40, 60])
def test_a_terminal_narrower_than_the_table_loses_nothing(width):
    lines = printed(demo_table(), width)
    assert not any("…" in line for line in lines)
    assert "status" in lines[0]
    assert sum(line.rstrip().endswith(" ok") for line in lines) == demo_table().row_count


def test_names_and_reasons_wrap_before_the_table_grows_beyond_the_terminal():
    table = Table("name", "what was found")
    table.columns[0].no_wrap = True
    table.columns[1].overflow = "fold"
    table.add_row("a-long-name", "commit " + "0123456789abcdef" * 4)
    lines = printed(table, 48)
    assert max(map(len, lines)) <= 48
    assert "".join(line[15:].strip("│┃ ") for line in lines[3:-1]) == "commit" + "0123456789abcdef" * 4


INSIDE = {"step": 2, "of": 3, "phase": "backward", "layer": 12, "layers": 32}


@pytest.mark.parametrize("trains", [True, False], ids=["burst train", "burst run"])
def test_the_live_line_shows_the_place_inside_a_step_that_takes_long(trains):
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    if trains:
        with TrainingView(console, 3, Progress("")) as view:
            view(INSIDE)
            assert view._live is not None
            assert view._live.tasks[0].completed == 1  # this step is not done
    else:
        live = LiveView(console)
        live.begin(1)
        live.step(INSIDE)
        live.end()
    assert "step 2 of 3, backward, layer 12 of 32" in console.file.getvalue()


def test_a_sentence_is_printed_as_it_stands_and_imports_nothing_more():
    """A signal's handler prints as well: an import that it interrupted could not be begun again inside it."""
    script = (
        "import io, sys; from harness.base.terminal import stdout_console;"
        "from harness.training.progress import Progress, TrainingView;"
        "console = stdout_console(); console.file = io.StringIO(); view = TrainingView(console, 3, Progress(''));"
        "before = set(sys.modules); view.say('runs/:smile:/x');"
        "sys.exit(' '.join([*(set(sys.modules) - before)]) or console.file.getvalue())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "runs/:smile:/x"
