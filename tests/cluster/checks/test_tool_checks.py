"""Verdicts of DCGM and gcm, on answers written by us after dcgmi's sources (DCGM 3 and 4) and gcm's documentation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.checks.tools import GCM_CHECKS, dcgm, gcm
from cluster.inventory.site import Site
from cluster.probing.probe import Output
from cluster.probing.verdict import Level
from cluster.transport.reach import LocalRunner
from tests.patience import AMPLE
from tests.programs import shell_program


def health(overall: str, *errors: str) -> dict[str, Any]:
    body: dict[str, Any] = {"Overall Health": {"value": overall}}
    if errors:
        systems = {"Memory system": {"value": overall, "overflow": list(errors)}}
        body["GPU"] = {"children": {"3": {"value": overall, "children": {"Errors": {"children": systems}}}}}
    return {"header": ["Health Monitor Report"], "body": body}


def diagnostic(status: str, warnings: object, version: int = 4) -> dict[str, Any]:
    sound, result = {"status": "PASS"}, {"gpu_id": "3", "status": status, "warnings": warnings}
    tests = [{"name": "software", "results": [sound, result]}]
    title = "DCGM Diagnostic" if version == 4 else "DCGM GPU Diagnostic"
    return {title: {"test_categories": [{"category": "Deployment", "tests": tests}]}}


SOUND = health("Healthy"), diagnostic("PASS", [])


@pytest.mark.parametrize(
    ("answers", "level", "words"),
    [
        (SOUND, "ok", "DCGM's health: Healthy; DCGM's diagnostic: pass"),
        ((health("Warning", "row remap is pending"), SOUND[1]), "warn", "(GPU 3, Memory system: row remap is pending)"),
        (
            (health("Failure", "a double bit error"), SOUND[1]),
            "fail",
            "DCGM's health: Failure (GPU 3, Memory system: a",
        ),
        ((SOUND[0], diagnostic("WARN", [{"warning": "persistence is off"}])), "warn", "(software: persistence is off)"),
        ((SOUND[0], diagnostic("Fail", "no such library", 3)), "fail", "DCGM's diagnostic: fail (software: no such"),
        ((SOUND[0], diagnostic("SKIP", [])), "ok", "DCGM's diagnostic: pass"),
    ],
)
def test_dcgm_is_taken_at_its_word(answers: tuple[object, object], level: Level, words: str) -> None:
    rows = [f"{tag} {json.dumps(answer)}" for tag, answer in zip(("health", "diag"), answers, strict=True)]
    verdict = dcgm.judge(Output(text="\n".join([*rows, "end"])), Site())
    assert verdict.level == level
    assert words in verdict.summary


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("Error: Health watches not enabled. Please enable watches.", "dcgmi health -g 0 -s a turns its watches on"),
        ("Error: unable to establish a connection to the specified host: localhost", "unable to establish"),
        ('{"body": {}}', '({"body": {}})'),
        ("[]", "([])"),
    ],
)
def test_a_dcgm_without_a_verdict_is_no_fault_of_the_node(words: str, advice: str) -> None:
    verdict = dcgm.judge(Output(text=f"health {words}\ndiag {json.dumps(SOUND[1])}\nend"), Site())
    assert verdict.level == "ok"
    assert "dcgmi health gives no verdict" in verdict.summary
    assert advice in verdict.summary
    assert verdict.facts == {"health": None, "diag": "pass"}


def rows(*statuses: str, words: str = "All checks passed.") -> str:
    found = zip(statuses, GCM_CHECKS, strict=True)
    return "\n".join([*(f"gcm {status}|{name}|{words}" for status, name in found), "end"])


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        (rows("0", "0", "0", "0"), "ok", "gcm, check-syslogs xid: All checks passed."),
        (rows("0", "1", "0", "0", words="XID 13"), "warn", "gcm, check-syslogs xid: XID 13"),
        (rows("2", "1", "0", "0", words="1 row failed"), "fail", "ecc_uncorrected_volatile_total: 1 row failed"),
        (rows("2", "2", "2", "2", words="Usage: health_checks [OPTIONS]"), "ok", "(no verdict, exit status 2)"),
        (rows("127", "0", "0", "0", words=""), "ok", "silent (no verdict, exit status 127)"),
        ("gcm 0|check-syslogs xid|fine\nend", "unknown", "asked 4 times and answered 1"),
    ],
)
def test_gcm_is_taken_at_its_word(text: str, level: Level, words: str) -> None:
    verdict = gcm.judge(Output(text=text), Site())
    assert verdict.level == level
    assert words in verdict.summary


def test_the_probes_ask_the_tools_where_they_are_and_leave_nothing(tmp_path, monkeypatch):
    programs, folder = tmp_path / "bin", tmp_path / "tmp"
    folder.mkdir()
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("TMPDIR", str(folder))

    def look(check: Any) -> Output:
        done = LocalRunner().run(["sh", "-c", check.probe(Site()).script], deadline_seconds=AMPLE)
        return Output(text=done.stdout)

    assert dcgm.judge(look(dcgm), Site()).summary == "DCGM is not installed"
    assert gcm.judge(look(gcm), Site()).summary == "gcm is not installed"
    answers = {"health": json.dumps(health("Healthy"), indent=2), "diag": json.dumps(diagnostic("PASS", []), indent=2)}
    for name, text in answers.items():
        (tmp_path / name).write_text(text)
    shell_program(programs / "dcgmi", f'cat {tmp_path}/"$1"')
    shell_program(programs / "health_checks", 'echo "$*" >&2; case "$*" in *xid*) exit 1 ;; esac')
    assert dcgm.judge(look(dcgm), Site()).summary == "DCGM's health: Healthy; DCGM's diagnostic: pass"
    verdict = gcm.judge(look(gcm), Site())
    assert verdict.level == "warn"
    assert "check-syslogs xid: check-syslogs xid --sink=do_nothing --log-folder" in verdict.summary
    assert list(folder.iterdir()) == []
