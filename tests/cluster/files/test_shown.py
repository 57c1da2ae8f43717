"""Text of users, files and nodes on a terminal: it neither controls nor floods it."""

import io

from rich.table import Table
from rich.text import Text

from cluster.files.errors import MAX_CHARACTERS, quantity, shown, shown_error, shown_value
from cluster.files.reader import parse_yaml
from harness.base.terminal import LONG_TABLE_ROWS, SafeConsole, print_table
from harness.cli import main

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b1m\u202e\r\nlast"


def test_control_characters_are_written_as_escapes_and_line_breaks_stay():
    assert shown("a\x1b[31mb\x9bc\nd\te") == "a\\x1b[31mb\\x9bc\nd\te"
    assert shown_value("a\nb\ud800") == "a\\nb\\ud800"
    assert shown("naïve – 日本") == "naïve – 日本"


def test_a_line_break_in_an_error_is_an_escape_and_its_list_keeps_its_lines():
    assert shown_error("a\nb.yaml is missing:\n  one\x1b\n  two\n") == "a\\nb.yaml is missing:\n  one\\x1b\n  two\\n"


def test_measured_numbers_have_three_digits_and_no_exponent():
    assert [quantity(value) for value in (0.0625, 3.354, 55.41, 999.4, 1200.0, 4230.4)] == [
        "0.0625", "3.35", "55.4", "999", "1200", "4230"
    ]  # fmt: skip


def test_a_long_line_loses_its_middle_and_says_so():
    line = shown("begin " + "x" * 10_000 + " end")
    assert line.startswith("begin x")
    assert line.endswith("x end")
    assert "(9,010 characters left out)" in line
    assert len(line) < MAX_CHARACTERS + 50


def test_consoles_print_no_control_character_whatever_they_are_given():
    table = Table("name")
    table.add_row(Text(HOSTILE))
    table.add_row(HOSTILE + "x" * 10_000)
    console = SafeConsole(file=io.StringIO(), width=200, emoji=False)
    console.print(HOSTILE, markup=False, highlight=False)
    console.print(Text(HOSTILE))
    print_table(console, table)
    for _ in range(LONG_TABLE_ROWS):
        table.add_row(Text(HOSTILE))
    print_table(console, table)
    printed = console.file.getvalue()
    assert not set(printed) & set("\x1b\x07\x9b\u202e\r")
    assert printed.count("\\x1b[2J") == 2 + 2 + LONG_TABLE_ROWS + 2
    assert len(printed) < 200_000


def test_a_value_of_ten_thousand_characters_is_short_in_an_error():
    node = parse_yaml("x" * 10_000, "exp.yaml", lambda line: f"exp.yaml:{line}")
    assert len(node.describe()) < 300


def test_errors_of_commands_hold_no_control_character(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in (
        ["plan", HOSTILE],
        ["plan", "exp.yaml", "--set", HOSTILE + "=" + "y" * 10_000],
        ["status", HOSTILE],
        ["status", "--logs", HOSTILE],
        ["cluster", "nodes", HOSTILE],
        ["cluster", "check", HOSTILE],
        ["report", HOSTILE],
    ):
        assert main(command) != 0
        said = "".join(capsys.readouterr())
        assert all(one.isprintable() or one == "\n" for one in said), command
        assert said.count("\n") == 1, command
        assert max(map(len, said.splitlines())) < 1500
