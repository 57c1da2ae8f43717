"""Pins are exact and strict, and what is fetched is what they say: tried on a real repository on this machine."""

import subprocess
from dataclasses import replace

import pytest

from baselines.checkout import check_out, main, prepare
from baselines.pin import Checkout, Flavour, load_pin, pinned_systems
from cluster.files.errors import UsageError

PIN = """\
system: Some
licence: MIT
paper:
  checkout: {repository: https://example.invalid/x, commit: C, subtree: a/b, tree: T}
  python: "3.10"
  torch: "2.4"
  cuda: "12.5"
"""
VALID = PIN.replace("C,", "ab" * 20 + ",").replace("T}", "cd" * 20 + "}")


def git(folder, *arguments):
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.invalid", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def origin(tmp_path):
    """A repository with two commits; the pinned one is not its newest."""
    folder = tmp_path / "origin"
    (folder / "systems" / "one").mkdir(parents=True)
    git(tmp_path, "init", "--quiet", str(folder))
    (folder / "systems" / "one" / "train.py").write_text("print('one')\n")
    (folder / "systems" / "one" / "kept.txt").write_text("left out of archives\n")
    (folder / "systems" / "one" / ".gitattributes").write_text("kept.txt export-ignore\n")
    (folder / "outside.txt").write_text("not asked for\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    commit = git(folder, "rev-parse", "HEAD")
    (folder / "systems" / "one" / "train.py").write_text("print('changed')\n")
    git(folder, "commit", "--quiet", "-a", "-m", "second")
    return Checkout(
        repository=f"file://{folder}",
        commit=commit,
        subtree="systems/one",
        tree=git(folder, "rev-parse", f"{commit}:systems/one"),
    )


@pytest.mark.parametrize("system", pinned_systems())
def test_every_pin_is_valid_and_names_its_licence(system):
    pin = load_pin(system)
    assert pin.licence
    assert pin.paper is not None
    assert pin.paper.checkout is not None
    assert pin.paper.checkout.commit.startswith("426eb7a")


def test_pins_are_there_for_the_systems_of_the_paper():
    assert pinned_systems() == ["internevo", "megatron_deepspeed", "megatron_lm"]


def test_exactly_the_pinned_folder_arrives_as_it_was_then(origin, tmp_path):
    into = tmp_path / "new" / "source"
    check_out(origin, into)
    assert sorted(path.name for path in into.iterdir()) == [".gitattributes", "kept.txt", "train.py"]
    assert (into / "train.py").read_text() == "print('one')\n"
    assert [path.name for path in into.parent.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tree": "0" * 40}, "correct the pin"),
        ({"commit": "0" * 40}, "git fetch failed"),
        ({"subtree": "systems/two"}, "git rev-parse failed"),
        ({"repository": "file:///nonexistent/repository"}, "check the network, or fetch it elsewhere"),
    ],
)
def test_what_is_not_as_pinned_is_refused_and_leaves_nothing(origin, tmp_path, fields, expected):
    flavour = Flavour(python="3.12", torch="2.11", cuda="13.0", checkout=replace(origin, **fields))
    with pytest.raises(UsageError, match=expected):
        prepare(flavour, tmp_path / "into")
    assert [path.name for path in tmp_path.iterdir()] == ["origin"]


def test_packages_become_requirements(tmp_path):
    flavour = Flavour(python="3.12", torch="2.11", cuda="13.0", packages=("torch==2.11.0", "deepspeed==0.19.8"))
    prepare(flavour, tmp_path / "into")
    assert (tmp_path / "into" / "requirements.txt").read_text() == "torch==2.11.0\ndeepspeed==0.19.8\n"
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["requirements.txt"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("licence: MIT\n", ""), "lacks licence"),
        (("licence:", "license:"), "did you mean licence"),
        (("https://", "git@"), "expected an https address"),
        (("ab" * 20, "main"), "expected all 40 hexadecimal digits"),
        (("a/b", "../b"), "expected a folder below the repository"),
        (('python: "3.10"', "python: three"), "expected a version such as '3.12'"),
        (('cuda: "12.5"\n', 'cuda: "12.5"\n  packages: [torch>=2]\n'), "expected name==version"),
        (("  checkout:", "  #"), "neither checkout nor packages"),
    ],
)
def test_a_pin_that_is_not_exact_is_refused_with_its_line(tmp_path, change, expected):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "pin.yaml").write_text(VALID)
    assert load_pin("some", tmp_path).system == "Some"
    (tmp_path / "some" / "pin.yaml").write_text(VALID.replace(*change))
    with pytest.raises(UsageError, match=expected) as error:
        load_pin("some", tmp_path)
    assert "pin.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["megatron", "--into", "x"], "did you mean megatron_lm?"),
        (["internevo", "--flavour", "current", "--into", "x"], "take --flavour paper"),
    ],
)
def test_the_program_answers_bad_usage_with_one_sentence(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
