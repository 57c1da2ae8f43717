"""The image for CPUs, built for real and run: what it holds, tests of the engine inside it, and DeepSpeed's stage."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from baselines.pin import load_pin
from tests import podman
from tests.podman import IMAGE, ROOT, built, burst
from tests.test_image import PINS

INSIDE = ["tests/engine/attention/planning", "tests/engine/lm_head"]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def engine(tmp_path):
    if reason := podman.unavailable():
        pytest.skip(reason)


def run(tmp_path: Path, *words: str) -> str:
    """Output of `podman run` with these words; it has to end well."""
    command = ["podman", "run", "--rm", "--init", "--network", "none", "--ipc", "host", *words]
    done = subprocess.run(
        command,
        env=podman.variables(tmp_path),
        capture_output=True,
        text=True,
        timeout=podman.BUILD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (command, done.stdout[-4000:], done.stderr[-4000:])
    return done.stdout


def test_the_image_passes_doctor_and_the_demo_and_holds_the_pins_and_no_address_of_an_index(tmp_path):
    with built(IMAGE):
        said = burst("image", "try", IMAGE, "--engine", "podman")
        assert "8/8" in said
        assert f"{IMAGE} works here" in said
        frozen = run(tmp_path, "--entrypoint", "pip", IMAGE, "freeze", "--exclude-editable")
        installed = dict(line.lower().split("==") for line in frozen.splitlines() if "==" in line)
        assert installed["torch"].removesuffix("+cpu") == PINS["torch"]
        assert {name: PINS[name] for name in installed if name in PINS and name != "torch"} == {
            name: installed[name] for name in installed if name in PINS and name != "torch"
        }
        assert {"ray", "numpy", "safetensors"} <= set(installed)
        settings = run(tmp_path, "--entrypoint", "pip", IMAGE, "config", "list")
        assert "index" not in settings
        assert "links" not in settings
        assert run(tmp_path, "--entrypoint", "id", IMAGE, "-un") == "burst\n"


def test_tests_that_need_no_extra_pass_inside_it(tmp_path):
    tag = "localhost/burst-tests:test"
    with built(tag, "--target", "test"):
        program = ["python", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *INSIDE]
        said = run(tmp_path, "--volume", f"{ROOT}/tests:/burst/tests:ro", tag, *program)
        assert " passed" in said
        assert "failed" not in said


def test_deepspeeds_stage_is_built_from_its_pins(tmp_path):
    tag = "localhost/burst-tests:deepspeed"
    with built(tag, "--target", "deepspeed"):
        (wanted,) = [
            name.partition("==")[2] for name in load_pin("deepspeed").flavour("current").packages if "deepspeed" in name
        ]
        assert f"\n{wanted}\n" in burst("image", "try", tag, "--engine", "podman", "--import", "deepspeed")
        seen = run(tmp_path, tag, "python", "-c", "import importlib.util as u; print(u.find_spec('engine'))")
        assert seen == "None\n"  # nothing of ours is in it
