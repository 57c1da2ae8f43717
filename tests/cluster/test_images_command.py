"""`burst image` for a user: command lines, sentences, the table, exit codes."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from cluster.images.engine import build_command, find_image
from cluster.images.push import tagged
from cluster.transport.reach import LocalRunner
from harness.cli import main
from tests.cluster.fake_docker import layers

NAME = "lab/burst:1"


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
    content = {
        "nodes": nodes,
        "storage": {"shared": [{"path": "/proc", "write": False}, {"path": str(tmp_path / "shared")}]},
        "container": {"engine": "docker", "image": NAME},
    }
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


def test_a_build_is_shown_without_a_docker_and_without_the_indexs_address(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("TORCH_INDEX_URL", "https://me:secret@index.invalid")
    assert main(["image", "build", "--cuda", "12", "--tag", "burst:cuda12", "--show"]) == 0
    printed = capsys.readouterr().out
    assert "--tag burst:cuda12 --build-arg CUDA=12 --build-arg BURST_COMMIT=" in printed
    assert "--build-arg TORCH_INDEX_URL " in printed
    assert "secret" not in printed


def test_a_build_tells_its_id_and_the_next_command(docker, monkeypatch, capsys):
    monkeypatch.setenv("BUILT_TAG", "burst:new")
    assert main(["image", "build", "--tag", "burst:new"]) == 0
    assert "burst image push INVENTORY --image burst:new" in capsys.readouterr().out
    assert docker.calls("build --file") == 1


def test_a_build_that_fails_is_exit_code_1(docker, capsys):
    (docker.folder / "bin" / "docker").write_text('#!/bin/sh\n[ "$1" = version ] && echo 28 || exit 3\n')
    assert main(["image", "build"]) == 1
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
        (["push", "gpu01", "--image", NAME, "--folder", "here"], "expected an absolute path"),
        (["push", "gpu01", "--image", NAME, "--via", "shared"], "no writable shared folder is named for gpu01"),
        (["push", "gpu[01", "--image", NAME], "gpu[01"),
    ],
)
def test_bad_usage_is_one_sentence(docker, capsys, arguments, expected):
    assert main(["image", *arguments]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1


def test_a_docker_that_is_absent_or_down_is_one_sentence(docker, monkeypatch, capsys):
    docker.behave("down")
    assert main(["image", "build"]) == 2
    assert "docker does not answer (Cannot connect to the Docker daemon)" in capsys.readouterr().err
    (docker.folder / "bin" / "docker").unlink()
    tools = docker.folder / "bin"
    for program in ("env", "git"):
        (tools / program).symlink_to(shutil.which(program))
    monkeypatch.setenv("PATH", str(tools))
    assert main(["image", "build"]) == 2
    assert "docker is not found on the PATH" in capsys.readouterr().err


def test_push_ends_with_a_table_and_the_nodes_that_failed(docker, servers, inventory, tmp_path, capsys):
    docker.add(NAME, 1, layers(200_000))
    servers[1][1].behave("refuse")
    arguments = ["image", "push", *inventory, "--folder", str(tmp_path / "stage")]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "1 of 2 nodes have their image" in printed.out
    assert "docker did not load it (no space left on device)" in printed.out
    assert "node1: sending\n" in printed.err
    servers[1][1].behave_again("refuse")
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert [line.split()[:3] for line in printed.splitlines() if line.startswith(" node")] == [
        ["node", "image", "state"],
        ["node1", NAME, "present"],
        ["node2", NAME, "loaded"],
    ]
    assert list((tmp_path / "stage").iterdir()) == []
    assert list((tmp_path / "cache" / "burst" / "images").iterdir()) == []


def test_push_over_shared_storage_takes_the_sites_writable_folder(docker, inventory, servers, tmp_path, capsys):
    docker.add(NAME, 1, layers(200_000))
    assert main(["image", "push", *inventory, "--via", "shared", "--keep", "--parallel", "1"]) == 0
    (kept,) = (tmp_path / "shared" / "burst-images").iterdir()
    assert kept.name.endswith((".tar.zst", ".tar.gz"))
    assert all(engine.holds(NAME) == docker.holds(NAME) for _, engine in servers)


def test_each_node_gets_the_image_of_its_own_site(docker, inventory, servers, tmp_path):
    docker.add(NAME, 1, layers(1000))
    docker.add("lab/burst:cuda12", 2, layers(1000))
    path = Path(inventory[0])
    content = json.loads(path.read_text())
    content["overrides"] = {"node2": {"container": {"image": "lab/burst:cuda12"}}}
    path.write_text(json.dumps(content))
    assert main(["image", "push", *inventory, "--folder", str(tmp_path / "stage")]) == 0
    assert [engine.holds("lab/burst:cuda12") is not None for _, engine in servers] == [False, True]
    assert [engine.holds(NAME) is not None for _, engine in servers] == [True, False]


def test_an_image_that_cannot_be_saved_fails_its_nodes_and_no_others(docker, inventory, servers, tmp_path, capsys):
    docker.add(NAME, 1, b"layers")
    servers[0][1].add(NAME, 1, b"layers")
    (tmp_path / "taken").write_text("a file where the folder should be")
    assert main(["image", "push", *inventory, "--archives", str(tmp_path / "taken")]) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 nodes have their image" in printed
    assert f"{tmp_path}/taken" in "".join(printed.split())


def test_on_a_terminal_every_node_has_a_bar(docker, inventory, tmp_path, monkeypatch, capsys):
    docker.add(NAME, 1, layers(200_000))
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take stdout for a terminal
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["image", "push", *inventory, "--folder", str(tmp_path / "stage")]) == 0
    said = capsys.readouterr().err
    assert all(node in said for node in ("node1", "node2", NAME))
    assert "\x1b[2K" in said  # lines that are drawn again


def test_a_site_that_names_another_id_for_the_image_is_an_error(docker, inventory, capsys):
    docker.add(NAME, 1, b"layers")
    path = Path(inventory[0])
    content = json.loads(path.read_text())
    content["container"]["image_id"] = "sha256:" + "a" * 64
    path.write_text(json.dumps(content))
    assert main(["image", "push", *inventory]) == 2
    assert "is to have lab/burst:1 with the id sha256:aaaaaaaaaaaa" in capsys.readouterr().err


def test_names_get_the_tag_docker_would_read():
    assert tagged("burst") == "burst:latest"
    assert tagged("host:5000/burst") == "host:5000/burst:latest"
    assert tagged("host:5000/burst:1") == "host:5000/burst:1"


def test_an_image_that_is_described_otherwise_is_refused(docker):
    (docker.folder / "bin" / "docker").write_text(f"#!{sys.executable}\nprint('<no value>')\n")
    with pytest.raises(Exception, match="expected id and size"):
        find_image(LocalRunner(), "docker", NAME, 30)
