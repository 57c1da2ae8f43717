"""What differs between podman and docker, the base made by debootstrap, pip's configuration for a build, and limits."""

import configparser
import os
import shlex
import sys
from pathlib import Path

import pytest

from cluster.checks import discover
from cluster.images import trying
from cluster.images.base import BASE_TAG, debootstrap_command
from cluster.images.engine import ImageFailed, build_command, find_image, load_command, save_command
from cluster.images.pip_setup import IN_BUILD, write_pip_setup
from cluster.images.push import targets_of
from cluster.images.trying import may_raise_limits, run_command
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import Node
from cluster.inventory.site import Container, GpuExpectation, Site
from cluster.probing.probe import Output
from cluster.transport.reach import LocalRunner
from harness.cli import main
from tests.patience import AMPLE
from tests.programs import shell_program

ROOT = Path(__file__).resolve().parents[2]
ID = "4e" * 32


@pytest.fixture
def podman(tmp_path, monkeypatch):
    """A podman, and a buildah, that note their calls and answer in podman's words; returns the file of the calls."""
    folder = tmp_path / "programs"
    folder.mkdir()
    log = tmp_path / "calls"
    answers = f"""case "$1 $2" in
version*) echo 4.3.1 ;;
"image inspect")
  for last; do :; done
  case $last in burst:cpu) ;; {BASE_TAG}) [ ! -e {tmp_path}/baseless ] ;; *) false ;; esac ||
    {{ echo "Error: inspecting object: $last: image not known" >&2; exit 125; }}
  echo '{ID} 2207000000 2026-01-01 00:00:00 +0000 UTC ["sha256:1"] {{"burst.cuda":"none"}}' ;;
"run --rm") [ ! -e {tmp_path}/broken ] || exit 3 ;;
esac
"""
    for name in ("podman", "buildah"):
        shell_program(folder / name, f'echo "$CONTAINERS_CONF {name} $*" >> {log}\n{answers}')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CONTAINERS_CONF", "own.conf")
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    return log


def test_an_image_of_podman_has_the_id_docker_would_show(podman):
    image = find_image(LocalRunner(), "podman", "burst:cpu", 30)
    assert (image.engine, image.image_id, image.size_bytes) == ("podman", f"sha256:{ID}", 2207000000)
    assert image.cuda == "none"
    assert find_image(LocalRunner(), "podman", "other:1", 30) is None


def test_podmans_images_are_built_by_buildah_without_a_daemon():
    command = build_command(
        "podman",
        Path("/src"),
        tag="burst:cpu",
        arguments={"CUDA": "none"},
        volumes=["/a:/b:ro"],
        options=["--volume", "/etc/apt:/etc/apt:ro"],
    )
    assert shlex.join(command) == (
        "buildah build --isolation chroot --format docker --layers --force-rm --volume /a:/b:ro --file /src/Dockerfile "
        "--tag burst:cpu --build-arg CUDA=none --volume /etc/apt:/etc/apt:ro -- /src"
    )
    assert shlex.join(save_command("podman", "a:1")) == "env LC_ALL=C podman image save -- a:1"
    assert shlex.join(load_command("podman", "/a")) == "env LC_ALL=C podman image load --quiet --input /a"


