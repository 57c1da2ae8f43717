"""The image installs what pyproject.toml asks for, in the versions `make` installs. Here it is not
built (test_image_built.py does, for CPUs alone); what its RUN lines say to a shell is executed, with programs that note
how they were called in the place of those that need root, a network or an hour."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from baselines import stages
from baselines.checkout import main as check_out
from baselines.pin import load_pin, pinned_systems
from cluster.images import CPU_BASE
from tests.hosts.dockerfile import parse

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
INSTRUCTIONS = parse(DOCKERFILE)
RUNS = [instruction for instruction in INSTRUCTIONS if instruction.keyword == "RUN"]
STAGES = [instruction.stage for instruction in INSTRUCTIONS if instruction.keyword == "FROM"]
SYSTEMS = [system.replace("_", "-") for system in pinned_systems()]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
INSTALLED = ("gpu", "harness", "peers", "ray", "train")  # ray and train bring harness
NEEDED = [
    Requirement(line)
    for lines in (PROJECT["dependencies"], *(EXTRAS[name] for name in INSTALLED))
    for line in lines
    if not line.startswith(PROJECT["name"])
]
PINNED = (ROOT / "pins.txt").read_text(encoding="utf-8").splitlines()
PINS = dict(line.split("==") for line in PINNED if not line.startswith("#"))
ARGUMENTS = {
    instruction.text.partition("=")[0]: instruction.text.partition("=")[2]
    for instruction in INSTRUCTIONS
    if instruction.keyword == "ARG" and not instruction.stage
}


@pytest.mark.parametrize("requirement", NEEDED, ids=lambda requirement: requirement.name)
def test_the_pinned_version_is_one_the_project_allows(requirement):
    pinned = {canonicalize_name(name): version for name, version in PINS.items()}
    assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])


def test_nothing_else_is_pinned():
    assert {canonicalize_name(name) for name in PINS} == {canonicalize_name(needed.name) for needed in NEEDED}


def test_make_and_the_image_install_the_same_torch():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"torch==(\S+)", makefile) == [PINS["torch"]]


PYTHONS = {"ubuntu24.04": "3.12", "bookworm": "3.11"}  # of the distributions, as their packages name it


def test_the_images_python_is_the_distributions_and_one_the_project_allows():
    assert not re.search(r"python3\.\d", DOCKERFILE)
    for base in (value for name, value in ARGUMENTS.items() if name.endswith("_IMAGE") and "/" in value):
        (version,) = [version for distribution, version in PYTHONS.items() if base.endswith(distribution)]
        assert SpecifierSet(PROJECT["requires-python"]).contains(version), base


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_each_cuda_has_a_base_of_that_cuda_and_the_same_ubuntu(cuda):
    assert re.fullmatch(rf"nvidia/cuda:{cuda}\.\d+\.\d+-base-ubuntu24\.04", ARGUMENTS[f"CUDA_{cuda}_IMAGE"])
    assert f"cuda{cuda}" in STAGES


def test_without_cuda_the_base_is_the_same_for_the_image_and_for_compared_systems():
    assert ARGUMENTS["CUDA_NONE_IMAGE"] == CPU_BASE
    assert "cudanone" in STAGES


def test_the_default_cuda_is_the_one_the_projects_gpu_extra_is_for():
    assert [needed.extras for needed in NEEDED if needed.name == "flash-attn-4"] == [{f"cu{ARGUMENTS['CUDA']}"}]


def test_no_index_or_registry_is_named():
    assert not re.search(r"https?:|pypi|pytorch\.org|[\w-]+\.(com|org|io|net)/", DOCKERFILE)
    assert [one.text for one in INSTRUCTIONS if "INDEX" in one.text and one.keyword == "ARG"] == ["TORCH_INDEX_URL"]


def test_the_index_is_no_part_of_a_stage_that_ships():
    shipped = ancestors("burst") | {stage for system in SYSTEMS for stage in ancestors(system)}
    assert {"needed", "build"} & shipped == set()
    assert {one.stage for one in INSTRUCTIONS if "TORCH_INDEX_URL" in one.text} == {"needed"}


def test_no_program_runs_as_root_and_no_server_is_inside():
    for stage in ("burst", *SYSTEMS):
        assert [one.text for one in INSTRUCTIONS if one.keyword == "USER" and one.stage == stage] == ["burst"]
        own = ancestors(stage) | {stage}
        assert any("useradd --create-home --uid 10001 burst" in run.text for run in RUNS if run.stage in own)
    assert not any(one.keyword == "HEALTHCHECK" for one in INSTRUCTIONS)
    assert "openssh" not in DOCKERFILE
    assert STAGES[-1] == "burst"  # what is built when no stage is asked for


def test_the_commit_is_a_label_and_what_records_read():
    (label,) = [one.text for one in INSTRUCTIONS if one.keyword == "LABEL"]
    assert 'org.opencontainers.image.revision="${BURST_COMMIT}"' in label
    assert f'org.opencontainers.image.licenses="{PROJECT["license"]}"' in label
    assert any(one.text == "BURST_COMMIT=${BURST_COMMIT}" for one in INSTRUCTIONS if one.keyword == "ENV")


def test_stages_take_from_stages_named_before_them():
    seen = set()
    for instruction in INSTRUCTIONS:
        if instruction.keyword == "FROM":
            source = bases(instruction)
            assert source <= seen or all("/" in image for image in source), instruction
            seen.add(instruction.stage)
        for stage in re.findall(r"--from=(\S+)", instruction.text):
            assert stage in seen, instruction


def test_what_the_build_needs_is_not_ignored():
    ignored = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if not line.startswith("#")]
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout, so its files cannot be told from others")
    kept = {"pyproject.toml", "pins.txt", "README.md", "LICENSE", "check_nodes.py"}
    for path in listed.stdout.splitlines():
        if path in kept or path.split("/")[0] in {"burst", "harness", "engine", "baselines", "cluster", "experiments"}:
            assert not any(fnmatch.fnmatch(path, f"{line}*") for line in ignored), path
    assert {".git/", ".venv/", "results/runs/", "baselines/*/upstream/"} <= set(ignored)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.stage}: {run.text[:30]}")
def test_each_run_line_is_shell(run):
    done = subprocess.run(["sh", "-n"], input=run.text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


NOTING = """\
#!/bin/sh
exec >> {log}
printf %s {name}
for word; do printf ' %s' "$word"; done
echo "${{DS_BUILD_OPS+ (DS_BUILD_OPS=$DS_BUILD_OPS)}}"
"""


@pytest.fixture
def shell(tmp_path):
    """Executes a RUN line in a folder of its own; programs named in `noted` are noted and do nothing."""

    def execute(run, noted=(), path=(), **variables):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name in noted:
            (folder / name).write_text(NOTING.format(name=name, log=tmp_path / "log"))
            (folder / name).chmod(0o755)
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        environment = {"PATH": ":".join([str(folder), *path, "/usr/bin", "/bin"]), **variables}
        done = subprocess.run(
            ["/bin/sh", "-f", "-c", run.text], cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        log = tmp_path / "log"
        calls = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return done, calls

    return execute


def run_line(stage: str, word: str):
    (found,) = [run for run in RUNS if run.stage == stage and word in run.text]
    return found


PIP = "pip install --constraint /opt/burst/pins.txt"


@pytest.mark.parametrize(
    ("stage", "word", "variables", "expected"),
    [
        ("needed", "--index-url", {"CUDA": "13"}, [f"{PIP} torch"]),
        ("needed", "--index-url", {"CUDA": "12", "TORCH_INDEX_URL": "a b"}, [f"{PIP} --index-url a b torch"]),
        ("needed", "--index-url", {"CUDA": "none"}, [f"{PIP} torch"]),
        ("needed", "case", {"CUDA": "none"}, [f"{PIP} --editable .[ray,train] (DS_BUILD_OPS=0)"]),
        ("needed", "case", {"CUDA": "13"}, [f"{PIP} --editable .[gpu,peers,ray,train] (DS_BUILD_OPS=0)"]),
        (
            "needed", "case", {"CUDA": "12"},
            [f"{PIP} --editable .[peers,ray,train] flash-attn-4 nvidia-cutlass-dsl nvidia-ml-py quack-kernels"
             " (DS_BUILD_OPS=0)"],
        ),
        ("needed", "venv", {}, ["python3 -m venv /opt/burst"]),
        (
            "base", "apt-get", {},
            ["apt-get update",
             "apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv",
             "rm -rf /var/lib/apt/lists/*"],
        ),
        (
            "fetch", "apt-get", {},
            ["apt-get update", "apt-get install --yes --no-install-recommends ca-certificates git",
             "rm -rf /var/lib/apt/lists/*"],
        ),
        (
            "devel", "apt-get", {},
            ["apt-get update",
             "apt-get install --yes --no-install-recommends g++ ninja-build python3 python3-dev python3-venv",
             "rm -rf /var/lib/apt/lists/*"],
        ),
        (
            "baseline", "venv", {},
            ["python3 -m venv --system-site-packages /opt/baseline/venv", "useradd --create-home --uid 10001 burst"],
        ),
        (
            "test", "apt-get", {},
            ["apt-get update", "apt-get install --yes --no-install-recommends git make procps",
             "rm -rf /var/lib/apt/lists/*"],
        ),
        ("test", "[test]", {}, [f"{PIP} --editable .[test]"]),
        ("test", "no-deps", {}, ["pip install --no-deps --editable ."]),
        ("build", "no-deps", {}, ["pip install --no-deps --editable ."]),
        ("burst", "useradd", {}, ["useradd --create-home --uid 10001 burst"]),
        ("burst", "install --directory", {}, ["install --directory --owner burst results/runs"]),
    ],
)  # fmt: skip
def test_what_a_run_line_calls(shell, stage, word, variables, expected):
    noted = ("pip", "python3", "apt-get", "rm", "useradd", "install")
    done, calls = shell(run_line(stage, word), noted, **variables)
    assert done.returncode == 0, done.stderr
    assert calls == expected


def test_cuda_12_without_an_index_is_one_sentence_and_installs_nothing(shell):
    done, calls = shell(run_line("needed", "--index-url"), ("pip",), CUDA="12")
    assert (done.returncode, done.stderr, calls) == (2, "CUDA 12 needs TORCH_INDEX_URL\n", [])


@pytest.mark.parametrize(
    ("cuda", "found", "fits"),
    [
        ("13", "'13.0'", True),
        ("13", "'12.6'", False),
        ("13", "None", False),
        ("none", "None", True),
        ("none", "'13.0'", False),
    ],
)
def test_a_torch_for_another_cuda_ends_the_build(shell, tmp_path, cuda, found, fits):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from . import version\n")
    (tmp_path / "torch" / "version.py").write_text(f"cuda = {found}\n")
    python = str(Path(sys.executable).parent)
    done, _ = shell(run_line("needed", "import torch"), path=[python], CUDA=cuda, PYTHONPATH=str(tmp_path))
    assert (done.returncode == 0) == fits
    assert fits or "AssertionError: torch has CUDA" in done.stderr


def test_the_code_is_compiled_and_the_folder_for_results_is_there(shell, tmp_path):
    run = run_line("build", "compileall")
    packages = re.findall(r"compileall -q ([\w ]+)", run.text)[0].split()
    for name in packages:
        assert (ROOT / name / "__init__.py").exists()
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "module.py").write_text("x = 1\n")
    done, _ = shell(run, path=[str(Path(sys.executable).parent)])
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "work").glob("*/__pycache__/module.*.pyc"))) == len(packages)
    assert (tmp_path / "work" / "results" / "runs").is_dir()


def test_every_pinned_system_has_a_stage_that_fetches_it(shell, capsys):
    fetched = []
    for system in SYSTEMS:
        _, calls = shell(run_line(f"{system}-source", "checkout"), ("python",), FLAVOUR="paper")
        words = calls[0].split()
        assert words[:3] == ["python", "-m", "baselines.checkout"]
        assert words[4:] == ["--flavour", "paper", "--into", "/opt/baseline"]
        fetched.append(words[3])
        flavour = load_pin(words[3]).flavours[0]
        [default] = [one.text for one in INSTRUCTIONS if one.keyword == "ARG" and one.stage == f"{system}-source"]
        assert default == f"FLAVOUR={flavour}"
        arguments = [words[3], "--flavour", flavour, "--into", str(ROOT)]
        assert check_out(arguments) == 2  # known to the program, which refuses what exists
        assert "give --into a path that does not" in capsys.readouterr().err
    assert fetched == pinned_systems()


def test_the_stages_of_compared_systems_are_those_of_their_pins():
    assert stages.written(DOCKERFILE, stages.render()) == DOCKERFILE, "run python -m baselines.stages"
    with pytest.raises(ValueError, match="lacks the markers"):
        stages.written("FROM scratch\n", "")


@pytest.mark.parametrize("system", SYSTEMS)
def test_packages_are_installed_with_their_hashes_and_after_torch(shell, system):
    calls = []
    for word in ("import torch", "--requirement build.txt"):
        _, called = shell(run_line(system, word), ("pip",))  # and no python, so torch is not there
        calls += called
    assert calls == [
        "pip install --requirement torch.txt",
        "pip install --no-deps --require-hashes --requirement build.txt",
        "pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt",
    ]


def test_a_torch_that_is_there_is_kept(shell, tmp_path):
    (tmp_path / "torch.py").write_text("")
    python = str(Path(sys.executable).parent)
    _, calls = shell(run_line("deepspeed", "import torch"), ("pip",), path=[python], PYTHONPATH=str(tmp_path))
    assert calls == []


def test_a_copy_without_packages_installs_none(shell, tmp_path):
    (tmp_path / "work").mkdir()
    for name in ("build.txt", "requirements.txt"):
        (tmp_path / "work" / name).write_text("")
    python = str(Path(sys.executable).parent)
    done, _ = shell(
        run_line("internevo", "build.txt"), path=[python], HOME=str(tmp_path), PIP_DISABLE_PIP_VERSION_CHECK="1"
    )
    assert done.returncode == 0, done.stderr
    assert "install" not in done.stdout.lower()


def bases(instruction) -> set[str]:
    """What a FROM may stand for, its build arguments filled in: with CUDA 12, with CUDA 13, and without."""
    source = instruction.text.split(" AS ")[0]
    filled = {source.replace("${CUDA}", cuda) for cuda in ("12", "13", "none")}
    return {re.sub(r"\$\{(\w+)\}", lambda found: ARGUMENTS[found[1]], one) for one in filled}


def ancestors(stage: str) -> set[str]:
    """The stages whose layers are part of this one."""
    (start,) = [one for one in INSTRUCTIONS if one.keyword == "FROM" and one.stage == stage]
    found = {base for base in bases(start) if base in STAGES}
    return found.union(*(ancestors(base) for base in found))
