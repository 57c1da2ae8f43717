"""Host checks judged on output of df and /proc/meminfo (captured on Debian 12 unless a test says otherwise)."""

import pytest

from cluster.checks.host import host_memory
from cluster.checks.storage import disk
from cluster.inventory.site import DiskLimit, HostMemoryLimit, Site
from cluster.probing.probe import Output
from cluster.transport.reach import LocalRunner
from tests.patience import AMPLE

HEADER = "Filesystem     1024-blocks     Used Available Capacity Mounted on"
ROOT = f"path /\n{HEADER}\n/dev/vda         106052916 24358612  81677920      23% /"
MEMINFO = "MemTotal:       24689880 kB\nMemFree:        21563104 kB\nMemAvailable:   24258020 kB\nBuffers: 1 kB\n"


def row(path: str, used: int, available: int, filesystem: str = "/dev/vda") -> str:
    return f"path {path}\n{HEADER}\n{filesystem} {used + available + 5} {used} {available} 50% {path}"


def test_a_disk_with_room_is_ok() -> None:
    verdict = disk.judge(Output(text=ROOT), Site())
    assert (verdict.level, verdict.summary) == ("ok", "/ is 23% full, 78 GiB left")


@pytest.mark.parametrize(
    ("used", "available", "level"),
    [(899, 101, "ok"), (900, 100, "warn"), (949, 51, "warn"), (950, 50, "fail"), (1000, 0, "fail"), (1000, -7, "fail")],
)
def test_the_site_says_when_a_disk_is_full(used: int, available: int, level: str) -> None:
    assert disk.judge(Output(text=row("/", used, available)), Site()).level == level


def test_the_worst_of_several_paths_is_the_verdict_and_is_named() -> None:
    site = Site(disks=(DiskLimit(path="/"), DiskLimit(path="/data")))
    verdict = disk.judge(Output(text=row("/", 1, 99) + "\n" + row("/data", 97, 3)), site)
    assert verdict.level == "fail"
    assert verdict.summary.startswith("/data is 97% full")
    assert set(verdict.facts) == {"/", "/data"}


def test_an_absent_path_fails_and_is_not_confused_with_the_next_one() -> None:
    site = Site(disks=(DiskLimit(path="/data"), DiskLimit(path="/")))
    text = "path /data\ndf: /data: No such file or directory\n" + ROOT
    verdict = disk.judge(Output(text=text, exit_status=1), site)
    assert (verdict.level, verdict.summary) == ("fail", "/data is absent; mount it or correct the site file")


def test_a_stale_mount_is_unknown() -> None:
    verdict = disk.judge(Output(text="path /\ndf: /: Stale file handle", exit_status=1), Site())
    assert (verdict.level, verdict.summary) == ("unknown", "/ cannot be read (df: /: Stale file handle)")


def test_blanks_in_filesystem_names_are_no_columns() -> None:
    assert disk.judge(Output(text=row("/", 96, 4, "//nas/my share 5%")), Site()).level == "fail"


def test_a_path_with_shell_characters_is_only_a_path() -> None:
    site = Site(disks=(DiskLimit(path="/no such; echo $HOME 'here'"),))
    done = LocalRunner().run(["sh", "-c", disk.probe(site).script + " 2>&1"], deadline_seconds=AMPLE)
    verdict = disk.judge(Output(text=done.stdout, exit_status=done.exit_status), site)
    assert verdict.summary.startswith("/no such; echo $HOME 'here' is absent")


def test_memory_in_use_is_what_a_new_program_could_not_have() -> None:
    verdict = host_memory.judge(Output(text=MEMINFO), Site())
    assert (verdict.level, verdict.summary) == ("ok", "host memory 2% in use, 23 of 24 GiB available")


def test_little_memory_left_is_a_warning() -> None:
    site = Site(host_memory=HostMemoryLimit(warn_percent=1.0))
    verdict = host_memory.judge(Output(text=MEMINFO), site)
    assert (verdict.level, verdict.action) == ("warn", "monitor")


def test_memory_the_kernel_does_not_state_is_unknown() -> None:
    missing = Output(text="cat: /proc/meminfo: No such file or directory", exit_status=1)
    assert host_memory.judge(missing, Site()).level == "unknown"