def test_a_build_without_cuda_takes_the_base_made_here_for_compared_systems_too(podman, capsys):
    assert main(["image", "build", "--engine", "podman", "--cuda", "none", "--target", "deepspeed", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "--build-arg CUDA=none" in shown
    assert (
        "--build-arg BASELINE_IMAGE=devel --build-arg DEVEL_IMAGE=localhost/burst-base:bookworm --target deepspeed"
        in shown
    )
    assert main(["image", "build", "--show"]) == 0
    assert "DEVEL_IMAGE" not in capsys.readouterr().out


def test_a_build_tells_size_and_next_commands_and_leaves_no_configuration_of_pip(podman, tmp_path, capsys):
    assert main(["image", "build", "--engine", "podman", "--cuda", "none", "--tag", "burst:cpu", "--pip-setup"]) == 0
    said = capsys.readouterr().out
    assert f"burst:cpu is sha256:{ID}, 2.1 GiB, built in " in said
    assert "burst image try burst:cpu --engine podman" in said
    assert f":{IN_BUILD}:ro" in podman.read_text()
    assert list((tmp_path / "cache" / "burst" / "pip-setup").iterdir()) == []


def test_a_build_without_cuda_names_the_command_that_makes_its_base(podman, tmp_path, capsys):
    (tmp_path / "baseless").write_text("")
    build = ["image", "build", "--engine", "podman", "--cuda", "none", "--tag", "burst:cpu"]
    assert main(build) == 2
    said = capsys.readouterr().err
    assert f"no image {BASE_TAG}, from which --cuda none starts" in said
    assert "make it as root with burst image base --engine podman" in said
    assert "buildah" not in podman.read_text()
    assert main([*build, "--engine-option=--build-arg=CUDA_NONE_IMAGE=own:1"]) == 0


def test_an_image_is_tried_without_a_network_and_the_first_failure_ends_it(podman, tmp_path, capsys):
    assert main(["image", "try", "burst:cpu", "--engine", "podman", "--engine-option=--memory=8g"]) == 0
    runs = [line for line in podman.read_text().splitlines() if " run " in line]
    common = "own.conf podman run --rm --init --network none --ipc host --memory=8g burst:cpu"
    assert runs == [f"{common} doctor", f"{common} run experiments/quickstart.yaml --scale smoke"]
    assert "burst:cpu works here" in capsys.readouterr().out
    (tmp_path / "broken").write_text("")
    assert main(["image", "try", "burst:cpu", "--engine", "podman"]) == 1
    assert "doctor in burst:cpu exited with 3" in capsys.readouterr().out


def test_a_compared_systems_image_is_tried_by_importing_its_package(podman, capsys):
    assert main(["image", "try", "burst:cpu", "--engine", "podman", "--import", "deepspeed"]) == 0
    (run,) = [line for line in podman.read_text().splitlines() if " run " in line]
    assert run.endswith("burst:cpu python -c import deepspeed as package; print(package.__version__)")
    assert main(["image", "try", "burst:cpu", "--engine", "podman", "--import", "a; b"]) == 2
    assert "expected a package's name" in capsys.readouterr().err


def test_the_stage_with_the_programs_of_tests_is_tried_by_tests_of_this_checkout(podman, capsys):
    assert main(["image", "try", "burst:cpu", "--engine", "podman", "--tests", "tests/engine", "tests/faults"]) == 0
    (run,) = [line for line in podman.read_text().splitlines() if " run " in line]
    mounted = [f"--volume {ROOT}/{folder}:/burst/{folder}:ro" for folder in ("tests", "results/published")]
    assert f"{' '.join(mounted)} burst:cpu python -m pytest" in run
    assert run.endswith(" -- tests/engine tests/faults")
    for path in ("tests/absent", "engine", "tests/../engine", "-x"):
        assert main(["image", "try", "burst:cpu", "--engine", "podman", f"--tests={path}"]) == 2
        assert f"--tests has {path!r}; expected a file or folder of this checkout" in capsys.readouterr().err


def test_an_image_for_gpus_is_tried_with_them(podman):
    image = find_image(LocalRunner(), "podman", "burst:cpu", 30)
    assert "--device nvidia.com/gpu=all" in shlex.join(run_command(image, ["doctor"], gpus=True))
    assert "gpu" not in shlex.join(run_command(image, ["doctor"], gpus=False))


def test_a_base_that_is_there_is_kept_and_said_to_be(podman, capsys):
    assert main(["image", "base", "--engine", "podman", "--tag", "burst:cpu"]) == 0
    assert "burst:cpu is there; to make it anew" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["try", "other:1", "--engine", "podman"], "podman here has no image other:1"),
        (["build", "--pip-setup"], "docker mounts nothing while it builds"),
        (["base", "--engine", "podman", "--tag", "a b"], "expected an image's name"),
        (["push", "gpu01", "--image", "other:1", "--engine", "podman"], "podman here has no image other:1"),
    ],
)
def test_bad_usage_is_one_sentence(podman, capsys, arguments, expected):
    assert main(["image", *arguments]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1


def test_a_base_needs_root_and_debootstrap(podman, tmp_path, monkeypatch, capsys):
    (tmp_path / "baseless").write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["image", "base", "--engine", "podman"]) == 2
    assert "it needs root; run this as root" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    shell_program(tmp_path / "programs" / "debootstrap", "echo 'E: No such script: nosuch' >&2; exit 1")
    assert main(["image", "base", "--engine", "podman", "--suite", "nosuch"]) == 2
    assert "debootstrap made no nosuch (E: No such script: nosuch)" in capsys.readouterr().err
    assert shlex.join(debootstrap_command(Path("/r"), suite="bookworm", mirror=None)) == (
        "debootstrap --variant=minbase -- bookworm /r"
    )


PODMAN = Site(container=Container(engine="podman", image="burst:cpu"))


