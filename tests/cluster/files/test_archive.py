"""Archives of unknown origin: whatever their headers say is one sentence, in bounded memory, nothing outside."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.files import archive as archives
from cluster.files.archive import unpack_tar
from cluster.files.errors import UsageError
from tests.slow import slow

LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE
BLOCK = 512


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, linkname
    return info.tobuf(tarfile.GNU_FORMAT)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def pax(records: dict[str, str], kind: bytes = tarfile.XHDTYPE) -> bytes:
    body = b""
    for key, value in records.items():
        rest = f" {key}={value}\n".encode()
        length = len(rest)
        while length != len(rest) + len(str(length)):
            length = len(rest) + len(str(length))
        body += f"{length}".encode() + rest
    return header("pax", len(body), kind) + padded(body)


def sparse(records: dict[str, str], data: bytes = bytes(BLOCK)) -> bytes:
    return pax(records) + header("demo/x", len(data)) + padded(data)


def old_sparse(maps: int) -> bytes:
    """A sparse file of the old GNU format, whose map goes on in `maps` further blocks."""
    first = bytearray(header("demo/x", kind=tarfile.GNUTYPE_SPARSE))
    first[386:482] = b"00000000000\0" * 8
    first[482] = 1
    first[148:156] = b" " * 8
    first[148:155] = f"{sum(first):06o}\0".encode()
    more = (b"00000000000\0" * 42).ljust(BLOCK, b"\1")
    return bytes(first) + more * maps


def chain(count: int, kind: bytes) -> bytes:
    links = [header(f"demo/{number}", 0, kind, f"{number + 1}") for number in range(count)]
    return b"".join(links) + header(f"demo/{count}") + header("demo/0/x")


END = bytes(2 * BLOCK)
HOSTILE: dict[str, Callable[[], bytes]] = {
    "thousands of levels": lambda: pax({"path": "demo/" + "d/" * 3000 + "x"}) + header("x"),
    "levels one by one": lambda: b"".join(header("/".join(["d"] * n), kind=tarfile.DIRTYPE) for n in range(1, 49))
    + pax({"path": "d/" * 1900 + "x"}) + header("x"),
    "a chain of symbolic links": lambda: chain(2000, LINK),
    "a chain of hard links": lambda: chain(2000, HARD),
    "links to each other": lambda: header("demo/a", 0, LINK, "b") + header("demo/b", 0, LINK, "a") + header("demo/a/x"),
    "a chain of pax headers": lambda: pax({"comment": "x"}) * 3000 + header("demo/x"),
    "a chain of global headers": lambda: pax({"comment": "x"}, tarfile.XGLTYPE) * 3000 + header("demo/x"),
    "a chain of long names": lambda: (header("n", 4, tarfile.GNUTYPE_LONGNAME) + padded(b"abc\0")) * 3000 + header("x"),
    "a header of gigabytes": lambda: header("pax", 200 << 20, tarfile.XHDTYPE) + bytes(200 << 20) + header("demo/x"),
    "a long name of gigabytes": lambda: header("n", 200 << 20, tarfile.GNUTYPE_LONGNAME) + b"a" * (200 << 20),
    "a size below zero": lambda: pax({"size": "-512"}) + header("demo/x"),
    "a size beyond all disks": lambda: pax({"size": str(1 << 60)}) + header("demo/x"),
    "the old sparse format": lambda: old_sparse(3),
    "the old sparse format with a huge map": lambda: old_sparse(100_000),
    "sparse format 0.0": lambda: sparse({
        "GNU.sparse.size": "1", "GNU.sparse.numblocks": "1", "GNU.sparse.offset": "x", "GNU.sparse.numbytes": "1",
    }),
    "sparse format 0.1": lambda: sparse({"GNU.sparse.map": "0,x", "GNU.sparse.size": "9", "GNU.sparse.name": "demo/y"}),
    "sparse format 1.0": lambda: sparse(
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50)}, b"1\n0\n0\n"),
    "sparse format 1.0 without an end": lambda: sparse(
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1"}, b"9" * BLOCK),
    "half a header": lambda: header("demo/x")[:100],
}  # fmt: skip


@pytest.fixture(params=[".tar.gz", *slow(".tar")])
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    def made(name: str) -> Path:
        path = tmp_path / f"hostile{request.param}"
        content = HOSTILE[name]() + END
        if request.param == ".tar":
            path.write_bytes(content)
        else:
            import gzip

            path.write_bytes(gzip.compress(content, 1))
        return path

    return made


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_one_sentence_and_writes_nothing_outside(name, hostile, tmp_path) -> None:
    archive, folder = hostile(name), tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UsageError, match=r"cannot be unpacked: .*; give another$") as caught:
        unpack_tar(archive, folder, "give another")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert {path.name for path in tmp_path.iterdir()} == {archive.name, "folder"}


LIMITED = """
import resource, sys
from pathlib import Path
from cluster.files.archive import unpack_tar
from harness.cli import main
resource.setrlimit(resource.RLIMIT_AS, (1_500 << 20, 1_500 << 20))
archive, folder = map(Path, sys.argv[1:])
for run in (lambda: main(["verify", str(archive), "--json"]), lambda: unpack_tar(archive, folder, "give another")):
    try:
        assert run() == 2
    except ValueError as error:
        print(error, file=sys.stderr)
