"""The forms a check's result takes: table, JSON lines, Nagios, HTML and the live table."""

from __future__ import annotations

import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from cluster.files.errors import UsageError
from cluster.health.nodes import NodeReport
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import Node
from cluster.inventory.site import Site
from cluster.probing.verdict import Verdict
from cluster.render.html import heat_map, html_page, write_page
from cluster.render.live import live_table, progress_table
from cluster.render.text import headline, json_line, nagios_line, table, why_not

OK = Verdict(level="ok", summary="fine")
BUSY = Verdict(level="warn", summary="busy: by alice", busy=True, action="monitor")
EVIL = "<script>alert('x')</script> | \x1b[31m & \"quoted\""


def report(name: str, **verdicts: Verdict) -> NodeReport:
    return NodeReport(host=Host(name=name, address=name), verdicts={"reachability": OK, **verdicts}, seconds=1.25)


GOOD = report("gpu01", gpus=Verdict(level="ok", summary="8 x NVIDIA H200"), disk=OK, xid=OK)
TAKEN = report("gpu02", gpu_memory=BUSY, disk=OK)
BAD = report("gpu03", disk=Verdict(level="warn", summary="91% full"),
             gpus=Verdict(level="fail", summary="7 of 8 | GPUs", action="reboot"))  # fmt: skip
GONE = NodeReport(host=Host(name="gpu04"), verdicts={"reachability": Verdict(level="unknown", summary="no answer")},
                  seconds=10.0)  # fmt: skip
FLEET = [GOOD, TAKEN, BAD, GONE]


def test_the_table_shows_what_is_wrong_first_and_what_is_well_in_one_line() -> None:
    lines = [line.split(maxsplit=4) for line in table([GOOD, BAD]).splitlines()]
    assert lines[0] == ["NODE", "CHECK", "VERDICT", "ACTION", "FINDING"]
    assert [line[:2] for line in lines[1:4]] == [["gpu01", "reachability"], ["gpus", "ok"], ["(2", "more)"]]
    assert lines[4] == ["gpu03", "gpus", "fail", "reboot", "7 of 8 | GPUs"]
    assert lines[5][0] == "disk"
    assert table(FLEET).endswith("4 nodes: 1 ok, 1 warn, 1 unknown, 1 fail; 1 usable")


def test_why_a_node_is_not_usable_begins_with_what_is_worst() -> None:
    blind = Verdict(level="unknown", summary="see gpus")
    gone = Verdict(level="fail", summary="no GPU")
    assert why_not(report("gpu01", gpu_ecc=blind, gpus=gone, disk=BAD.verdicts["disk"])) == (
        "gpu01 is not usable; gpus fail: no GPU; gpu_ecc unknown: see gpus"
    )


def test_every_check_has_its_row_with_all() -> None:
    rows = table([GOOD], every_check=True).splitlines()
    assert len([row for row in rows if " ok " in row]) == len(GOOD.verdicts)


def test_a_headline_is_the_worst_finding_and_counts_the_rest() -> None:
    assert headline(BAD) == "gpus: 7 of 8 | GPUs (and 1 more)"
    assert headline(GOOD) == "4 checks ok"
    assert headline(TAKEN) == "gpu_memory: busy: by alice"


def test_nagios_is_one_line_with_status_words_and_performance_data() -> None:
    line = nagios_line(FLEET)
    assert "\n" not in line
    words, bar, data = line.partition(" | ")
    assert words.startswith("NODES CRITICAL - 1 of 4 usable; gpu03: gpus: 7 of 8 / GPUs (and 1 more); gpu04: ")
    assert bar
    assert "|" not in data
    assert data.split() == [
        "usable=1;;;0;4", "ok=1;;;0;4", "warn=1;;;0;4", "unknown=1;;;0;4", "fail=1;;;0;4", "busy=1;;;0;4",
        "seconds=10.000s;;;0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reports", "word"), [([GOOD], "OK"), ([GOOD, TAKEN], "WARNING"), ([TAKEN, GONE], "UNKNOWN"), (FLEET, "CRITICAL")]
)
def test_nagios_says_the_worst_of_all_nodes(reports: list[NodeReport], word: str) -> None:
    assert nagios_line(reports).startswith(f"NODES {word} - ")


def test_nagios_names_three_nodes_and_counts_the_rest() -> None:
    line = nagios_line([report(f"gpu{n}", gpus=BAD.verdicts["gpus"]) for n in range(64)])
    assert line.count("gpus:") == 3
    assert "and 61 more nodes" in line


def test_a_json_line_holds_everything() -> None:
    node = json.loads(json_line(BAD))
    assert (node["node"], node["verdict"], node["action"], node["usable"]) == ("gpu03", "fail", "reboot", False)
    assert node["checks"]["gpus"]["summary"] == "7 of 8 | GPUs"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not {name for name, _ in attrs} & {"src", "onclick"}
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_self_contained_and_escaped() -> None:
    evil = report("gpu05", disk=Verdict(level="warn", summary=EVIL))
    speeds = {frozenset(("a", "b<i>")): 40.0}
    page = html_page([*FLEET, evil], [heat_map("GB/s <b>", ["a", "b<i>"], speeds, 40.0)])
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert "script" not in tags.seen
    assert html.escape("<script>", quote=False) in page
    assert "b&lt;i&gt;" in page
    assert not re.search(r"(src|href)=[\"']?http", page)
    for name in ("gpu01", "gpu02", "gpu03", "gpu04", "gpu05"):
        assert f"<th>{name}</th>" in page


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", "content")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(UsageError, match="give --html a file you can write"):
        write_page(tmp_path / "none" / "page.html", "content")


def test_a_heat_map_reddens_what_is_below_the_median_and_names_failures() -> None:
    speeds = {frozenset("ab"): 40.0, frozenset("ac"): 20.0, frozenset("bc"): None}
    found = heat_map("x", ["a", "b", "c", "d"], speeds, 40.0)
    texts = [[cell.text for cell in row] for row in found.rows]
    assert texts == [["", "40", "20", ""], ["40", "", "failed", ""], ["20", "failed", "", ""], ["", "", "", ""]]
    assert found.rows[0][1].colour == "rgb(245, 245, 240)"
    assert found.rows[0][2].colour == "rgb(214, 69, 65)"
    assert found.rows[1][0] == found.rows[0][1]


def test_the_live_table_fills_as_nodes_answer() -> None:
    nodes = [Node(host=one.host, site=Site()) for one in FLEET]
    console = Console(file=io.StringIO(), width=120)
    console.print(progress_table(nodes, {"gpu03": BAD}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 of 4 nodes have answered" in text
    assert re.search(r"gpu03\s+fail\s+reboot\s+gpus: 7 of 8", text)
    assert re.search(r"gpu01\s+\.\.\.", text)


def test_nothing_live_is_shown_where_stdout_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with live_table([]) as show:
        show(GOOD)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("form", [table, nagios_line])
def test_control_characters_of_a_node_never_reach_the_terminal(form) -> None:  # type: ignore[no-untyped-def]
    evil = report("gpu05", disk=Verdict(level="fail", summary=EVIL))
    assert "\x1b" not in form([evil])
    assert "\x1b" not in why_not(evil)
