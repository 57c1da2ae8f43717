"""What runs need on a node: interpreter, packages and checkout, or a container engine with the image."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

from cluster.checks import check
from cluster.inventory import checkout
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict, fail, ok, unknown, warn
from cluster.profiles import Board

_PROGRAM = Path(checkout.__file__).read_text(encoding="utf-8")


def software_probe(site: Site) -> Probe:
    """Lines for what is absent, and one with versions; only `container` where the software is in an image."""
    if site.container.engine != "none":
        return Probe(script="echo container")
    python, folder = (shlex.quote(path) for path in _paths(site))
    libraries = " ".join(shlex.quote(path) for path in preloaded(site))
    return Probe(
        script=f"""
[ -f {folder}/harness/__main__.py ] || echo no folder
for library in {libraries}; do [ -r "$library" ] || printf 'no library %s\\n' "$library"; done
[ -x {python} ] || {{ echo no python; exit 0; }}
exec {python} -c {shlex.quote(_PROGRAM)} {folder}
""",
        seconds=20.0,
    )


@check(software_probe, "burst cluster up, which needs them")
def software(output: Output, site: Site, board: Board) -> Verdict:
    """Fails where something that the site names is absent or incomplete; where it names nothing, that is a warning.

    An interpreter that is there and does not run as this program's does is unknown then.
    """
    if site.container.engine != "none":
        if output.lines == ["container"]:
            return ok(f"the software is in the image {site.container.image}")
        return unknown(f"the probe did not run ({output.first_line})")
    python, folder = _paths(site)
    absent = [row.removeprefix("library ") for row in output.rows("no") if row.startswith("library ")]
    no_python, no_folder = "no python" in output.lines, "no folder" in output.lines
    wrong: list[str] = []
    versions: dict[str, str | None] = {}
    if answer := output.rows(checkout.ANSWER.strip()):
        versions = json.loads(answer[-1])
        if lacking := [name for name in checkout.LIBRARIES if versions.get(name) is None]:
            wrong.append(f"{python} lacks {' and '.join(lacking)}")
    else:
        reason = "is no executable file" if no_python else f"does not run ({output.first_line or 'silent'})"
        wrong.append(f"{python} {reason}")
    if no_folder:
        wrong.append(f"{folder} is no checkout of this project")
    wrong += [f"LD_PRELOAD names {library}, which cannot be read" for library in absent]
    if not wrong:
        listed = ", ".join(f"{name} {found}" for name, found in versions.items())
        return ok(f"{listed} in {python}", facts={"versions": versions})
    if site.software.python or site.software.folder or absent:
        return fail(f"{'; '.join(wrong)}; install it there, or correct software in the site")
    if not answer and not no_python:
        return unknown(f"{wrong[0]}; name software in the site, or repair it", "monitor")
    said = f"{'; '.join(wrong)}: runs need it there, or under another path that the site's software names"
    return warn(f"not installed where it is here ({said})")


def preloaded(site: Site) -> list[str]:
    """The libraries that the site's LD_PRELOAD names: ld.so(8) takes colons and spaces between them."""
    return [path for path in re.split(r"[:\s]+", site.environment.get("LD_PRELOAD", "")) if path]


def _paths(site: Site) -> tuple[str, str]:
    """Interpreter and checkout on the node; by default those of this program."""
    return site.software.python or sys.executable, site.software.folder or str(checkout.ROOT)


_INFO = {
    "docker": "engine {{.ServerVersion}}\nruntimes {{range $name, $runtime := .Runtimes}}{{$name}} {{end}}",
    "podman": "engine {{.Version.Version}}",
}
# Succeeds where the engine can give containers GPUs: docker by its hook, podman by devices that it knows by name.
_TOOLKIT = {
    "docker": "command -v nvidia-container-runtime-hook",
    "podman": "grep -qs nvidia.com/gpu /etc/cdi/*.yaml /etc/cdi/*.json /var/run/cdi/*.yaml /var/run/cdi/*.json",
}
_REPAIR = {
    "docker": "install nvidia-container-toolkit",
    "podman": "install nvidia-container-toolkit and run nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
}
_START = {"docker": "start it, or add the user to the group docker", "podman": "run podman info there"}


def docker_probe(site: Site) -> Probe:
    """Lines `engine`, `runtimes`, `toolkit` and `image`; nothing but `unused` where the site runs no containers."""
    engine = site.container.engine
    if engine == "none":
        return Probe(script="echo unused")
    assert site.container.image is not None
    return Probe(
        script=f"""
command -v {engine} >/dev/null 2>&1 || {{ echo 'absent'; exit 0; }}
engine=$({engine} info --format '{_INFO[engine]}' 2>&1)
status=$?
printf '%s\\n' "$engine"
[ "$status" -eq 0 ] || {{ printf 'refused %s\\n' "$status"; exit 0; }}
{_TOOLKIT[engine]} >/dev/null 2>&1 && echo 'toolkit yes' || echo 'toolkit no'
image=$({engine} image inspect --format '{{{{.Id}}}}' -- {shlex.quote(site.container.image)} 2>/dev/null)
printf 'image %s\\n' "${{image:+sha256:${{image#sha256:}}}}"
""",
        seconds=20.0,
    )


@check(docker_probe, "docker or podman: info, image inspect")
def docker(output: Output, site: Site, board: Board) -> Verdict:
    """Fails without an engine this user may use, without GPU support where there are GPUs, or with another image."""
    engine, said = site.container.engine, output.said
    if engine == "none":
        unused = output.lines == ["unused"]
        return ok("the site runs no containers") if unused else unknown(f"the probe did not run ({output.first_line})")
    if "absent" in said:
        return fail(f"{engine} is not installed; install it, or set container.engine to none")
    if "refused" in said:
        return fail(f"{engine} does not answer ({output.first_line}); {_START[engine]}")
    if "engine" not in said or "image" not in said:
        return unknown(f"{engine} printed something else ({output.first_line})")
    gpus = site.container.gpus and (board.count or site.gpus.count)
    if gpus and "nvidia" not in said.get("runtimes", "").split() and said.get("toolkit") != "yes":
        return fail(f"{engine} cannot give containers GPUs; {_REPAIR[engine]}")
    image, wanted = said["image"].strip(), site.container.image_id
    if not image:
        return fail(f"the image {site.container.image} is absent; run burst setup image push")
    if wanted is not None and image != wanted:
        return fail(f"{site.container.image} is {image[:19]}, expected {wanted[:19]}; run burst setup image push")
    has = f"{engine} {said['engine'].strip()} has {site.container.image} ({image[:19]})"
    return ok(has, facts={"image_id": image})