@pytest.mark.parametrize(
    ("site", "text", "level", "words"),
    [
        (PODMAN, f"engine 4.3.1\ntoolkit no\nimage sha256:{ID}", "ok", "podman 4.3.1 has burst:cpu (sha256:4e4e"),
        (PODMAN, "engine 4.3.1\ntoolkit no\nimage ", "fail", "run burst image push"),
        (PODMAN, "absent", "fail", "podman is not installed"),
        (PODMAN, "no space\nrefused 125", "fail", "podman does not answer (no space); run podman info there"),
        (
            Site(container=PODMAN.container, gpus=GpuExpectation(count=8)),
            f"engine 4.3.1\ntoolkit no\nimage sha256:{ID}",
            "fail",
            "podman cannot give containers GPUs; install nvidia-container-toolkit and run nvidia-ctk cdi generate",
        ),
    ],
)
def test_podman_is_judged_where_the_site_uses_it(site, text, level, words):
    verdict = discover()["docker"].judge(Output(text=text), site)
    assert (verdict.level, words in verdict.summary) == (level, True), verdict


def test_the_probe_reads_what_podman_prints(podman):
    (podman.parent / "programs" / "podman").write_text(
        f"#!/bin/sh\ncase $1 in info) echo engine 4.3.1 ;; image) echo {ID} ;; esac\n"
    )
    check = discover()["docker"]
    done = LocalRunner().run(["sh", "-c", check.probe(PODMAN).script], deadline_seconds=AMPLE)
    assert f"image sha256:{ID}" in done.stdout
    assert check.judge(Output(text=done.stdout), PODMAN).level == "ok"


def test_the_engine_of_a_push_is_the_sites_unless_another_is_named():
    sites = [Site(container=Container(engine="podman", image="a")), Site()]
    nodes = [Node(host=Host(name=f"n{number}"), site=site) for number, site in enumerate(sites)]
    found = targets_of(nodes, image="b", engine=None, folder=None, shared=False)
    assert [target.key for target in found] == [("podman", "b:latest"), ("docker", "b:latest")]
    found = targets_of(nodes, image="b", engine="podman", folder=None, shared=False)
    assert [target.engine for target in found] == ["podman", "podman"]


def test_pips_configuration_is_mounted_with_the_files_and_folders_it_names(tmp_path, monkeypatch):
    folders = {name: tmp_path / name for name in ("wheels", "index/simple", "setup")}
    folders["wheels"].mkdir()
    folders["index/simple"].mkdir(parents=True)
    folders["setup"].mkdir()
    (tmp_path / "own.pem").write_text("certificate")
    (tmp_path / "pip.conf").write_text(
        f"[global]\nfind-links = {folders['wheels']}\nextra-index-url = file://{folders['index/simple']}\n"
        f"    https://me:secret@index.invalid/simple\nprogress-bar = off\n[install]\nno-index = false\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "own.pem"))
    volumes = write_pip_setup(folders["setup"])
    assert volumes[0] == f"{folders['setup']}:{IN_BUILD}:ro"
    assert {f"{folders['wheels']}:{folders['wheels']}:ro", f"{tmp_path}/index:{tmp_path}/index:ro"} <= set(volumes)
    written = configparser.RawConfigParser()
    written.read(folders["setup"] / "pip.conf")
    assert written["global"]["extra-index-url"].split() == [
        f"file://{folders['index/simple']}",
        "https://me:secret@index.invalid/simple",
    ]
    copy = Path(written["global"]["cert"])
    assert copy.parent == Path(IN_BUILD)
    assert (folders["setup"] / copy.name).read_text() == "certificate"
    assert written["install"]["no-index"] == "false"
    assert "progress-bar" not in written["global"]


def test_a_python_without_pip_is_one_sentence(tmp_path, monkeypatch):
    python = shell_program(tmp_path / "python", "echo 'No module named pip' >&2; exit 1")
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ImageFailed, match=r"does not tell its configuration \(No module named pip\)"):
        write_pip_setup(tmp_path / "setup")


def test_limits_are_lowered_only_where_root_may_not_raise_them(tmp_path, monkeypatch):
    assert may_raise_limits("Name:\tsh\nCapEff:\t000001ffffffffff\n")
    assert not may_raise_limits("Name:\tsh\nCapEff:\t000001fffeffffff\n")
    assert not may_raise_limits("Name:\tsh\n")
    status, unified = tmp_path / "status", tmp_path / "unified"
    monkeypatch.setattr(trying, "_STATUS", status)
    monkeypatch.setattr(trying, "_UNIFIED", unified)
    unified.write_text("cpu")
    status.write_text("CapEff:\t000001ffffffffff\n")
    assert trying.podman_settings() == ""
    status.write_text("CapEff:\t0000000000000000\n")
    assert trying.podman_settings().startswith("[containers]\ndefault_ulimits = [")
    assert '"nproc=' in trying.podman_settings()
    unified.unlink()
    monkeypatch.setattr(trying.shutil, "which", lambda program: f"/usr/bin/{program}")
    assert trying.podman_settings().endswith('[engine]\nruntime = "runc"\n')
    monkeypatch.setattr(trying.shutil, "which", lambda program: None)
    with pytest.raises(ImageFailed, match="podman needs runc; install it"):
        trying.podman_settings()
