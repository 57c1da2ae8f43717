"""Docker or podman, where the site uses it: does it answer, can it give containers GPUs, is the right image there?"""

from __future__ import annotations

import shlex

from cluster.checks import BoardCheck
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict
from cluster.profiles import NO_GPUS, Board

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


def probe(site: Site) -> Probe:
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


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Fails without an engine this user may use, without GPU support where there are GPUs, or with another image."""
    lines = output.text.splitlines()
    engine = site.container.engine
    if engine == "none":
        if lines == ["unused"]:
            return Verdict(level="ok", summary="the site runs no containers")
        return Verdict(level="unknown", summary=f"the probe did not run ({output.first_line})")
    said = dict(line.partition(" ")[::2] for line in lines)
    if "absent" in said:
        return _failure(f"{engine} is not installed; install it, or set container.engine to none")
    if "refused" in said:
        advice = "start it, or add the user to the group docker" if engine == "docker" else "run podman info there"
        return _failure(f"{engine} does not answer ({output.first_line}); {advice}")
    if "engine" not in said or "image" not in said:
        return Verdict(level="unknown", summary=f"{engine} printed something else ({output.first_line})")
    gpus = site.container.gpus and (board.count or site.gpus.count)
    if gpus and "nvidia" not in said.get("runtimes", "").split() and said.get("toolkit") != "yes":
        return _failure(f"{engine} cannot give containers GPUs; {_REPAIR[engine]}")
    image, wanted = said["image"].strip(), site.container.image_id
    if not image:
        return _failure(f"the image {site.container.image} is absent; run burst image push")
    if wanted is not None and image != wanted:
        return _failure(f"{site.container.image} is {image[:19]}, expected {wanted[:19]}; run burst image push")
    return Verdict(
        level="ok",
        summary=f"{engine} {said['engine'].strip()} has {site.container.image} ({image[:19]})",
        facts={"image_id": image},
    )


def _failure(summary: str) -> Verdict:
    return Verdict(level="fail", summary=summary, action="isolate")


CHECK = BoardCheck(source="docker or podman: info, image inspect", probe=probe, judge=judge)
