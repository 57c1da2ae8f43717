"""Numbers that pages quote: computed from records, written between markers, refused where they say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.base.errors import UsageError
from harness.records.record import write_record
from harness.report.quoted import Quotes, rewritten, write_pages
from tests.harness.synthetic_records import record

NUMBERS = """
numbers:
  step: {run: cpu/sweep, where: seq_len == 1024, value: 1e3 * step_seconds_median, form: "{:.0f}"}
  long_step: {run: cpu/sweep, where: seq_len == 2048, value: 1e3 * step_seconds_median}
  ratio: {of: long_step / step, form: "{:.2f}"}
  longest: {run: cpu/sweep, value: seq_len, take: max, form: length}
  two: {run: cpu/sweep, value: seq_len}
  lost: {run: cpu/sweep, where: seq_len == 4096, value: step_seconds_median}
  faster:
    run: cpu/pairs
    where: seq_len == 1024 and method == 'burst'
    than: seq_len == 1024 and method != 'burst'
    form: "{:.2f}"
  faster_twice:
    run: cpu/pairs
    where: seq_len == 2048 and method == 'burst'
    than: seq_len == 2048 and method != 'burst'
    form: "{:.2f}"
  all_faster: {run: cpu/pairs, where: method != 'burst', than: method == 'burst'}
  one_round: {run: cpu/sweep, where: seq_len == 1024, than: seq_len == 2048}
  typo: {run: cpu/sweep, value: step_secconds}
tables:
  steps:
    runs: [cpu/sweep]
    each: [seq_len]
    columns:
      tokens: {value: seq_len, form: length}
      ms: {value: 1e3 * step_seconds_median, form: "{:.0f}"}
  named:
    runs: [cpu/sweep]
    label: length
    lines: {short: seq_len == 1024}
    let:
      step: {value: step_seconds_median}
      first: {run: cpu/sweep, where: seq_len == 2048, value: step_seconds_median}
    columns: {share: {of: step / first, form: "{:.0%}"}, ring: {where: method == 'ring', value: step_seconds_median}}
  complete:
    runs: [cpu/sweep]
    each: [seq_len]
    complete: true
    columns: {tokens: {value: seq_len}, short: {where: seq_len < 2048, value: seq_len}}
drawings: {}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with three published trials, the last without a number, and three methods in rounds of one step."""
    sweep = [record(seq_len=1024, seconds=0.1), record(seq_len=2048, seconds=0.4), record(seq_len=4096, status="oom")]
    pairs = [
        record(method=method, rounds=[[first], [second], [first]])
        for method, first, second in (("burst", 0.1, 0.2), ("ring", 0.4, 0.8), ("ulysses", 0.2, 0.4))
    ]
    pairs += [
        record(method=method, seq_len=2048, rounds=rounds)
        for method, rounds in (("burst", [[0.1], [0.2]]), ("ring", [[0.2], [0.5]]))
    ]
    for name, made in (("sweep", sweep), ("pairs", pairs)):
        for one in made:
            write_record(tmp_path / "results" / "published" / "cpu" / name / "trials" / one.trial_id, one)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "quoted.yaml").write_text(NUMBERS, encoding="utf-8")
    return tmp_path


def test_numbers_are_computed_from_records_and_from_each_other(checkout: Path) -> None:
    quotes = Quotes(checkout)
    assert [quotes.text(name) for name in ("step", "ratio", "longest")] == ["104", "4.00", "4k"]


def test_a_trial_beside_others_is_compared_with_the_fastest_of_them_in_pairs_of_rounds(checkout: Path) -> None:
    """Every round of `ulysses` takes twice as long, so that the second round, slow for all, widens no interval."""
    assert Quotes(checkout).text("faster") == "2.00 (2.00 to 2.00)"


def test_a_trial_of_two_rounds_is_quoted_by_two_values(checkout: Path) -> None:
    assert Quotes(checkout).text("faster_twice") == "2.00 and 2.50"


def test_a_table_has_a_line_per_group_and_the_status_where_there_is_no_number(checkout: Path) -> None:
    quotes = Quotes(checkout)
    assert quotes.text("steps").split("\n") == [
        "", "| tokens | ms |", "| --- | --- |", "| 1k | 104 |", "| 2k | 416 |", "| 4k | oom |", "",
    ]  # fmt: skip
    assert quotes.text("named").split("\n")[1::2] == ["| length | share | ring |", "| short | 25% | not measured |"]


def test_a_table_may_leave_out_lines_that_lack_a_record(checkout: Path) -> None:
    assert Quotes(checkout).text("complete").split("\n")[3:] == ["| 1024 | 1024 |", ""]


def test_the_command_writes_what_is_between_markers_and_leaves_the_rest(checkout, capsys):
    page = checkout / "README.md"
    page.write_text("Takes <!--step-->99<!--/--> ms.\n\n<!--steps-->\n<!--/-->\n", encoding="utf-8")
    write_pages(Quotes(checkout))
    assert capsys.readouterr().out == "rewritten: README.md\n"
    written = page.read_text("utf-8")
    assert written.startswith("Takes <!--step-->104<!--/--> ms.\n\n<!--steps-->\n| tokens | ms |\n")
    write_pages(Quotes(checkout))
    assert capsys.readouterr().out == ""
    assert page.read_text("utf-8") == written


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("a <!--stpe-->1<!--/-->", "defines no 'stpe'"),
        ("a <!--two-->1<!--/-->", "3 rows meet"),
        ("a <!--lost-->1<!--/-->", "oom"),
        ("a <!--all_faster-->1<!--/-->", "3 rows are compared at once"),
        ("a <!--one_round-->1<!--/-->", "needs steps of both sides, in two rounds or more"),
        ("a <!--typo-->1<!--/-->", "step_secconds"),
        ("a\n<!--step-->1<!--/-->", "begins a line"),
    ],
)
def test_a_marker_that_quotes_no_number_is_refused_by_its_name(checkout: Path, page: str, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        rewritten(page, Quotes(checkout))


def test_a_definition_with_an_unknown_key_is_refused(checkout: Path) -> None:
    (checkout / "docs" / "quoted.yaml").write_text(NUMBERS.replace("take:", "tkae:"), encoding="utf-8")
    with pytest.raises(UsageError, match="tkae"):
        Quotes(checkout)
