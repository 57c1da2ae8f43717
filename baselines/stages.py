"""`python -m baselines.stages`: write the Dockerfile's stages of the compared systems from their pins.

One stage fetches a system's source and lists of packages, one installs them where nothing of ours is. They stand
between two markers of the Dockerfile; a test holds the file and the pins together.
"""

from __future__ import annotations

import sys
from pathlib import Path

from baselines.pin import FLAVOURS, load_pin, pinned_systems

BEGIN, END = (
    "# Stages of compared systems, by python -m baselines.stages\n",
    "# End of the stages of compared systems\n",
)
DOCKERFILE = Path(__file__).parents[1] / "Dockerfile"

_SOURCE = """\
FROM fetch AS {stage}-source
ARG FLAVOUR={flavour}
RUN python -m baselines.checkout {system} --flavour "$FLAVOUR" --into /opt/baseline
"""
_STAGE = """\
FROM baseline AS {stage}
COPY --from={stage}-source /opt/baseline /opt/baseline
{environment}RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \\
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
{folders}USER burst
"""
_FOLDER = (
    "RUN cp -r source/{path} /tmp/build && pip install --no-deps --no-build-isolation /tmp/build && rm -rf /tmp/build\n"
)


def render(folder: Path | None = None) -> str:
    """The stages of all pinned systems. FLAVOUR is by default the paper's copy, where there is one."""
    parts = []
    for system in pinned_systems(*([folder] if folder else [])):
        pin = load_pin(system, *([folder] if folder else []))
        flavours = [pin.flavour(name) for name in FLAVOURS if name in pin.flavours]
        variables = {name: value for flavour in flavours for name, value in flavour.environment.items()}
        folders = dict.fromkeys(path for flavour in flavours for path in flavour.folders)
        stage = system.replace("_", "-")
        words = " ".join(f"{name}={value}" for name, value in sorted(variables.items()))
        parts.append(_SOURCE.format(stage=stage, flavour=pin.flavours[0], system=system))
        parts.append(
            _STAGE.format(
                stage=stage,
                environment=f"ENV {words}\n" if words else "",
                folders="".join(_FOLDER.format(path=path) for path in folders),
            )
        )
    return "\n".join(parts)


def written(dockerfile: str, stages: str) -> str:
    """The Dockerfile with its part between the markers replaced. Raises ValueError where they are not there once
    each."""
    if dockerfile.count(BEGIN) != 1 or dockerfile.count(END) != 1:
        raise ValueError("the Dockerfile lacks the markers of the stages, or has them twice")
    before, _, rest = dockerfile.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + stages + END + after


def main() -> int:
    content = DOCKERFILE.read_text(encoding="utf-8")
    DOCKERFILE.write_text(written(content, render()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
