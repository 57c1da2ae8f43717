"""`burst setup image` for a user: command lines, sentences, the table, exit codes."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from cluster.checks import discover
from cluster.images import build_command, find_image, tagged, targets_of
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import Container, GpuExpectation, Site
from cluster.probing.probe import Output
from cluster.transport.reach import LocalRunner
from harness.cli import main
from tests.cluster.fake_docker import layers
from tests.patience import AMPLE
from tests.programs import shell_program

NAME = "lab/burst:1"
LAYERS = layers(2_000_000)
ID = "4e" * 32


@pytest.fixture
def docker(docker, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return docker


@pytest.fixture
def inventory(servers, tmp_path):
    known = tmp_path / "known_hosts"
    known.write_text("".join(server.known_hosts.read_text() for server, _ in servers))
    nodes = [
        {"hosts": f"node{number}", "address": "127.0.0.1", "ssh": {"port": server.port, "key": str(server.key)}}
        for number, (server, _) in enumerate(servers, start=1)
    ]
    content = {"nodes": nodes, "container": {"engine": "docker", "image": NAME}}
    for _, docker in servers:
        docker.empty()
    path = tmp_path / "lab.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return [str(path), "--known-hosts", str(known)]


def test_the_build_command_is_one_line_that_can_be_read():
    command = build_command(
        "docker",
        Path("/src/it's here"),
        tag="burst:1",
        arguments={"CUDA": "12", "TORCH_INDEX_URL": None},
        target="internevo",
    )
    assert shlex.join(command) == (
        "docker build --file '/src/it'\"'\"'s here/Dockerfile' --tag burst:1 --build-arg CUDA=12 "
        "--build-arg TORCH_INDEX_URL --target internevo -- '/src/it'\"'\"'s here'"
    )
    command = build_command("podman", Path("/src"), tag="b:1", arguments={}, options=["--isolation", "chroot"])
    assert shlex.join(command) == (
        "podman build --format docker --file /src/Dockerfile --tag b:1 --isolation chroot -- /src"
    )


def test_a_build_is_shown_without_a_docker_and_without_the_indexs_address(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("TORCH_INDEX_URL", "https://me:secret@index.invalid")
    assert main(["setup", "image", "build", "--cuda", "12", "--tag", "burst:cuda12", "--show"]) == 0
    printed = capsys.readouterr().out
    assert "--tag burst:cuda12 --build-arg CUDA=12 --build-arg BURST_COMMIT=" in printed
    assert "--build-arg TORCH_INDEX_URL " in printed
    assert "secret" not in printed


def test_a_build_tells_its_id_and_the_next_command(docker, monkeypatch, capsys):
    monkeypatch.setenv("BUILT_TAG", "burst:new")
    assert main(["setup", "image", "build", "--tag", "burst:new"]) == 0
    assert "burst setup image push INVENTORY --image burst:new" in capsys.readouterr().out
    assert docker.calls("build --file") == 1


def test_a_build_without_cuda_takes_its_base_for_compared_systems_too(docker, capsys):
    assert main(["setup", "image", "build", "--cuda", "none", "--target", "deepspeed", "--show"]) == 0
    assert "--build-arg DEVEL_IMAGE=library/debian:bookworm --target deepspeed" in capsys.readouterr().out
    assert main(["setup", "image", "build", "--show"]) == 0
    assert "DEVEL_IMAGE" not in capsys.readouterr().out


def test_a_build_that_fails_is_exit_code_1(docker, capsys):
    (docker.folder / "bin" / "docker").write_text(
        '#!/bin/sh\n[ "$1" = build ] && exit 3; echo "no such image" >&2; exit 1\n'
    )
    assert main(["setup", "image", "build"]) == 1
    assert "burst:latest was not built" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["build", "--cuda", "12"], "set TORCH_INDEX_URL"),
        (["build", "--tag", "-x y"], "expected an image's name"),
        (["push"], "give an inventory, or hosts"),
        (["push", "gpu01"], "no image is named for gpu01"),
        (["push", "gpu01", "--image", NAME], f"docker here has no image {NAME}; build it with"),
        (["push", "gpu01", "--image", "a b"], "expected an image's name"),
        (["push", "gpu01", "--image", "burst@sha256:" + "0" * 64], "has no name to load it under"),
        (["push", "gpu01", "--image", NAME, "--parallel", "0"], "expected 1 to 256"),
        (["push", "gpu[01", "--image", NAME], "gpu[01"),
    ],
)
def test_bad_usage_is_one_sentence(docker, capsys, arguments, expected):
    assert main(["setup", "image", *arguments]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1


def test_a_docker_that_is_absent_or_down_is_one_sentence(docker, monkeypatch, capsys):
    docker.behave("down")
    assert main(["setup", "image", "build"]) == 2
    assert "docker does not answer (Cannot connect to the Docker daemon)" in capsys.readouterr().err
    (docker.folder / "bin" / "docker").unlink()
    tools = docker.folder / "bin"
    for program in ("env", "git"):
        (tools / program).symlink_to(shutil.which(program))
    monkeypatch.setenv("PATH", str(tools))
    assert main(["setup", "image", "build"]) == 2
    assert "docker is not found on the PATH" in capsys.readouterr().err


def states(said):
    return {words[0]: words[2] for words in map(str.split, said.splitlines()) if words[0] in ("node1", "node2")}


def test_an_image_arrives_where_it_lacks_and_nothing_else_stays(docker, servers, inventory, tmp_path, capsys):
    docker.add(NAME, 1, LAYERS)
    servers[0][1].add(NAME, 1, LAYERS)
    assert main(["setup", "image", "push", *inventory]) == 0
    printed = capsys.readouterr()
    assert states(printed.out) == {"node1": "present", "node2": "loaded"}
    assert "2 of 2 nodes have their image" in printed.out
    assert f"docker save {NAME}\n" in printed.err
    assert [engine.holds(NAME) == docker.holds(NAME) for _, engine in servers] == [True, True]
    assert servers[0][1].calls("image load") == 0
    assert list((tmp_path / "cache" / "burst" / "images").iterdir()) == []
    assert main(["setup", "image", "push", *inventory]) == 0
    assert docker.calls("image save") == 1  # nobody needed it the second time


@pytest.mark.parametrize(
    ("how", "text", "said"),
    [
        ("refuse", "", "docker did not take it (no space left on device); check its disk there"),
        ("damage", NAME.replace("/", "_"), "docker has sha256:e00000000000 as lab/burst:1, expected sha256:"),
        ("down", "", "docker does not answer (Cannot connect to the Docker daemon)"),
    ],
)
def test_a_node_that_fails_fails_alone_and_with_its_reason(docker, servers, inventory, capsys, how, text, said):
    docker.add(NAME, 1, LAYERS)
    servers[0][1].add(NAME, 2, b"an older one")
    servers[1][1].behave(how, text)
    assert main(["setup", "image", "push", *inventory]) == 1
    printed = capsys.readouterr().out
    assert states(printed) == {"node1": "loaded", "node2": "failed"}
    assert said in printed
    assert "1 of 2 nodes have their image" in printed
    assert servers[0][1].holds(NAME) == docker.holds(NAME)


def test_an_engine_that_counts_ids_differently_is_said_to_have_the_same_content(docker, servers, inventory, capsys):
    docker.add(NAME, 1, b"layers")
    servers[0][1].behave("id_prefix", "abcd")
    for state in ("loaded", "present"):
        assert main(["setup", "image", "push", *inventory]) == 0
        printed = capsys.readouterr().out
        assert states(printed)["node1"] == state
        assert "the same content as sha256:000000000000, which this node's engine calls sha256:abcd" in printed


def test_through_a_registry_the_image_is_pushed_once_and_pulled_by_each_node(docker, servers, inventory, tmp_path):
    name = "lab.example:5000/burst:1"
    (tmp_path / "registry").mkdir()
    for engine in (docker, *(engine for _, engine in servers)):
        engine.behave("registry", str(tmp_path / "registry"))
    docker.add(name, 1, LAYERS)
    assert main(["setup", "image", "push", *inventory, "--image", name, "--via", "registry"]) == 0
    assert [engine.holds(name) == docker.holds(name) for _, engine in servers] == [True, True]
    assert (docker.calls("image push"), docker.calls("image save")) == (1, 0)


def test_an_image_that_cannot_be_saved_fails_its_nodes_and_no_others(docker, inventory, servers, tmp_path, capsys):
    docker.add(NAME, 1, b"layers")
    servers[0][1].add(NAME, 1, b"layers")
    program = docker.folder / "bin" / "docker"
    program.write_text(program.read_text().replace('"image save")', '"image save") echo "disk is full" >&2; exit 1; '))
    assert main(["setup", "image", "push", *inventory]) == 1
    printed = capsys.readouterr().out
    assert states(printed) == {"node1": "present", "node2": "failed"}
    assert f"docker here did not save {NAME} (disk is full); look at the disk of " in printed


def test_a_node_that_is_down_and_one_without_docker_fail_alone(docker, servers, inventory, sshd, capsys):
    docker.add(NAME, 1, b"layers")
    path = Path(inventory[0])
    content = json.loads(path.read_text())
    content["nodes"][0]["ssh"]["port"] = 1
    content["nodes"].append({"hosts": "bare", "address": "127.0.0.1", "ssh": {"port": sshd.port, "key": str(sshd.key)}})
    path.write_text(json.dumps(content))
    known = Path(inventory[2])
    known.write_text(known.read_text() + sshd.known_hosts.read_text())
    assert main(["setup", "image", "push", *inventory]) == 1
    printed = capsys.readouterr().out
    assert states(printed) == {"node1": "failed", "node2": "loaded"}
    assert "127.0.0.1 port 1 cannot be reached" in printed
    assert "1 of 3 nodes have their image" in printed


def test_each_node_gets_the_image_of_its_own_site(docker, inventory, servers, tmp_path):
    docker.add(NAME, 1, layers(1000))
    docker.add("lab/burst:cuda12", 2, layers(1000))
    path = Path(inventory[0])
    content = json.loads(path.read_text())
    content["overrides"] = {"node2": {"container": {"image": "lab/burst:cuda12"}}}
    path.write_text(json.dumps(content))
    assert main(["setup", "image", "push", *inventory]) == 0
    assert [engine.holds("lab/burst:cuda12") is not None for _, engine in servers] == [False, True]
    assert [engine.holds(NAME) is not None for _, engine in servers] == [True, False]


def test_a_cache_that_cannot_be_made_is_one_sentence(docker, inventory, tmp_path, capsys):
    docker.add(NAME, 1, b"layers")
    (tmp_path / "cache").write_text("a file")
    assert main(["setup", "image", "push", *inventory]) == 2
    assert "cannot be made (Not a directory); set XDG_CACHE_HOME" in capsys.readouterr().err


def test_a_name_without_a_registry_is_not_published(docker, inventory, capsys):
    docker.add(NAME, 1, b"layers")
    assert main(["setup", "image", "push", *inventory, "--via", "registry"]) == 2
    assert f"the image {NAME} names no registry" in capsys.readouterr().err
    assert docker.calls("image push") == 0


def test_a_site_that_names_another_id_for_the_image_is_an_error(docker, inventory, capsys):
    docker.add(NAME, 1, b"layers")
    path = Path(inventory[0])
    content = json.loads(path.read_text())
    content["container"]["image_id"] = "sha256:" + "a" * 64
    path.write_text(json.dumps(content))
    assert main(["setup", "image", "push", *inventory]) == 2
    assert "is to have lab/burst:1 with the id sha256:aaaaaaaaaaaa" in capsys.readouterr().err


def test_names_get_the_tag_docker_would_read():
    assert tagged("burst") == "burst:latest"
    assert tagged("host:5000/burst") == "host:5000/burst:latest"
    assert tagged("host:5000/burst:1") == "host:5000/burst:1"


def test_an_image_that_is_described_otherwise_is_refused(docker):
    (docker.folder / "bin" / "docker").write_text(f"#!{sys.executable}\nprint('<no value>')\n")
    with pytest.raises(Exception, match="expected id and size"):
        find_image(LocalRunner(), "docker", NAME, 30)


PODMAN = Site(container=Container(engine="podman", image="burst:cpu"))


@pytest.mark.parametrize(
    ("site", "text", "level", "words"),
    [
        (PODMAN, f"engine 4.3.1\ntoolkit no\nimage sha256:{ID}", "ok", "podman 4.3.1 has burst:cpu (sha256:4e4e"),
        (PODMAN, "engine 4.3.1\ntoolkit no\nimage ", "fail", "run burst setup image push"),
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


def test_what_podman_prints_is_read_as_docker_would_print_it(docker):
    shell_program(
        docker.folder / "bin" / "podman",
        f"""case "$1 $2 $6" in info*) echo engine 4.3.1 ;; "image inspect burst:cpu")
        echo '{ID} 2207000000 2026-01-01 00:00:00 +0000 UTC ["sha256:1"] {{}}' ;;
        *) echo "Error: inspecting object: $6: image not known" >&2; exit 125 ;; esac""",
    )
    image = find_image(LocalRunner(), "podman", "burst:cpu")
    assert (image.image_id, image.size_bytes) == (f"sha256:{ID}", 2207000000)
    assert find_image(LocalRunner(), "podman", "other:1") is None


def test_the_engine_of_a_push_is_the_sites_unless_another_is_named():
    sites = [Site(container=Container(engine="podman", image="a")), Site()]
    nodes = [InventoryNode(host=Host(name=f"n{number}"), site=site) for number, site in enumerate(sites)]
    found = targets_of(nodes, image="b", engine=None)
    assert [(target.engine, target.image) for target in found] == [("podman", "b:latest"), ("docker", "b:latest")]
    assert {target.engine for target in targets_of(nodes, image="b", engine="podman")} == {"podman"}


def test_the_probe_reads_what_podman_prints(docker):
    shell_program(docker.folder / "bin" / "podman", f"case $1 in info) echo engine 4.3.1 ;; image) echo {ID} ;; esac")
    check = discover()["docker"]
    done = LocalRunner().run(["sh", "-c", check.probe(PODMAN).script], deadline_seconds=AMPLE)
    assert f"image sha256:{ID}" in done.stdout
    assert check.judge(Output(text=done.stdout), PODMAN).level == "ok"
