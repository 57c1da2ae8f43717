"""`burst setup image build | push`: the container image of this checkout, built here and brought to nodes."""

from __future__ import annotations

import argparse
import os
import subprocess
import time

from cluster.files.errors import counted, shown
from cluster.files.progress import Progress
from harness.base.errors import UsageError

ALL_WELL, NOT_ALL = 0, 1
DEFAULT_TAG = "burst:latest"
CUDA_VERSIONS = ("12", "13", "none")
TORCH_INDEX = "TORCH_INDEX_URL"
ENGINES = ("docker", "podman")


class ImageCommand:
    help = "build the container image, or bring it to every node of an inventory"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        from cluster.node_arguments import add_node_arguments

        actions = parser.add_subparsers(dest="action", required=True, metavar="build|push")
        build = actions.add_parser("build", help="build the Dockerfile of this checkout")
        build.add_argument(
            "--cuda",
            choices=CUDA_VERSIONS,
            default="13",
            help="12 for older drivers, needs TORCH_INDEX_URL; none for CPUs alone (default: 13)",
        )
        build.add_argument("--tag", default=DEFAULT_TAG, metavar="NAME:TAG", help=f"its name (default: {DEFAULT_TAG})")
        build.add_argument("--target", metavar="STAGE", help="another stage, such as one of a compared system")
        build.add_argument("--show", action="store_true", help="print the command and build nothing")
        build.add_argument("--engine", choices=ENGINES, default="docker", help="default: docker")
        build.add_argument(
            "--engine-option",
            action="append",
            default=[],
            metavar="OPTION",
            help="one more option of the engine's own command, as --engine-option=--volume=/a:/b; repeatable",
        )
        push = actions.add_parser("push", help="save, load and verify; nodes that have the image are skipped")
        add_node_arguments(push, timeout_seconds=3600.0)
        push.add_argument(
            "--image", metavar="NAME:TAG", help="the image to send; default: container.image of each node's site"
        )
        push.add_argument(
            "--engine", choices=ENGINES, help="default: container.engine of each node's site, else docker"
        )
        push.add_argument(
            "--via", choices=("ssh", "registry"), default="ssh",
            help="ssh: from here to each node; registry: each node pulls it from the one in its name (default: ssh)",
        )  # fmt: skip
        push.add_argument("--parallel", type=int, default=8, metavar="N", help="nodes at a time (default: 8)")

    def run(self, arguments: argparse.Namespace) -> int:
        from cluster.images import ImageFailed

        try:
            return {"build": _build, "push": _push}[arguments.action](arguments)
        except ImageFailed as error:
            raise UsageError(str(error)) from None


def _build(arguments: argparse.Namespace) -> int:
    import shlex

    from cluster.images import CPU_BASE, build_command, find_image
    from cluster.transport.reach import LocalRunner
    from harness.records.provenance import PROJECT_ROOT, commit

    if not (PROJECT_ROOT / "Dockerfile").is_file():
        raise UsageError(f"there is no Dockerfile in {PROJECT_ROOT}; run burst from a checkout of the repository")
    _check_name(arguments.tag, "--tag")
    values: dict[str, str | None] = {"CUDA": arguments.cuda, "BURST_COMMIT": commit()}
    if arguments.cuda == "none":
        values["DEVEL_IMAGE"] = CPU_BASE  # NVIDIA's, for compared systems, has compilers beside CUDA
    if os.environ.get(TORCH_INDEX):
        values[TORCH_INDEX] = None  # taken from the environment: an index may have a password in its address
    elif arguments.cuda == "12":
        raise UsageError(
            f"--cuda 12 needs torch's builds for CUDA 12; set {TORCH_INDEX} to the index pytorch.org names for them"
        )
    engine, tag = arguments.engine, arguments.tag
    command = build_command(
        engine, PROJECT_ROOT, tag=tag, arguments=values, target=arguments.target, options=arguments.engine_option
    )
    if arguments.show:
        print(shlex.join(command))
        return ALL_WELL
    began = time.monotonic()
    with Progress(f"asking {engine} for {tag}"):
        find_image(LocalRunner(), engine, tag)  # an engine that does not answer is one sentence
    if subprocess.run(command, env={**os.environ, "DOCKER_BUILDKIT": "1"}, check=False).returncode:
        print(f"{tag} was not built; {engine} says above why")
        return NOT_ALL
    built = find_image(LocalRunner(), engine, tag)
    if built is None:
        raise UsageError(f"{engine} says that it built {tag} and does not have it; look at the output above")
    seconds = time.monotonic() - began
    print(f"{tag} is {built.image_id}, {built.size_bytes / 2**30:.1f} GiB, built in {seconds:.0f} s")
    if arguments.target is None:
        print(f"Next: {engine} run --rm {tag} doctor, then burst setup image push INVENTORY --image {tag}")
    return ALL_WELL


def _push(arguments: argparse.Namespace) -> int:
    from cluster.images import images_here, push, targets_of
    from cluster.inventory.file import named_nodes
    from cluster.transport.reach import connection

    if not arguments.nodes:
        raise UsageError("burst setup image push found no nodes; give an inventory, or hosts")
    if not 1 <= arguments.parallel <= 256:
        raise UsageError(f"--parallel is {arguments.parallel}; expected 1 to 256 nodes at a time")
    if arguments.image is not None:
        _check_name(arguments.image, "--image")
    nodes = named_nodes(arguments).nodes
    targets = targets_of(nodes, image=arguments.image, engine=arguments.engine)
    with Progress(f"bringing the image to {counted(len(nodes), 'node')}") as progress:
        outcomes = push(
            targets,
            images_here(nodes, targets),
            connection(
                [target.host for target in targets],
                known_hosts=arguments.known_hosts,
                accept_new_host_keys=arguments.accept_new_host_keys,
            ),
            via=arguments.via,
            at_once=arguments.parallel,
            seconds=arguments.timeout,
            say=progress.say,
        )
    for outcome in outcomes:
        print(f"{outcome.target.name}  {outcome.target.image}  {outcome.state}  {shown(outcome.finding)}")
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} nodes have their image")
    return NOT_ALL if failed else ALL_WELL


def _check_name(name: str, option: str) -> None:
    if not name or name.startswith("-") or len(name.split()) != 1:
        raise UsageError(f"{option} is {name!r}; expected an image's name such as {DEFAULT_TAG}")
