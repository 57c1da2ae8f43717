"""The commit in a record is that of the code which ran, or says that it is not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.records.provenance import changes, commit


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "engine.py").write_text("one = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_an_unchanged_checkout_names_its_commit_whatever_the_environment_says(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert commit(checkout, {}) == commit(checkout, {"BURST_COMMIT": "another"}) == head


def test_changed_files_are_said_unless_the_environment_names_their_commit(checkout: Path) -> None:
    (checkout / "engine.py").write_text("one = 2\n")
    assert commit(checkout, {}) == git(checkout, "rev-parse", "HEAD") + "-dirty"
    assert commit(checkout, {"BURST_COMMIT": "named"}) == "named"


def test_two_changed_trees_of_one_commit_are_told_apart(checkout: Path) -> None:
    assert changes(commit(checkout, {}), checkout) == ""
    (checkout / "engine.py").write_text("one = 2\n")
    first = changes(commit(checkout, {}), checkout)
    (checkout / "engine.py").write_bytes(b"one = '\xff'\n")
    second = changes(commit(checkout, {}), checkout)
    (checkout / "engine.py").write_text("one = 2\n")
    assert len({"", first, second}) == 3
    assert changes(commit(checkout, {}), checkout) == first


OWN_METHOD = "METHOD = None\n"


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("baselines/own/__init__.py", ""),
        ("baselines/own/pin.yaml", ""),
        ("engine/fast.py", "fast.py\n"),
        ("cluster/fast.so", "*.so\n"),
        ("harness/deep/down/fast.py", "deep/\n"),
    ],
)
def test_a_file_of_the_packages_that_git_does_not_track_changes_the_tree(checkout, path, ignored):
    (checkout / ".git" / "info" / "exclude").write_text(ignored)
    assert commit(checkout, {}) == (head := git(checkout, "rev-parse", "HEAD"))
    (checkout / path).parent.mkdir(parents=True)
    (checkout / path).write_text(OWN_METHOD)
    assert commit(checkout, {}) == f"{head}-dirty"
    first = changes(commit(checkout, {}), checkout)
    (checkout / path).write_text(OWN_METHOD + "dropped = 1\n")
    assert len({"", first, changes(commit(checkout, {}), checkout)}) == 3


@pytest.mark.parametrize("how", ["repository", "link"])
def test_a_method_in_a_repository_of_its_own_or_behind_a_link_changes_the_tree(checkout, tmp_path_factory, how):
    (checkout / "baselines").mkdir()
    folder = checkout / "baselines" / "own"
    if how == "link":
        folder.symlink_to(tmp_path_factory.mktemp("elsewhere"))
    else:
        folder.mkdir()
    assert not commit(checkout, {}).endswith("-dirty")
    (folder / "__init__.py").write_text(OWN_METHOD)
    if how == "repository":
        git(folder, "init", "-q")
    assert commit(checkout, {}).endswith("-dirty")
    first = changes(commit(checkout, {}), checkout)
    (folder / "__init__.py").write_text(OWN_METHOD * 2)
    assert changes(commit(checkout, {}), checkout) != first


@pytest.mark.parametrize(
    "path", ["notes.py", "engine/__pycache__/fast.pyc", "baselines/own/upstream/theirs.py", "engine/notes.txt"]
)
def test_what_the_code_does_not_read_or_makes_itself_changes_nothing(checkout: Path, path: str) -> None:
    (checkout / path).parent.mkdir(parents=True, exist_ok=True)
    (checkout / path).write_text("one = 1\n")
    assert commit(checkout, {}) == git(checkout, "rev-parse", "HEAD")


def test_a_copy_without_history_has_the_environments_commit_or_none(tmp_path: Path) -> None:
    assert commit(tmp_path, {"BURST_COMMIT": "named"}) == "named"
    assert commit(tmp_path, {}) == ""


def test_a_folder_inside_another_repository_is_not_that_repositorys_commit(checkout: Path) -> None:
    (checkout / "copy").mkdir()
    assert commit(checkout / "copy", {}) == ""