"""


@pytest.mark.parametrize("name", ["a header of gigabytes", "the old sparse format with a huge map"])
def test_a_small_file_takes_little_memory(name, hostile, tmp_path) -> None:
    archive, folder = hostile(name), tmp_path / "folder"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(archive), str(folder)], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (0, 2), done.stderr


def test_an_archive_larger_than_the_room_there_is_is_refused(tmp_path, monkeypatch) -> None:
    path, folder = tmp_path / "bomb.tar.gz", tmp_path / "folder"
    folder.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        for number in range(4):
            info = tarfile.TarInfo(f"demo/{number}")
            info.size = 1 << 20
            tar.addfile(info, io.BytesIO(bytes(1 << 20)))
    assert path.stat().st_size < 10_000
    usage = archives.shutil.disk_usage(folder)._replace(free=2 << 20)
    monkeypatch.setattr(archives.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match="more than the file system has room for"):
        unpack_tar(path, folder, "give another")
    assert sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()) <= 2 << 20


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", ""])
def test_links_and_modes_of_an_honest_archive_are_kept(kind, tmp_path) -> None:
    source, folder = tmp_path / "demo", tmp_path / "folder"
    (source / "deep").mkdir(parents=True)
    folder.mkdir()
    (source / "deep" / "run.sh").write_text("#!/bin/sh\n")
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("deep/run.sh")
    (source / "same").hardlink_to(source / "deep" / "run.sh")
    with tarfile.open(tmp_path / "x.tar", f"w:{kind}") as tar:
        tar.add(source, "demo")
    unpack_tar(tmp_path / "x.tar", folder, "give another")
    assert (folder / "demo" / "link").read_text() == (folder / "demo" / "same").read_text() == "#!/bin/sh\n"
    assert (folder / "demo" / "deep" / "run.sh").stat().st_mode & 0o111


def of_members(*members: bytes) -> bytes:
    return b"".join(members) + bytes(2 * BLOCK)


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="Python before 3.11.4: the other way alone is here")
def test_without_the_librarys_filter_the_same_lies_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Debian 12, whose Python 3.11.2 has no filter."""
    whole = of_members(
        header("demo", kind=tarfile.DIRTYPE),
        header("demo/a", 3) + padded(b"one"),
        header("demo/b/c", 3) + padded(b"two"),
    )
    (tmp_path / "whole.tar").write_bytes(whole)
    found = []
    for name in ("by the library", "here"):
        folder = tmp_path / name
        folder.mkdir()
        unpack_tar(tmp_path / "whole.tar", folder, "give another one")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        found.append([
            (str(path.relative_to(folder)), path.read_bytes(), path.stat().st_mode, path.stat().st_mtime)
            for path in files
        ])  # fmt: skip
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    assert found[0] == found[1]
    assert [name for name, *_ in found[0]] == ["demo/a", "demo/b/c"]


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (header("../out", 3) + padded(b"one"), "would be extracted to"),
        (header("demo/../../out", 3) + padded(b"one"), "would be extracted to"),
        (header("l", 0, LINK, "/etc"), "would link to '/etc', outside"),
        (header("l", 0, LINK, "../out"), "would link to"),
        (header("l", 0, HARD, "../out"), "would link to"),
        (header("p", 0, tarfile.FIFOTYPE), "is a special file"),
    ],
)
def test_without_the_librarys_filter_nothing_comes_to_lie_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: bytes, words: str
) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    (tmp_path / "bad.tar").write_bytes(of_members(member))
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UsageError, match=words):
        unpack_tar(tmp_path / "bad.tar", folder, "give another one")
    assert not any(folder.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar", "folder"]
