"""The forms a check's result takes: table, JSON lines, Nagios, HTML and the live table."""

from __future__ import annotations

import html
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from cluster.files.errors import UsageError
from cluster.health.nodes import NodeReport
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import Site
from cluster.probing.verdict import ACTIONS, LEVELS, Verdict
from cluster.render.html import heat_map, html_page, write_page
from cluster.render.live import live_table, progress_table
from cluster.render.text import SCHEMA, headline, json_line, nagios_line, table, why_not

RENDER = Path(__file__).parents[3] / "cluster" / "render"
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
    assert lines[1] == ["gpu03", "gpus", "fail", "reboot", "7 of 8 | GPUs"]
    assert lines[2] == ["disk", "warn", "none", "91%", "full"]
    assert lines[3] == ["gpu01", "4", "checks", "ok", "none    8 x NVIDIA H200"]
    assert lines[4][:4] == ["gpu03", "1", "check", "ok"]
    assert table(FLEET).endswith("4 nodes: 1 ok, 1 warn, 1 unknown, 1 fail; 1 usable")


def many(count: int, **verdicts: Verdict) -> list[NodeReport]:
    return [report(f"gpu{number:02}", **{**GOOD.verdicts, **verdicts}) for number in range(1, count + 1)]


def test_sixty_four_healthy_nodes_are_one_line_and_the_same_fault_of_several_is_another() -> None:
    lines = table(many(64)).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["gpu[01-64]", "4", "checks", "ok", "none", "8", "x", "NVIDIA", "H200"]
    faulty = [report("gpu65", disk=Verdict(level="fail", summary="full")), *many(60), *many(64, xid=BUSY)[60:]]
    lines = table(faulty).splitlines()
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["gpu65", "disk", "fail"],
        ["gpu[61-64]", "xid", "warn"],
        ["gpu65", "1", "check"],
        ["gpu[01-64]", "3-4", "checks"],
    ]


def test_one_fault_of_256_nodes_is_one_row_whatever_names_its_sentence_has_and_whatever_else_some_have() -> None:
    same = [report(f"gpu{n:03}", interface=Verdict(level="fail", summary=f"gpu{n:03}: no route"),
                   **({"xid": Verdict(level="warn", summary=f"XID 13 of {n}")} if n < 3 else {}))
            for n in range(256)]  # fmt: skip
    rows = table(same, only_faults=True).splitlines()
    assert rows[1].split(maxsplit=4) == ["gpu[000-255]", "interface", "fail", "none", "<node>: no route"]
    assert [row.split()[0] for row in rows[2:5]] == ["gpu000", "gpu001", "gpu002"]
    assert table(same[:1], only_faults=True).splitlines()[1].endswith("gpu000: no route")


def test_nodes_that_no_range_expresses_are_named_in_part() -> None:
    names = [f"{letter}{number}" for number, letter in enumerate("abcdef")]
    assert table([report(name) for name in names]).splitlines()[1].startswith("a0, b1, c2, d3 and 2 more  1 check")


def test_faults_alone_are_shown_and_everything_counted() -> None:
    *rows, summary = table(FLEET, only_faults=True).splitlines()
    assert re.findall(r"^gpu\S+", "\n".join(rows), re.MULTILINE) == ["gpu03", "gpu04", "gpu02"]
    assert summary == "4 nodes: 1 ok, 1 warn, 1 unknown, 1 fail; 1 usable"


def test_the_names_of_the_sites_are_told() -> None:
    judged = [replace(GOOD, site="h200x8"), replace(TAKEN, site="a800x8"), GONE]
    assert table(judged).endswith("3 nodes of a800x8 and h200x8: 1 ok, 1 warn, 1 unknown; 1 usable")
    assert json.loads(json_line(judged[0]))["site"] == "h200x8"
    assert json.loads(json_line(GOOD))["site"] is None
    assert "<h1>Nodes of a800x8 and h200x8</h1>" in html_page(judged)


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


@pytest.mark.parametrize("judged", FLEET, ids=lambda one: one.host.name)
def test_a_json_line_is_of_the_published_schema(judged: NodeReport) -> None:
    schema = json.loads((RENDER / "node.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    line = json.loads(json_line(judged))
    jsonschema.validate(line, schema)
    assert line["schema"] == SCHEMA == schema["properties"]["schema"]["const"]
    assert list(line) == schema["required"], "a new key needs its line in the schema; one that goes, a new version"
    assert [list(one) for one in line["checks"].values()] == [
        schema["properties"]["checks"]["additionalProperties"]["required"] for _ in line["checks"]
    ]
    assert tuple(schema["$defs"]["verdict"]["enum"]) == LEVELS
    assert tuple(schema["$defs"]["action"]["enum"]) == ACTIONS
    for damaged in (
        {**line, "schema": 2},
        {**line, "verdict": "fine"},
        {k: v for k, v in line.items() if k != "usable"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(damaged, schema)


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
        if tag not in ("meta", "input"):
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
    assert page.index("<h2>Faults</h2>") < page.index("7 of 8 | GPUs") < page.index("<h2>In order</h2>")
    part = html_page(FLEET, only_faults=True)
    assert "<th>gpu03</th>" in part
    assert "gpu01" not in part


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
    nodes = [InventoryNode(host=one.host, site=Site()) for one in FLEET]
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
