"""`burst image build | push`: the container image of this checkout, built here and sent to nodes."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base.errors import UsageError

if TYPE_CHECKING:
    from cluster.images.engine import Image as EngineImage

ALL_WELL, NOT_ALL = 0, 1
DEFAULT_TAG = "burst:latest"
CUDA_VERSIONS = ("12", "13")
TORCH_INDEX = "TORCH_INDEX_URL"
_ENGINE_SECONDS = 60.0


class Image:
    help = "build the container image, or send it to every node of an inventory"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        from cluster.node_arguments import add_node_arguments

        actions = parser.add_subparsers(dest="action", required=True, metavar="build|push")
        build = actions.add_parser("build", help="build the Dockerfile of this checkout with docker")
        build.add_argument(
            "--cuda",
            choices=CUDA_VERSIONS,
            default="13",
            help="12 for older drivers; needs TORCH_INDEX_URL (default: 13)",
        )
        build.add_argument("--tag", default=DEFAULT_TAG, metavar="NAME:TAG", help=f"its name (default: {DEFAULT_TAG})")
        build.add_argument("--target", metavar="STAGE", help="another stage, such as one of a compared system")
        build.add_argument("--show", action="store_true", help="print the command and build nothing")
        push = actions.add_parser("push", help="save, send, load and verify; nodes that have the image are skipped")
        add_node_arguments(push, timeout_seconds=3600.0)
        push.add_argument(
            "--image", metavar="NAME:TAG", help="the image to send; default: container.image of each node's site"
        )
        push.add_argument(
            "--via", choices=("ssh", "shared"), default="ssh",
            help="ssh: to each node by itself; shared: once, to storage all nodes see (default: ssh)",
        )  # fmt: skip
        push.add_argument("--parallel", type=int, default=8, metavar="N", help="nodes at a time (default: 8)")
        push.add_argument("--folder", metavar="PATH", help="folder on the nodes for the archive until it is loaded")
        push.add_argument(
            "--archives",
            type=Path,
            metavar="DIR",
            help="folder for it on this machine (default: ~/.cache/burst/images)",
        )
        push.add_argument("--keep", action="store_true", help="keep archives for the next push")

    def run(self, arguments: argparse.Namespace) -> int:
        from cluster.images.engine import ImageFailed

        try:
            return _build(arguments) if arguments.action == "build" else _push(arguments)
        except ImageFailed as error:
            raise UsageError(str(error)) from None


def _build(arguments: argparse.Namespace) -> int:
    import shlex

    from cluster.images.engine import build_command
    from harness.records.provenance import PROJECT_ROOT, commit

    if not (PROJECT_ROOT / "Dockerfile").is_file():
        raise UsageError(f"there is no Dockerfile in {PROJECT_ROOT}; run burst from a checkout of the repository")
    _check_name(arguments.tag, "--tag")
    values: dict[str, str | None] = {"CUDA": arguments.cuda, "BURST_COMMIT": commit()}
    if os.environ.get(TORCH_INDEX):
        values[TORCH_INDEX] = None  # taken from the environment: an index may have a password in its address
    elif arguments.cuda == "12":
        raise UsageError(
            f"--cuda 12 needs torch's builds for CUDA 12; set {TORCH_INDEX} to the index pytorch.org names for them"
        )
    command = build_command(PROJECT_ROOT, tag=arguments.tag, arguments=values, target=arguments.target)
    if arguments.show:
        print(shlex.join(command))
        return ALL_WELL
    _images_here([])
    if subprocess.run(command, env={**os.environ, "DOCKER_BUILDKIT": "1"}, check=False).returncode:
        print(f"{arguments.tag} was not built; docker says above why")
        return NOT_ALL
    (built,) = _images_here([arguments.tag]).values()
    print(f"{arguments.tag} is {built.image_id}, {built.size_bytes / 2**30:.1f} GiB")
    print(f"Next: burst image push INVENTORY --image {arguments.tag}")
    return ALL_WELL


def _push(arguments: argparse.Namespace) -> int:
    from cluster.images.archive import default_folder
    from cluster.images.push import Way, check_ids, push, targets_of
    from cluster.images.show import outcome_table, progress_on_stderr
    from cluster.inventory.file import named_nodes
    from cluster.transport.reach import connection
    from harness.base.terminal import stdout_console

    if not arguments.nodes:
        raise UsageError("burst image push found no nodes; give an inventory, or hosts")
    if not 1 <= arguments.parallel <= 256:
        raise UsageError(f"--parallel is {arguments.parallel}; expected 1 to 256 nodes at a time")
    if arguments.folder is not None and not arguments.folder.startswith("/"):
        raise UsageError(f"--folder is {arguments.folder}; expected an absolute path on the nodes")
    if arguments.image is not None:
        _check_name(arguments.image, "--image")
    inventory = named_nodes(arguments)
    targets = targets_of(
        inventory.nodes, image=arguments.image, folder=arguments.folder, shared=arguments.via == "shared"
    )
    images = _images_here(target.image for target in targets)
    check_ids(inventory.nodes, images)
    with progress_on_stderr() as bars:
        outcomes = push(
            targets,
            images,
            Way(
                connect=connection(
                    [target.host for target in targets],
                    known_hosts=arguments.known_hosts,
                    accept_new_host_keys=arguments.accept_new_host_keys,
                ),
                shared=arguments.via == "shared",
                archives=(arguments.archives or default_folder()).absolute(),
                keep=arguments.keep,
                at_once=arguments.parallel,
                seconds=arguments.timeout,
                watch=bars,
                on_saved=bars.saved,
            ),
        )
    console = stdout_console()
    console.print(outcome_table(outcomes))
    failed = [outcome.node for outcome in outcomes if outcome.state == "failed"]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} nodes have their image")
    if failed:
        print("Repeat the command for the others: parts that have arrived are not sent again")
    return NOT_ALL if failed else ALL_WELL


def _images_here(names: Iterable[str]) -> dict[str, EngineImage]:
    """The images of these names on this machine. Raises UsageError when docker does not answer or lacks one."""
    from cluster.images.engine import DOCKER, complaint, find_image
    from cluster.transport.reach import LocalRunner

    runner = LocalRunner()
    done = runner.run([*DOCKER, "version", "--format", "{{.Server.Version}}"], deadline_seconds=_ENGINE_SECONDS)
    if done.exit_status != 0:
        what = complaint(done, "docker does not answer", "start it, or add this user to the group docker")
        raise UsageError(f"on this machine, {what}")
    images = {}
    for name in dict.fromkeys(names):
        found = find_image(runner, name, _ENGINE_SECONDS)
        if found is None:
            raise UsageError(f"this machine has no image {name}; build it with burst image build --tag {name}")
        images[name] = found
    return images


def _check_name(name: str, option: str) -> None:
    if not name or name.startswith("-") or len(name.split()) != 1:
        raise UsageError(f"{option} is {name!r}; expected an image's name such as {DEFAULT_TAG}")


COMMAND = Image()
