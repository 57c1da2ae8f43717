"""The software check, run on this machine and judged: what the site names must be there, whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cluster.checks.software import preloaded, software
from cluster.inventory.site import Container, Site, Software
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict
from cluster.transport.reach import LocalRunner
from tests.patience import AMPLE
from tests.programs import shell_program

ROOT = Path(__file__).resolve().parents[2]


def found(site: Site) -> Verdict:
    probe = software.probe(site)
    done = LocalRunner().run(["sh", "-c", probe.script], deadline_seconds=AMPLE)
    return software.judge(Output(text=done.stdout + done.stderr, exit_status=done.exit_status), site)


def named(python: str = sys.executable, folder: str = str(ROOT), **more) -> Site:
    return Site(software=Software(python=python, folder=folder), **more)


def test_the_software_that_runs_here_is_found_with_its_versions() -> None:
    pytest.importorskip("ray")
    verdict = found(named())
    assert verdict.level == "ok"
    assert verdict.summary.startswith("python 3.")
    assert verdict.summary.endswith(f" in {sys.executable}")
    assert verdict == found(Site())  # the paths of this program, where the site names none


def test_each_part_that_is_absent_fails_and_is_named(tmp_path: Path) -> None:
    assert found(named(python="/absent/python")).summary == (
        "/absent/python is no executable file; install it there, or correct software in the site"
    )
    assert "false does not run (silent)" in found(named(python="/bin/false")).summary
    verdict = found(named(folder=str(tmp_path)))
    assert (verdict.level, verdict.action) == ("fail", "isolate")
    assert verdict.summary.startswith(f"{tmp_path} is no checkout of this project")
    bare = shell_program(tmp_path / "python", f'exec {sys.executable} -I -S "$@"')  # without site-packages
    assert f"{bare} lacks ray and torch" in found(named(python=str(bare))).summary


def test_a_library_to_preload_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "a.so").touch()
    site = Site(environment={"LD_PRELOAD": f"{tmp_path}/a.so:/absent/b.so"})
    assert preloaded(site) == [f"{tmp_path}/a.so", "/absent/b.so"]
    verdict = found(site)
    assert verdict.level == "fail"
    assert "LD_PRELOAD names /absent/b.so, which cannot be read" in verdict.summary
    assert "a.so" not in verdict.summary.replace("/absent/b.so", "")


def test_a_node_without_the_project_is_sound_where_the_site_names_no_software() -> None:
    verdict = software.judge(Output(text="no folder\nno python\n"), Site())
    assert verdict.level == "ok"
    assert verdict.summary.startswith("not installed where it is here (")


def test_software_in_an_image_is_not_looked_for_on_the_node() -> None:
    verdict = found(named(container=Container(engine="docker", image="burst:1")))
    assert (verdict.level, verdict.summary) == ("ok", "the software is in the image burst:1")
    assert software.judge(Output(text="sh: broken"), named(container=Container(engine="docker", image="b:1"))) == (
        Verdict(level="unknown", summary="the probe did not run (sh: broken)")
    )
