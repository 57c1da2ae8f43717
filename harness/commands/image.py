"""`burst image base | build | try | push`: the container image of this checkout, built here and sent to nodes."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base.errors import UsageError

if TYPE_CHECKING:
    from cluster.images.engine import Engine, Key
    from cluster.images.engine import Image as EngineImage

ALL_WELL, NOT_ALL = 0, 1
DEFAULT_TAG = "burst:latest"
CUDA_VERSIONS = ("12", "13", "none")
TORCH_INDEX = "TORCH_INDEX_URL"
NO_CUDA_BASE = "CUDA_NONE_IMAGE="  # the build argument that names another base for --cuda none
SMOKE = ["run", "experiments/quickstart.yaml", "--scale", "smoke"]
CONTAINERS_CONF = (Path("/etc/containers/containers.conf"), Path("~/.config/containers/containers.conf").expanduser())
_ENGINE_SECONDS = 60.0


class ImageCommand:
    help = "build and try the container image, or send it to every node of an inventory"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        from cluster.images.base import BASE_TAG, SUITE
        from cluster.images.engine import ENGINES
        from cluster.node_arguments import add_node_arguments

        actions = parser.add_subparsers(dest="action", required=True, metavar="base|build|try|push")
        base = actions.add_parser("base", help="make the base for --cuda none, of Debian by debootstrap, as root")
        base.add_argument("--suite", default=SUITE, metavar="NAME", help=f"Debian's release (default: {SUITE})")
        base.add_argument("--mirror", metavar="URL", help="of Debian's packages (default: debootstrap's own)")
        base.add_argument("--tag", default=BASE_TAG, metavar="NAME:TAG", help=f"its name (default: {BASE_TAG})")
        build = actions.add_parser("build", help="build the Dockerfile of this checkout")
        build.add_argument(
            "--cuda",
            choices=CUDA_VERSIONS,
            default="13",
            help="12 for older drivers, needs TORCH_INDEX_URL; none for CPUs alone (default: 13)",
        )
        build.add_argument("--tag", default=DEFAULT_TAG, metavar="NAME:TAG", help=f"its name (default: {DEFAULT_TAG})")
        build.add_argument("--target", metavar="STAGE", help="another stage, such as one of a compared system")
        build.add_argument(
            "--pip-setup",
            action="store_true",
            help="mount this machine's configuration of pip while building, with what it names (podman)",
        )
        build.add_argument("--show", action="store_true", help="print the command and build nothing")
        attempt = actions.add_parser("try", help="run doctor and the demo's smoke scale in an image, without a network")
        attempt.add_argument(
            "image", nargs="?", default=DEFAULT_TAG, metavar="NAME:TAG", help=f"default: {DEFAULT_TAG}"
        )
        instead = attempt.add_mutually_exclusive_group()
        instead.add_argument(
            "--import",
            dest="package",
            metavar="PACKAGE",
            help="import this package instead, and print its version: for the stage of a compared system",
        )
        instead.add_argument(
            "--tests",
            nargs="+",
            metavar="PATH",
            help="run these tests of this checkout instead, as tests/engine: for the stage test",
        )
        for action in (base, build, attempt):
            action.add_argument("--engine", choices=ENGINES, default="docker", help="default: docker")
        for action in (build, attempt):
            action.add_argument(
                "--engine-option",
                action="append",
                default=[],
                metavar="OPTION",
                help="one more option of the engine's own command, as --engine-option=--volume=/a:/b; repeatable",
            )
        push = actions.add_parser("push", help="save, send, load and verify; nodes that have the image are skipped")
        add_node_arguments(push, timeout_seconds=3600.0)
        push.add_argument(
            "--image", metavar="NAME:TAG", help="the image to send; default: container.image of each node's site"
        )
        push.add_argument(
            "--engine", choices=ENGINES, help="default: container.engine of each node's site, else docker"
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

        actions = {"base": _base, "build": _build, "try": _try, "push": _push}
        try:
            return actions[arguments.action](arguments)
        except ImageFailed as error:
            raise UsageError(str(error)) from None


def _base(arguments: argparse.Namespace) -> int:
    from cluster.images.base import make_base

    _check_name(arguments.tag, "--tag")
    engine = arguments.engine
    if _images_here(engine, [arguments.tag], must_exist=False):
        print(f"{arguments.tag} is there; to make it anew, remove it first: {engine} image rm {arguments.tag}")
        return ALL_WELL
    began = time.monotonic()
    make_base(engine, tag=arguments.tag, suite=arguments.suite, mirror=arguments.mirror)
    (made,) = _images_here(engine, [arguments.tag]).values()
    print(f"{arguments.tag} is {made.image_id}, {_size(made)}, made in {time.monotonic() - began:.0f} s")
    return ALL_WELL


def _build(arguments: argparse.Namespace) -> int:
    import shlex

    from cluster.images.base import BASE_TAG
    from cluster.images.engine import build_command
    from cluster.images.pip_setup import mounted_pip_setup
    from harness.records.provenance import PROJECT_ROOT, commit

    if not (PROJECT_ROOT / "Dockerfile").is_file():
        raise UsageError(f"there is no Dockerfile in {PROJECT_ROOT}; run burst from a checkout of the repository")
    _check_name(arguments.tag, "--tag")
    engine = arguments.engine
    if arguments.pip_setup and engine == "docker":
        raise UsageError("docker mounts nothing while it builds; leave --pip-setup out, or give --engine podman")
    values: dict[str, str | None] = {"CUDA": arguments.cuda, "BURST_COMMIT": commit()}
    if engine == "podman":
        values["BASELINE_IMAGE"] = "devel"  # a stage that only a default names is an image to older versions of buildah
    if arguments.cuda == "none":
        values["DEVEL_IMAGE"] = BASE_TAG  # NVIDIA's, for compared systems, has compilers beside CUDA
    if os.environ.get(TORCH_INDEX):
        values[TORCH_INDEX] = None  # taken from the environment: an index may have a password in its address
    elif arguments.cuda == "12":
        raise UsageError(
            f"--cuda 12 needs torch's builds for CUDA 12; set {TORCH_INDEX} to the index pytorch.org names for them"
        )
    own_base = NO_CUDA_BASE in " ".join(arguments.engine_option)
    bases = [BASE_TAG] if arguments.cuda == "none" and not own_base else []
    began = time.monotonic()
    with mounted_pip_setup() if arguments.pip_setup else contextlib.nullcontext(()) as volumes:
        command = build_command(
            engine,
            PROJECT_ROOT,
            tag=arguments.tag,
            arguments=values,
            target=arguments.target,
            volumes=volumes,
            options=arguments.engine_option,
        )
        if arguments.show:
            print(shlex.join(command))
            return ALL_WELL
        if len(_images_here(engine, bases, must_exist=False)) < len(bases):
            raise UsageError(
                f"{engine} here has no image {BASE_TAG}, from which --cuda none starts; make it as root with "
                f"burst image base --engine {engine}"
            )
        try:
            failed = subprocess.run(command, env={**os.environ, "DOCKER_BUILDKIT": "1"}, check=False).returncode
        except FileNotFoundError:
            raise UsageError(f"{command[0]} is not found; install Debian's package {command[0]}") from None
    if failed:
        print(f"{arguments.tag} was not built; {command[0]} says above why")
        return NOT_ALL
    (built,) = _images_here(engine, [arguments.tag]).values()
    print(f"{arguments.tag} is {built.image_id}, {_size(built)}, built in {time.monotonic() - began:.0f} s")
    if arguments.target is None:
        chosen = "" if engine == "docker" else f" --engine {engine}"
        print(f"Next: burst image try {arguments.tag}{chosen}, then burst image push INVENTORY --image {arguments.tag}")
    return ALL_WELL


def _try(arguments: argparse.Namespace) -> int:
    import shlex

    from cluster.images.trying import run_command, tests_command
    from harness.records.provenance import PROJECT_ROOT

    _check_name(arguments.image, "the image")
    for path in arguments.tests or ():
        if Path(path).parts[:1] != ("tests",) or ".." in Path(path).parts or not (PROJECT_ROOT / path).exists():
            raise UsageError(f"--tests has {path!r}; expected a file or folder of this checkout such as tests/engine")
    (image,) = _images_here(arguments.engine, [arguments.image]).values()
    settings = _podman_settings() if arguments.engine == "podman" else {}
    runs = [["doctor"], SMOKE]
    options = arguments.engine_option
    if arguments.tests is not None:
        mounted, words = tests_command(PROJECT_ROOT, arguments.tests)
        options, runs = [*mounted, *options], [words]
    if arguments.package is not None:
        if not arguments.package.isidentifier():
            raise UsageError(f"--import is {arguments.package!r}; expected a package's name such as deepspeed")
        runs = [["python", "-c", f"import {arguments.package} as package; print(package.__version__)"]]
    for words in runs:
        command = run_command(image, words, gpus=image.cuda not in ("", "none"), options=options)
        shown = [*(f"{name}={value}" for name, value in settings.items()), *command]
        print(f"$ {shlex.join(shown)}", flush=True)
        began = time.monotonic()
        status = subprocess.run(command, env={**os.environ, **settings}, check=False).returncode
        said = "ended well" if status == 0 else f"exited with {status}"
        print(f"{words[0]} in {image.name} {said} after {time.monotonic() - began:.0f} s", flush=True)
        if status:
            return NOT_ALL
    print(f"{image.name} works here: {image.image_id}, {_size(image)}")
    return ALL_WELL


def _podman_settings() -> dict[str, str]:
    """The variable that names settings for podman on this machine; empty where it has its own, or needs none."""
    from cluster.files.filesystem import cache_folder
    from cluster.images.trying import SETTINGS_VARIABLE, podman_settings

    if SETTINGS_VARIABLE in os.environ or any(path.exists() for path in CONTAINERS_CONF):
        return {}
    settings = podman_settings()
    if not settings:
        return {}
    path = cache_folder("podman") / "containers.conf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(settings)
    print(f"podman needs these settings here, now in {path}: {' '.join(settings.split())}")
    return {SETTINGS_VARIABLE: str(path)}


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
        inventory.nodes,
        image=arguments.image,
        engine=arguments.engine,
        folder=arguments.folder,
        shared=arguments.via == "shared",
    )
    images: dict[Key, EngineImage] = {}
    for engine in dict.fromkeys(target.engine for target in targets):
        found = _images_here(engine, [target.image for target in targets if target.engine == engine])
        images |= {(engine, name): image for name, image in found.items()}
    check_ids(inventory.nodes, targets, images)
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


def _images_here(engine: Engine, names: Iterable[str], *, must_exist: bool = True) -> dict[str, EngineImage]:
    """The images of these names on this machine.

    Raises UsageError when the engine does not answer, and when it lacks one that must exist.
    """
    from cluster.images.engine import find_image, silence, version_command
    from cluster.transport.reach import LocalRunner

    runner = LocalRunner()
    done = runner.run(version_command(engine), deadline_seconds=_ENGINE_SECONDS)
    if done.exit_status != 0:
        raise UsageError(f"on this machine, {silence(engine, done)}")
    images = {}
    for name in dict.fromkeys(names):
        found = find_image(runner, engine, name, _ENGINE_SECONDS)
        if found is not None:
            images[name] = found
        elif must_exist:
            raise UsageError(f"{engine} here has no image {name}; build it with burst image build --tag {name}")
    return images


def _size(image: EngineImage) -> str:
    return f"{image.size_bytes / 2**30:.1f} GiB"


def _check_name(name: str, option: str) -> None:
    if not name or name.startswith("-") or len(name.split()) != 1:
        raise UsageError(f"{option} is {name!r}; expected an image's name such as {DEFAULT_TAG}")


COMMAND = ImageCommand()
