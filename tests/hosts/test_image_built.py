"""The image for CPUs, built for real and run: what it holds, tests of the engine inside it, and DeepSpeed's stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from baselines.called import REQUEST_FILE
from baselines.fidelity.attention import compared, request_of, write_inputs
from baselines.fidelity.cases import SYSTEMS, Case
from baselines.install.places import InstallPlace
from baselines.pin import load_pin
from tests.hosts import podman
from tests.hosts.podman import IMAGE, ROOT, built, run
from tests.hosts.test_image import PINS

# The others start Ray, SSH servers, network namespaces, Slurm, browsers or containers, or ask git: on a machine, not
# in a container without network, root and history.
INSIDE = "tests/engine"
INSIDE_SECONDS = 7200.0  # on a busy machine; 20 minutes of processor time

pytestmark = pytest.mark.hosts


@pytest.fixture(autouse=True)
def engine(tmp_path):
    if reason := podman.unavailable():
        pytest.skip(reason)


def test_the_image_passes_doctor_and_the_demo_and_holds_the_pins_and_no_address_of_an_index(tmp_path):
    with built(IMAGE):
        run(tmp_path, IMAGE, "doctor")
        assert "[8/8]" in run(tmp_path, IMAGE, "run", "experiments/quickstart.yaml", "--scale", "smoke").stderr
        frozen = run(tmp_path, "--entrypoint", "pip", IMAGE, "freeze", "--exclude-editable").stdout
        installed = dict(line.lower().split("==") for line in frozen.splitlines() if "==" in line)
        assert installed["torch"].removesuffix("+cpu") == PINS["torch"]
        others = (PINS.keys() & installed.keys()) - {"torch"}
        assert {name: installed[name] for name in others} == {name: PINS[name] for name in others}
        assert {"ray", "numpy", "safetensors"} <= set(installed)
        settings = run(tmp_path, "--entrypoint", "pip", IMAGE, "config", "list").stdout
        assert "index" not in settings
        assert "links" not in settings
        assert run(tmp_path, "--entrypoint", "id", IMAGE, "-un").stdout == "burst\n"


def test_the_engines_tests_pass_inside_it(tmp_path):
    tag = "localhost/burst-tests:test"
    with built(tag, "--target", "test"):
        mounted = [f"--volume={ROOT}/{name}:/burst/{name}:ro" for name in ("tests", "results/published")]
        command = ["python", "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", INSIDE]
        said = run(tmp_path, *mounted, tag, *command, seconds=INSIDE_SECONDS).stdout
        assert " passed" in said
        assert "failed" not in said


def test_deepspeeds_stage_is_built_from_its_pins_and_attends_as_dense_attention_does(tmp_path):
    tag = "localhost/burst-tests:deepspeed"
    with built(tag, "--target", "deepspeed"):
        (wanted,) = [
            name.partition("==")[2] for name in load_pin("deepspeed").flavour("current").packages if "deepspeed" in name
        ]
        imported = run(tmp_path, tag, "python", "-c", "import deepspeed; print(deepspeed.__version__)").stdout
        assert imported.splitlines()[-1] == wanted
        seen = run(tmp_path, tag, "python", "-c", "import importlib.util as u; print(u.find_spec('engine'))")
        assert seen.stdout == "None\n"  # nothing of ours is in it
        error = attention_error(tmp_path, tag)
        assert 0 < error < 1e-5, error


def attention_error(tmp_path: Path, tag: str) -> float:
    """The largest relative error of DeepSpeed's attention over two ranks in one container: out, dq, dk and dv."""
    folder = tmp_path / "attention"
    folder.mkdir()
    folder.chmod(0o777)  # the ranks run as the image's user
    case = Case(name="image", form="Ulysses", ranks=2, dtype="fp32", layout="contiguous")
    wanted = write_inputs(case, folder)
    request = request_of(SYSTEMS["deepspeed"], case, InstallPlace(system="deepspeed", flavour="current"), folder)
    ours, there = f"{ROOT}/baselines", "/baselines"  # what calls the system; the image's user may not enter /root
    (folder / REQUEST_FILE).write_text(json.dumps(request | {"cases": [request]}).replace(ours, there))
    given = ["--env", "GLOO_SOCKET_IFNAME=lo", "--volume", f"{ours}:{there}:ro", "--volume", f"{folder}:{folder}"]
    program = ["torchrun", "--standalone", "--nproc-per-node", "2", f"{there}/programs/attention.py"]
    run(tmp_path, *given, tag, *program, str(folder / REQUEST_FILE))
    left = [torch.load(f"{request['left']}.rank{rank}.pt") for rank in range(case.ranks)]
    assert not [each["text"] for each in left if "error" in each]
    return max(error.relative for error in compared(left, wanted).values())
