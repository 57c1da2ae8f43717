"""Software, looked for on this machine; and docker, whose answers are written by us after its documented formats."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cluster.checks.software import docker, preloaded, software
from cluster.health.nodes import as_here
from cluster.inventory.checkout import code_digest, difference, own_versions
from cluster.inventory.site import Container, Site, Software
from cluster.probing.verdict import Verdict
from tests.cluster.gpu_outputs import EIGHT, NO_GPUS, board, judge, look
from tests.programs import shell_program

ROOT = Path(__file__).resolve().parents[3]


def found(site: Site) -> Verdict:
    return software.judge(look(software, site), site)


def named(python: str = sys.executable, folder: str = str(ROOT), **more) -> Site:
    return Site(software=Software(python=python, folder=folder), **more)


def test_the_software_that_runs_here_is_found_with_its_versions() -> None:
    pytest.importorskip("ray")
    verdict = found(named())
    assert verdict.level == "ok"
    assert verdict.summary.startswith("python 3.")
    assert verdict.summary.endswith(f" in {sys.executable}")
    assert verdict.facts["versions"] == own_versions()
    assert as_here(verdict) is verdict
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


def test_a_node_without_the_project_is_a_warning_where_the_site_names_no_software() -> None:
    """`burst cluster up` leaves it out, and other work may use it."""
    verdict = judge(software, "no folder\nno python\n", Site())
    assert verdict.level == "warn"
    assert verdict.summary.startswith("not installed where it is here (")


def test_software_in_an_image_is_not_looked_for_on_the_node() -> None:
    verdict = found(named(container=Container(engine="docker", image="burst:1")))
    assert (verdict.level, verdict.summary) == ("ok", "the software is in the image burst:1")
    assert judge(software, "sh: broken", named(container=Container(engine="docker", image="b:1"))) == (
        Verdict(level="unknown", summary="the probe did not run (sh: broken)")
    )


def test_a_node_with_other_software_than_this_machine_fails_as_up_would_leave_it_out() -> None:
    own = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cpu", "code": "abc"}
    assert difference(own, {**own, "torch": "2.13.0+cu130"}) == ""  # the same version, built for GPUs
    there = {**own, "python": "3.11.9", "code": None}
    assert difference(own, there) == (
        "python is 3.11.9 there but 3.11.7 on this machine, code is absent there but abc on this machine"
    )
    assert difference({**own, "ray": None}, {**own, "ray": "2.0"}) == ""  # this machine can start nothing either
    verdict = Verdict(level="ok", summary="", facts={"versions": {**own_versions(), "code": "other"}})
    judged = as_here(verdict)
    assert (judged.level, judged.action) == ("fail", "isolate")
    assert judged.summary.startswith("code is other there but ")
    assert judged.summary.endswith(" on this machine; install the same there, or correct software in its site")


def test_the_code_digest_tells_edits_apart_and_places_not(tmp_path: Path) -> None:
    digests = []
    for folder, text in (("a", "x = 1\n"), ("b", "x = 1\n"), ("c", "x = 2\n")):
        (tmp_path / folder / "engine").mkdir(parents=True)
        (tmp_path / folder / "engine" / "module.py").write_text(text)
        (tmp_path / folder / "engine" / "module.pyc").write_text(folder)
        digests.append(code_digest(tmp_path / folder))
    assert digests[0] == digests[1] != digests[2]


IMAGE_ID = "sha256:" + "3f" * 32
DOCKED = Site(gpus=EIGHT.gpus, container=Container(engine="docker", image="registry.lab/burst:2.1", image_id=IMAGE_ID))
HEALTHY = f"engine 28.2.2\nruntimes io.containerd.runc.v2 nvidia runc \ntoolkit yes\nimage {IMAGE_ID}"


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        (HEALTHY, "ok", "docker 28.2.2 has registry.lab/burst:2.1"),
        (HEALTHY.replace(" nvidia", ""), "ok", ""),
        (HEALTHY.replace("toolkit yes", "toolkit no"), "ok", ""),
        (HEALTHY.replace(" nvidia", "").replace("yes", "no"), "fail", "install nvidia-container-toolkit"),
        (HEALTHY.replace(IMAGE_ID, ""), "fail", "burst setup image push"),
        (HEALTHY.replace("3f3f", "4e4e", 1), "fail", "expected sha256:3f3f"),
        ("absent", "fail", "not installed"),
        ("Cannot connect to the Docker daemon\nrefused 1", "fail", "Cannot connect to the Docker daemon"),
        ("permission denied\nrefused 1", "fail", "group docker"),
        ("Segmentation fault", "unknown", "something else"),
    ],
)
def test_docker_is_judged_where_the_site_uses_it(text: str, level: str, words: str) -> None:
    verdict = judge(docker, text, DOCKED, board("h200"))
    assert verdict.level == level
    assert words in verdict.summary


def test_docker_without_gpus_needs_no_toolkit() -> None:
    site = Site(container=Container(engine="docker", image="burst"))
    text = HEALTHY.replace(" nvidia", "").replace("yes", "no")
    assert judge(docker, text, site, NO_GPUS).level == "ok"
    assert judge(docker, text, site, board("h200")).level == "fail"


def test_a_site_without_docker_never_asks_for_it() -> None:
    assert docker.probe(Site()).script == "echo unused"
    assert judge(docker, "unused", Site(), board("h200")).level == "ok"


@pytest.mark.parametrize("running", [True, False])
def test_the_docker_probe_reads_a_real_command_line(running, tmp_path, monkeypatch):
    answer = (
        'case $1 in info) printf "engine 28.2.2\\nruntimes nvidia runc \\n" ;; '
        f'image) [ "$6" = registry.lab/burst:2.1 ] && echo {IMAGE_ID} ;; esac'
    )
    shell_program(tmp_path / "docker", answer if running else "echo no daemon >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    verdict = docker.judge(look(docker, DOCKED), DOCKED, board("h200"))
    assert (verdict.level, "no daemon" in verdict.summary) == (("ok", False) if running else ("fail", True))
