"""Software: are interpreter, packages and checkout there that `burst cluster up` and a run need on the node?"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict

_HERE = Path(__file__).resolve().parents[3]  # the checkout this program runs from
PACKAGES = ("ray", "torch")
_ANSWER = "versions "  # begins the line with the packages' versions as JSON

# Versions are read from metadata: importing torch would take seconds.
_PROGRAM = f"""\
import json, platform
from importlib import metadata
found = {{"python": platform.python_version()}}
for name in {PACKAGES!r}:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
print({_ANSWER!r} + json.dumps(found))
"""


def probe(site: Site) -> Probe:
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
exec {python} -c {shlex.quote(_PROGRAM)}
""",
        seconds=20.0,
    )


def judge(output: Output, site: Site) -> Verdict:
    """Fails where something that the site names is absent or incomplete; where it names nothing, a node may be without.

    An interpreter that is there and does not run as this program's does is unknown then.
    """
    lines = output.text.splitlines()
    if site.container.engine != "none":
        if lines == ["container"]:
            return Verdict(level="ok", summary=f"the software is in the image {site.container.image}")
        return Verdict(level="unknown", summary=f"the probe did not run ({output.first_line})")
    python, folder = _paths(site)
    answer = next((line for line in lines if line.startswith(_ANSWER)), None)
    wrong = []
    if answer is None:
        reason = "is no executable file" if "no python" in lines else f"does not run ({output.first_line or 'silent'})"
        wrong.append(f"{python} {reason}")
    else:
        versions = json.loads(answer.removeprefix(_ANSWER))
        if absent := [name for name in PACKAGES if versions.get(name) is None]:
            wrong.append(f"{python} lacks {' and '.join(absent)}")
    if "no folder" in lines:
        wrong.append(f"{folder} is no checkout of this project")
    absent = [line.removeprefix("no library ") for line in lines if line.startswith("no library ")]
    wrong += [f"LD_PRELOAD names {library}, which cannot be read" for library in absent]
    named = site.software.python or site.software.folder or absent
    if answer is None and "no python" not in lines and not named:
        return Verdict(
            level="unknown", summary=f"{wrong[0]}; name software in the site, or repair it", action="monitor"
        )
    if wrong and not named:
        said = f"{'; '.join(wrong)}: runs need it there, or under another path that the site's software names"
        return Verdict(level="ok", summary=f"not installed where it is here ({said})")
    if wrong:
        summary = f"{'; '.join(wrong)}; install it there, or correct software in the site"
        return Verdict(level="fail", summary=summary, action="isolate")
    assert answer is not None, lines
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Verdict(level="ok", summary=f"{listed} in {python}", facts={"versions": versions})


def preloaded(site: Site) -> list[str]:
    """The libraries that the site's LD_PRELOAD names: ld.so(8) takes colons and spaces between them."""
    return [path for path in re.split(r"[:\s]+", site.environment.get("LD_PRELOAD", "")) if path]


def _paths(site: Site) -> tuple[str, str]:
    """Interpreter and checkout on the node; by default those of this program."""
    return site.software.python or sys.executable, site.software.folder or str(_HERE)


CHECK = Check(source="burst cluster up, which needs them", probe=probe, judge=judge)
