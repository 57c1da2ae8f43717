"""Pins are exact and strict, and what is fetched is what they say: tried on a real repository on this machine."""

import os
import subprocess
import zlib
from dataclasses import replace

import pytest

from baselines.checkout import compared, main, pack, prepare, write_source
from baselines.pin import Checkout, Flavour, Submodule, allows, load_pin, pinned_systems
from cluster.files.errors import UsageError

PIN = """\
system: Some
licence: MIT
home: https://example.invalid/x
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
    assert pin.home.startswith("https://")
    if pin.paper is not None:
        assert pin.paper.checkout is not None
        assert pin.paper.checkout.commit.startswith("426eb7a")
    for name in pin.flavours:
        flavour = pin.flavour(name)
        names = {package.partition("==")[0] for package in {**flavour.packages, **flavour.build}}
        assert not names & {"torch", "triton", "numpy"}, "they come from the interpreter that has torch"


def test_pins_are_there_for_the_systems_of_the_paper_and_for_those_users_know():
    of_the_paper = {"burst_attention", "burst_engine", "internevo", "loongtrain", "megatron_deepspeed", "megatron_lm"}
    others = {
        "deepspeed", "megatron_core", "ring_flash_attn", "torchtitan", "transformer_engine", "transformers", "trl",
        "yunchang",
    }  # fmt: skip
    assert set(pinned_systems()) == of_the_paper | others
    assert {name for name in pinned_systems() if load_pin(name).paper} == of_the_paper


def test_a_pin_has_another_digest_once_anything_in_it_changes():
    pinned = load_pin("yunchang").flavour("current")
    assert replace(pinned, torch="2.11").digest != pinned.digest == replace(pinned).digest


@pytest.mark.parametrize(
    ("versions", "found", "fits"),
    [
        ("3.11-3.13", "3.11.7", True), ("3.11-3.13", "3.9.18", False), ("2.11", "2.11.0+cu130", True),
        ("2.9-2.13", "2.10.1", True), ("2.11", "", False), ("12.6-13.0", "13.1", False),
    ],
)  # fmt: skip
def test_versions_are_compared_as_numbers(versions, found, fits):
    assert allows(versions, found) == fits


def test_exactly_the_pinned_folder_arrives_as_it_was_then(origin, tmp_path):
    write_source(origin, tmp_path / "new")
    into = tmp_path / "new" / "source"
    assert sorted(path.name for path in into.iterdir()) == [".gitattributes", "kept.txt", "train.py"]
    assert (into / "train.py").read_text() == "print('one')\n"
    assert sorted(path.name for path in into.parent.iterdir()) == ["source", "source.git"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tree": "0" * 40}, "correct the pin"),
        ({"commit": "0" * 40}, "git fetch failed"),
        ({"subtree": "systems/two"}, "git read-tree failed"),
        ({"repository": "file:///nonexistent/repository"}, "check the network, or give --from a folder"),
    ],
)
def test_what_is_not_as_pinned_is_refused_and_leaves_nothing(origin, tmp_path, fields, expected):
    flavour = Flavour(python="3.12", torch="2.11", cuda="13.0", checkout=replace(origin, **fields))
    with pytest.raises(UsageError, match=expected):
        prepare(flavour, tmp_path / "into")
    assert [path.name for path in tmp_path.iterdir()] == ["origin"]


def test_packages_become_requirements(tmp_path):
    one, two = "1" * 64, "2" * 64
    packages = {"deepspeed==0.19.8": one, "msgpack==1.2.4": f"{one} {two}"}
    flavour = Flavour(python="3.12", torch="2.11-2.13", cuda="13.0", packages=packages, build={"wheel==0.48.0": two})
    prepare(flavour, tmp_path / "into")
    assert {path.name: path.read_text() for path in (tmp_path / "into").iterdir()} == {
        "requirements.txt": f"deepspeed==0.19.8 --hash=sha256:{one}\n"
        f"msgpack==1.2.4 --hash=sha256:{one} --hash=sha256:{two}\n",
        "build.txt": f"wheel==0.48.0 --hash=sha256:{two}\n",
        "torch.txt": "torch>=2.11,<2.14\n",
    }
    prepare(replace(flavour, provided=("numpy", "rich")), tmp_path / "beside")
    assert (tmp_path / "beside" / "torch.txt").read_text() == "torch>=2.11,<2.14\nnumpy\n"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("licence: MIT\n", ""), "lacks licence"),
        (("licence:", "license:"), "did you mean licence"),
        (("https://", "git@"), "expected an https address"),
        (("ab" * 20, "main"), "expected all 40 hexadecimal digits"),
        (("a/b", "../b"), "expected a folder below the repository"),
        (('python: "3.10"', "python: three"), "expected a version such as '3.12'"),
        (('cuda: "12.5"\n', 'cuda: "12.5"\n  packages: {torch>=2: x}\n'), "expected name==version"),
        (('cuda: "12.5"\n', 'cuda: "12.5"\n  packages: {a==2: abc}\n'), "expected SHA-256"),
        (('cuda: "12.5"\n', 'cuda: "12.5"\n  devices: [tpu]\n'), "expected cpu or cuda"),
        (('cuda: "12.5"\n', 'cuda: "12.5"\n  environment: {a-b: x}\n'), "expected a variable"),
        (('cuda: "12.5"\n', 'cuda: "12.5"\n  disk_mib: 0\n'), "expected at least 1"),
        (('cuda: "12.5"\n', 'cuda: "12.5"\n  folders: [../x]\n'), "expected a folder below"),
        ((", subtree: ", ", without: ['a*'], subtree: "), "expected a folder below the repository"),
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


@pytest.fixture
def nested(tmp_path):
    """A pin of a whole repository with a submodule inside, and a folder that is left out."""
    inner = tmp_path / "inner"
    git(tmp_path, "init", "--quiet", str(inner))
    (inner / "ring.py").write_text("ring = 1\n")
    git(inner, "add", ".")
    git(inner, "commit", "--quiet", "-m", "inner")
    commit = git(inner, "rev-parse", "HEAD")
    outer = tmp_path / "outer"
    git(tmp_path, "init", "--quiet", str(outer))
    for path in ("train.py", "data/large.bin", "tools/run.sh"):
        (outer / path).parent.mkdir(parents=True, exist_ok=True)
        (outer / path).write_text(f"{path}\n")
    (outer / "tools" / "run.sh").chmod(0o755)
    (outer / "link").symlink_to("train.py")
    git(outer, "add", ".")
    (outer / ".gitattributes").write_text("*.py text eol=crlf\n")
    git(outer, "add", ".gitattributes")
    git(outer, "update-index", "--add", "--cacheinfo", f"160000,{commit},parts/inner")
    git(outer, "update-index", "--add", "--cacheinfo", f"160000,{'12' * 20},parts/other")
    git(outer, "commit", "--quiet", "-m", "outer")
    return Checkout(
        repository=f"file://{outer}",
        commit=git(outer, "rev-parse", "HEAD"),
        tree=git(outer, "rev-parse", "HEAD^{tree}"),
        submodules=(Submodule(path="parts/inner", repository=f"file://{inner}", commit=commit),),
        without=("data",),
    )


def test_submodules_arrive_and_what_is_left_out_does_not(nested, tmp_path):
    write_source(nested, tmp_path / "into")
    source = tmp_path / "into" / "source"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_symlink() or path.is_file()}
    assert files == {".gitattributes", "link", "train.py", "tools/run.sh", "parts/inner/ring.py"}
    assert os.access(source / "tools" / "run.sh", os.X_OK)
    assert (source / "train.py").read_bytes() == b"train.py\n"  # as committed, whatever the attributes ask for
    assert compared(nested, tmp_path / "into") == []


@pytest.mark.parametrize(
    ("path", "content", "expected"),
    [
        ("source/train.py", "changed", ["train.py differs"]),
        ("source/parts/inner/ring.py", "changed", ["parts/inner/ring.py differs"]),
        ("source/added.py", "x = 1", ["added.py is not part of the commit"]),
        ("source/train.py", None, ["train.py is missing"]),
        ("source/link", None, ["link is missing"]),
        ("source/tools/run.sh", "tools/run.sh\n", ["tools/run.sh differs"]),  # it is a program no more
        ("source/__pycache__/train.cpython-311.pyc", "bytes", []),
    ],
)
def test_a_changed_source_is_found(nested, tmp_path, path, content, expected):
    write_source(nested, tmp_path / "into")
    changed = tmp_path / "into" / path
    changed.unlink(missing_ok=True)
    if content is not None:
        changed.parent.mkdir(exist_ok=True)
        changed.write_text(content)
    assert compared(nested, tmp_path / "into") == expected


def test_a_changed_file_is_found_whatever_its_time_and_size(nested, tmp_path):
    write_source(nested, tmp_path / "into")
    path = tmp_path / "into" / "source" / "train.py"
    before = path.stat()
    path.write_text("TRAIN.PY\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert compared(nested, tmp_path / "into") == ["train.py differs"]


def test_a_repository_that_was_changed_with_its_file_is_found(nested, tmp_path):
    """git takes an object by its name alone, unless it is asked to look: here the folder names the changed file."""
    write_source(nested, tmp_path / "into")
    (tmp_path / "into" / "source" / "train.py").write_text("changed")
    repository = tmp_path / "into" / "source.git" / "0"
    for packed in (*repository.glob("objects/pack/*.pack"),):
        content = packed.read_bytes()
        for path in packed.parent.glob(f"{packed.stem}.*"):
            path.unlink()
        subprocess.run(["git", "unpack-objects", "-q"], cwd=repository, input=content, check=True)
    before = git(repository, "rev-parse", f"{nested.tree}:train.py")
    after = git(repository, "hash-object", "-w", str(tmp_path / "into" / "source" / "train.py"))
    loose = repository / "objects" / nested.tree[:2] / nested.tree[2:]
    forged = zlib.decompress(loose.read_bytes()).replace(bytes.fromhex(before), bytes.fromhex(after))
    loose.chmod(0o644)
    loose.write_bytes(zlib.compress(forged))
    [found] = compared(nested, tmp_path / "into")
    assert found.startswith("it cannot be compared with the pin (git ")
    assert "mismatch" in found


def test_packs_give_the_same_source_without_a_network(nested, tmp_path):
    (tmp_path / "bundle").mkdir()
    pack(nested, tmp_path / "bundle")
    commits = {nested.commit, nested.submodules[0].commit}
    assert {path.name for path in (tmp_path / "bundle" / "sources").iterdir()} == commits
    gone = replace(nested, repository="file:///nonexistent/repository")
    gone = replace(gone, submodules=(replace(nested.submodules[0], repository=gone.repository),))
    write_source(gone, tmp_path / "into", tmp_path / "bundle")
    assert compared(nested, tmp_path / "into") == []
    assert not (tmp_path / "into" / "source" / "data").exists()
    [packed] = (tmp_path / "bundle" / "sources" / nested.commit).glob("*.pack")
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 0xFF
    packed.chmod(0o644)
    packed.write_bytes(content)
    with pytest.raises(UsageError, match=r"git index-pack failed .*pack the bundle again"):
        write_source(gone, tmp_path / "other", tmp_path / "bundle")
    assert list((tmp_path / "other").iterdir()) == []


def test_a_submodule_that_the_commit_does_not_name_is_refused(nested, tmp_path):
    other = replace(nested.submodules[0], commit="ab" * 20)
    with pytest.raises(UsageError, match="the pin says abababababab; correct the pin"):
        write_source(replace(nested, submodules=(other,)), tmp_path / "into")
    assert not (tmp_path / "into" / "source").exists()


def test_a_source_that_is_there_and_right_is_not_fetched_again(nested, tmp_path):
    write_source(nested, tmp_path / "into")
    gone = replace(nested, repository="file:///nonexistent/repository")
    write_source(gone, tmp_path / "into")
    (tmp_path / "into" / "source" / "train.py").write_text("changed")
    with pytest.raises(UsageError, match="git fetch failed"):
        write_source(gone, tmp_path / "into")
