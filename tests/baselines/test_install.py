"""Installations are made for real: environments, pip, git and locks, with small packages and repositories of the
test."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from baselines.install.build import check_space, install_system
from baselines.install.bundle import make_bundle
from baselines.install.interpreter import Interpreter, clean_environment, look_at
from baselines.install.packages import other_builds
from baselines.install.places import Installation, InstallPlace
from baselines.install.verify import verify
from cluster.files.errors import UsageError
from harness.cli import main
from tests.baselines.test_pins import git

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


def quiet(*_: object) -> None:
    pass


def wheel(folder: Path, name: str, version: str, content: str) -> str:
    """A wheel with one module; returns its SHA-256."""
    files = {
        f"{name}.py": content,
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    files[f"{name}-{version}.dist-info/RECORD"] = record + f"{name}-{version}.dist-info/RECORD,,\n"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def given(tmp_path: Path) -> Path:
    return make_given(tmp_path)


@pytest.fixture
def place(tmp_path: Path, given: Path) -> InstallPlace:
    return make_place(tmp_path, given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[InstallPlace, Path]:
    """An installation, and what it was made from; tests leave it whole."""
    folder = tmp_path_factory.mktemp("whole")
    given = make_given(folder)
    place = make_place(folder, given)
    assert place.condition()[0] == "not installed"
    assert install_system(place, given=given, say=quiet).problems == []
    return place, given


def make_given(tmp_path: Path) -> Path:
    """A folder with a wheel and a clone, as a user puts one together."""
    folder = tmp_path / "given"
    wheel(folder, "somering", "1.2", "RING = 'flat'\n")
    clone = folder / "some-clone"
    git(tmp_path, "init", "--quiet", str(clone))
    (clone / "train.py").write_text("import somering\n")
    git(clone, "add", ".")
    git(clone, "commit", "--quiet", "-m", "first")
    return folder


def make_place(tmp_path: Path, given: Path) -> InstallPlace:
    """A pinned system of the test, in a folder of its own."""
    base = tmp_path / "systems"
    (base / "some").mkdir(parents=True)
    [file] = given.glob("*.whl")
    pin = {
        "system": "Some", "licence": "MIT", "home": "https://example.invalid",
        "current": {
            "python": VERSION, "torch": "2.0-2.99", "cuda": "12.0-13.9", "devices": ["cpu", "cuda"],
            "packages": {"somering==1.2": hashlib.sha256(file.read_bytes()).hexdigest()},
            "checkout": {
                "repository": "https://example.invalid/x", "commit": git(given / "some-clone", "rev-parse", "HEAD"),
                "tree": git(given / "some-clone", "rev-parse", "HEAD^{tree}"),
            },
            "provided": ["numpy"], "imports": ["somering"], "entry": "train.py", "disk_mib": 1,
        },
    }  # fmt: skip
    (base / "some" / "pin.yaml").write_text(yaml.safe_dump(pin))
    return InstallPlace(system="some", flavour="current", base=base)


@pytest.mark.slow  # makes a whole environment
def test_an_installation_has_the_pinned_system_and_the_torch_of_this_environment(
    whole: tuple[InstallPlace, Path],
) -> None:
    place, _ = whole
    assert place.condition()[0] == "installed"
    code = "import somering, torch, numpy; print(somering.__file__, torch.__version__)"
    alone = clean_environment()
    done = subprocess.run([place.python, "-c", code], env=alone, capture_output=True, text=True, check=True)
    path, version = done.stdout.split()
    assert path.startswith(str(place.folder / "env"))
    state = place.state()
    assert state is not None
    assert (state.torch, state.packages["somering"]) == (version, "1.2")
    for name in ("pytest", "engine", "pip"):  # neither the packages beside torch, nor our own
        command = [place.python, "-c", f"import {name}"]  # which would also look into the working directory
        tried = subprocess.run(command, env=alone, cwd=place.folder, capture_output=True, check=False)
        assert tried.returncode


def test_what_was_cut_off_is_found_and_finished_without_what_it_had_fetched(
    place: InstallPlace, given: Path, tmp_path: Path
) -> None:
    (given / "somering-1.2-py3-none-any.whl").rename(tmp_path / "kept.whl")
    with pytest.raises(UsageError, match="pip download failed"):
        install_system(place, given=given, say=quiet)
    assert place.condition()[0] == "half-finished"
    assert (place.source / "train.py").exists()
    (tmp_path / "kept.whl").rename(given / "somering-1.2-py3-none-any.whl")
    for path in (given / "some-clone").glob(".git/*"):  # the source is there already
        path.rename(tmp_path / path.name)
    said: list[str] = []
    install_system(place, given=given, say=said.append)
    assert said[0] == "some (current): an earlier installation was cut off; going on with it"
    assert place.condition()[0] == "installed"


@pytest.mark.slow  # makes a whole environment
def test_an_installation_that_was_changed_is_broken_and_made_anew(whole: tuple[InstallPlace, Path]) -> None:
    place, given = whole
    [module] = (place.folder / "env" / "lib").glob("python*/site-packages/somering.py")
    module.write_text("RING = 'patched'\n")
    (place.source / "train.py").write_text("patched\n")
    assert verify(place).problems == ["source: train.py differs", "somering.py differs: it is not as it was installed"]
    assert install_system(place, given=given, say=quiet).problems == []
    [module] = (place.folder / "env" / "lib").glob("python*/site-packages/somering.py")
    assert module.read_text() == "RING = 'flat'\n"


def test_a_wheel_with_another_hash_is_not_installed(place: InstallPlace, given: Path) -> None:
    wheel(given, "somering", "1.2", "RING = 'another'\n")
    with pytest.raises(UsageError, match=r"pip download failed .*hash"):
        install_system(place, given=given, say=quiet)
    assert place.condition()[0] == "half-finished"


@pytest.mark.slow
def test_a_bundle_installs_where_there_is_no_network(place: InstallPlace, given: Path, tmp_path: Path) -> None:
    pin_file = place.base / "some" / "pin.yaml"
    pin = yaml.safe_load(pin_file.read_text())
    pin["current"]["checkout"]["repository"] = f"file://{given / 'some-clone'}"
    pin_file.write_text(yaml.safe_dump(pin))
    index = tmp_path / "index" / "somering"
    index.mkdir(parents=True)
    name = "somering-1.2-py3-none-any.whl"
    (index / "index.html").write_text(f'<a href="file://{given}/{name}">{name}</a>')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        patch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/index")
        patch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        make_bundle(place, tmp_path / "some.tar")
    given.rename(tmp_path / "gone")
    install_system(place, given=tmp_path / "some.tar", say=quiet)
    assert place.condition()[0] == "installed"
    with pytest.raises(UsageError, match="exists; give --out a path that does not"):
        make_bundle(place, tmp_path / "some.tar")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no archive", "it is no whole tar archive"),
        (b"\x1f\x8b\x08\x00" + bytes(5) + b"\x03" + b"\xff" * 64, "it is no whole tar archive"),
        ("damaged", "cannot be unpacked: "),
        ("cut off", "cannot be unpacked: "),
        ("outside", "would be extracted to"),
    ],
)
def test_an_archive_that_cannot_be_read_is_refused_in_one_sentence(
    place: InstallPlace, tmp_path: Path, content: bytes | str, reason: str
) -> None:
    path = tmp_path / "bundle.tar.gz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        (tmp_path / "wheel").write_bytes(os.urandom(1 << 16))
        with tarfile.open(path, "w:gz") as archive:
            archive.add(tmp_path / "wheel", arcname="../../wheel" if content == "outside" else "wheels/wheel")
        packed = bytearray(path.read_bytes())
        middle = len(packed) // 2
        if content == "damaged":
            packed[middle:] = bytes(~byte & 0xFF for byte in packed[middle:])
        path.write_bytes(packed[:middle] if content == "cut off" else packed)
    with pytest.raises(UsageError, match="give a bundle, or pack it again") as refused:
        install_system(place, given=path, say=quiet)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert place.condition()[0] != "installed"


def with_numpy_pinned(place: InstallPlace, given: Path) -> None:
    """The pin names numpy, too, in a version that nobody has; so it can only come from beside torch."""
    pin_file = place.base / "some" / "pin.yaml"
    pin = yaml.safe_load(pin_file.read_text())
    pin["current"]["packages"]["numpy==0.0.1"] = "0" * 64
    pin_file.write_text(yaml.safe_dump(pin))


@pytest.mark.slow  # makes a whole environment
def test_common_packages_come_from_beside_torch_where_asked(place: InstallPlace, given: Path) -> None:
    with_numpy_pinned(place, given)
    with pytest.raises(UsageError, match=r"pip download failed .*numpy==0.0.1"):
        install_system(place, given=given, say=quiet)
    install_system(place, given=given, borrow=True, say=quiet)
    state = place.state()
    assert state is not None
    assert list(state.borrowed) == ["numpy"]
    assert state.borrowed["numpy"] == importlib.metadata.version("numpy")
    assert "numpy" not in state.packages
    assert verify(place).problems == []
    done = subprocess.run(
        [place.python, "-c", "import numpy; print(numpy.__version__)"], env=clean_environment(), cwd=place.folder,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == state.borrowed["numpy"]


def packed(folder: Path, version: str = "1.2", *, left_out: str = "") -> Path:
    """An archive of package somering as it would lie in an environment, with other content than its wheel."""
    wheel(folder / "other", "somering", version, "RING = 'built elsewhere'\n")
    [path] = (folder / "other").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "unpacked")
    out = folder / "somering.tar.xz"
    with tarfile.open(out, "w:xz") as archive:
        for part in (path for path in (folder / "unpacked").iterdir() if path.name != left_out):
            archive.add(part, arcname=part.name)
    return out


@pytest.mark.slow  # makes a whole environment
def test_another_build_of_a_package_is_named_and_compared_with_its_archive(
    place: InstallPlace, given: Path, tmp_path: Path
) -> None:
    archive = packed(tmp_path)
    (given / "somering-1.2-py3-none-any.whl").unlink()
    [build] = other_builds([f"somering={archive}"], "compiled at night")
    install_system(place, given=given, builds=[build], say=quiet)
    state = place.state()
    assert state is not None
    assert state.builds["somering"].startswith("1.2, another build: compiled at night (archive ")
    module = place.packages / "somering.py"
    assert module.read_text() == "RING = 'built elsewhere'\n"
    assert verify(place).problems == []
    module.write_text("RING = 'patched'\n")
    assert verify(place).problems == ["somering.py differs: it is not as it was installed"]


@pytest.mark.parametrize(
    ("words", "note", "expected"),
    [
        ("somering", "x", "is not PACKAGE=ARCHIVE"),
        ("somering=missing.tar", "x", "there is no such archive"),
        ("somering=ARCHIVE", " ", "--build needs --build-note"),
        ("otherring=ARCHIVE", "x", "has otherring absent, the pin says no such package"),
        ("somering=NEWER", "x", "has somering 1.3, the pin says 1.2; give a build of the pinned packages"),
        ("somering=pin.yaml", "x", "cannot be unpacked"),
        ("somering=PART", "x", "files of somering-1.2.dist-info are not as its RECORD lists them"),
    ],
)
def test_a_build_that_is_no_build_of_the_pin_is_refused(
    place: InstallPlace, given: Path, tmp_path: Path, words: str, note: str, expected: str
) -> None:
    for name in ("newer", "part"):
        (tmp_path / name).mkdir()
    words = words.replace("PART", str(packed(tmp_path / "part", left_out="somering.py")))
    words = words.replace("ARCHIVE", str(packed(tmp_path))).replace("NEWER", str(packed(tmp_path / "newer", "1.3")))
    words = words.replace("pin.yaml", str(place.base / "some" / "pin.yaml"))
    with pytest.raises(UsageError, match=expected):
        install_system(place, given=given, builds=other_builds([words], note), say=quiet)


def test_a_bundle_is_made_for_another_python_and_from_a_clone(place: InstallPlace, given: Path, tmp_path: Path) -> None:
    with_numpy_pinned(place, given)
    other = VERSION.replace("3.", "3.9")  # 3.911: no interpreter is that
    pin_file = place.base / "some" / "pin.yaml"
    pin_file.write_text(pin_file.read_text().replace(f"python: '{VERSION}'", f"python: '{VERSION}-{other}'"))
    index = tmp_path / "index" / "somering"
    index.mkdir(parents=True)
    name = "somering-1.2-py3-none-any.whl"
    (index / "index.html").write_text(f'<a href="file://{given}/{name}">{name}</a>')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        patch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/index")
        patch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        make_bundle(place, tmp_path / "some.tar", version=other, given=given, borrow=True)
        make_bundle(place, tmp_path / "less.tar", version=other, given=given, borrow=True, leave_out=["somering"])
        with pytest.raises(UsageError, match=r"wheels are chosen for the Python that packs them, found 2\.7"):
            make_bundle(place, tmp_path / "old.tar", version="2.7", given=given)
        with pytest.raises(UsageError, match="pins no otherring; give --without one of its packages"):
            make_bundle(place, tmp_path / "no.tar", given=given, leave_out=["otherring"])
    commit = git(given / "some-clone", "rev-parse", "HEAD")
    for archive, wheels in (("some.tar", [f"wheels/{name}"]), ("less.tar", [])):
        with tarfile.open(tmp_path / archive) as opened:
            packed, *others = sorted(member.name for member in opened if member.isfile())
        assert re.fullmatch(rf"sources/{commit}/pack-\w+\.pack", packed)
        assert others == wheels


def test_libraries_beside_torch_come_before_those_of_the_machine(place: InstallPlace) -> None:
    pin_file = place.base / "some" / "pin.yaml"
    pin = yaml.safe_load(pin_file.read_text())
    pin["current"]["preload"] = ["nvidia/a/lib/liba.so.1", "nvidia/a/lib/libb.so.2", "nvidia/absent/libc.so"]
    pin_file.write_text(yaml.safe_dump(pin))
    assert "LD_PRELOAD" not in place.environment  # nothing is there yet
    folder = place.folder / "borrowed" / "nvidia" / "a" / "lib"
    folder.mkdir(parents=True)
    for name in ("liba.so.1", "libb.so.2"):
        (folder / name).touch()
    assert place.environment["LD_PRELOAD"] == f"{folder}/liba.so.1:{folder}/libb.so.2"
    assert place.environment["LD_LIBRARY_PATH"] == str(folder)


def test_two_programs_do_not_install_into_one_place(place: InstallPlace, given: Path) -> None:
    place.folder.parent.mkdir(parents=True)
    with open(place.folder.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 7 on elsewhere")
        file.flush()
        with pytest.raises(UsageError, match="is being installed by process 7 on elsewhere; wait for it"):
            install_system(place, given=given, say=quiet)


@pytest.mark.parametrize(
    ("content", "expected"),
    [("{", "broken"), ('{"pin": 3}', "broken"), (None, "half-finished"), ("other", "outdated")],
)
def test_the_state_of_an_installation_is_told_from_its_files(
    place: InstallPlace, content: str | None, expected: str
) -> None:
    place.folder.mkdir(parents=True)
    (place.folder / "wheels").mkdir()
    if content == "other":
        state = Installation(pin="another", python="3.11.7", torch="2.13.0", cuda="")
        content = json.dumps({name: getattr(state, name) for name in ("pin", "python", "torch", "cuda")})
    if content is not None:
        (place.folder / "installed.json").write_text(content)
    condition, sentence = place.condition()
    assert condition == expected
    assert "burst setup baselines install some --flavour current" in sentence


def test_a_disk_without_room_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "there", 1)
    with pytest.raises(UsageError, match=r"MiB free, and this needs 1,099,511,627,776 MiB; make room"):
        check_space(tmp_path / "not" / "there", 1 << 40)


FITTING = Interpreter(path=Path("/p"), python="3.12.1", torch="2.11.0", cuda="13.0", borrowed={})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        (
            {"python": "3.9.2"},
            "it needs Python 3.12 and torch 2.11, found Python 3.9.2 at /p; give another with --python",
        ),
        ({"torch": ""}, "it needs Python 3.12 and torch 2.11, and /p has no torch; give --python one that has it"),
        (
            {"torch": "2.13.0"},
            "it needs Python 3.12 and torch 2.11, found torch 2.13.0 at /p; give another with --python",
        ),
        ({"cuda": ""}, "it runs on GPUs alone, and torch 2.11.0 at /p is a CPU build; give another with --python"),
        ({"cuda": "12.4"}, "it needs CUDA 13.0, found torch for CUDA 12.4 at /p; give another with --python"),
    ],
)
def test_an_interpreter_that_does_not_fit_is_refused(fields: dict[str, str], expected: str | None) -> None:
    from dataclasses import replace

    pinned = InstallPlace(system="transformer_engine", flavour="current").pinned
    assert replace(FITTING, **fields).unsupported_reason(pinned) == expected


def test_a_program_that_is_no_interpreter_is_refused() -> None:
    with pytest.raises(UsageError, match="does not answer as Python does"):
        look_at(Path("/bin/true"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["install", "megatron"], "did you mean megatron"),
        (["install", "internevo", "--flavour", "current"], "take --flavour paper"),
        (["install", "yunchang", "--anew", "--python", "/nonexistent"], "give --python the path of an interpreter"),
        (["bundle", "internevo", "--out", "x.tar", "--python", sys.executable], "needs Python 3.10, and wheels are"),
        (["bundle", "internevo", "--out", "x.tar", "--python-version", "3.10", "--from", "no"], "--from no does not"),
        (["check", "yunchan"], "did you mean yunchang?"),
    ],
)
def test_bad_usage_is_one_sentence(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["setup", "baselines", *words]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1


def test_the_list_names_each_system_with_its_licence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["setup", "baselines", "list", "--json"]) == 0
    rows = {(row["system"], row["flavour"]): row for row in json.loads(capsys.readouterr().out)}
    assert rows["megatron_lm", "paper"]["what"] == "426eb7ae0da4 of BurstEngine"
    assert rows["deepspeed", "current"]["what"] == "deepspeed 0.19.8"
    assert all(row["licence"] and row["home"] for row in rows.values())
