"""Images over real SSH connections, from a docker that keeps files to dockers that keep files."""

import hashlib
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.images.archive import save
from cluster.images.delivery import Target, collect, look
from cluster.images.engine import ImageFailed, find_image
from cluster.images.push import Way, push
from cluster.images.sending import send
from cluster.inventory.hosts import parse_hosts
from cluster.transport.reach import LocalRunner
from cluster.transport.ssh import SshOptions, connector
from cluster.transport.transfer import TransferFailed
from tests.cluster.fake_docker import layers
from tests.patience import AMPLE

NAME = "lab/burst:1"
LAYERS = layers(6_000_000)


class Watching:
    """Keeps what a push tells; `at_progress` may do something to the transfer."""

    def __init__(self):
        self.stages = []
        self.seen = []
        self.at_progress = None

    def stage(self, node, stage):
        self.stages.append((node, stage))

    def progress(self, node, done_bytes, all_bytes):
        self.seen.append((node, done_bytes, all_bytes))
        if self.at_progress:
            self.at_progress(done_bytes)


@pytest.fixture
def here(docker):
    docker.add(NAME, 1, LAYERS)
    return docker


@pytest.fixture
def lab(servers, here, tmp_path):
    return Lab(servers, here, tmp_path)


class Lab:
    """Two nodes with empty engines, and the way there."""

    def __init__(self, servers, here, tmp_path):
        self.here = here
        self.engines = [docker for _, docker in servers]
        for docker in self.engines:
            docker.empty()
        self.stage = tmp_path / "stage"
        self.archives = tmp_path / "archives"
        self.targets, connects = [], {}
        for number, (server, _) in enumerate(servers, start=1):
            (host,) = parse_hosts(server.target())
            host = host.with_defaults(user=None, port=None, key=server.key)
            connects[host] = connector(SshOptions(known_hosts=server.known_hosts))
            self.targets.append(
                Target(name=f"node{number}", host=host, image=NAME, engine="docker", folder=str(self.stage))
            )
        self.connect = lambda host, seconds: connects[host](host, seconds)
        self.watch = Watching()

    def image(self):
        return find_image(LocalRunner(), "docker", NAME, 30)

    def push(self, targets=None, connect=None, **changes):
        way = {"shared": False, "keep": False, "at_once": 8, "seconds": 60.0, **changes}
        return push(
            targets or self.targets,
            {("docker", NAME): self.image()},
            Way(
                connect=connect or self.connect,
                archives=self.archives,
                watch=self.watch,
                on_saved=lambda image, size: None,
                **way,
            ),
        )

    def archive(self):
        return save(self.image(), self.archives, lambda size: None)


def states(outcomes):
    return {outcome.node: outcome.state for outcome in outcomes}


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_an_image_arrives_on_all_nodes_and_nothing_else_stays(lab):
    outcomes = lab.push()
    assert states(outcomes) == {"node1": "loaded", "node2": "loaded"}
    assert [docker.holds(NAME) for docker in lab.engines] == [lab.here.holds(NAME)] * 2
    assert all(outcome.sent_bytes > len(LAYERS) * 0.9 for outcome in outcomes)
    assert (left_in(lab.stage), left_in(lab.archives)) == ([], [])
    assert {stage for _, stage in lab.watch.stages} == {"asking", "sending", "loading"}
    assert lab.watch.seen[-1][1] == lab.watch.seen[-1][2]


def test_a_node_that_has_the_image_is_skipped(lab):
    lab.engines[0].add(NAME, 1, LAYERS)
    outcomes = lab.push()
    assert states(outcomes) == {"node1": "present", "node2": "loaded"}
    assert lab.engines[0].calls("image load") == 0
    assert states(lab.push()) == {"node1": "present", "node2": "present"}
    assert lab.here.calls("image save") == 1


def test_another_image_of_that_name_is_replaced(lab):
    lab.engines[0].add(NAME, 2, b"older")
    assert states(lab.push(lab.targets[:1])) == {"node1": "loaded"}
    assert lab.engines[0].holds(NAME) == lab.here.holds(NAME)


def test_an_engine_that_counts_ids_differently_is_said_to_have_the_same_content(lab):
    lab.engines[0].behave("id_prefix", "abcd")
    (outcome,) = lab.push(lab.targets[:1])
    assert outcome.state == "loaded"
    assert "the same content" in outcome.finding
    assert states(lab.push(lab.targets[:1])) == {"node1": "present"}


def test_a_docker_that_has_something_else_after_loading_fails_that_node_alone(lab):
    lab.engines[0].behave("damage", NAME.replace("/", "_"))
    outcomes = lab.push()
    assert states(outcomes) == {"node1": "failed", "node2": "loaded"}
    assert "docker has sha256:e00000000000 as lab/burst:1, expected sha256:000000000000" in outcomes[0].finding
    assert len(left_in(lab.archives)) == 1  # for the next push


def test_what_arrived_before_a_load_failed_is_not_sent_again(lab):
    lab.engines[0].behave("refuse")
    (failed,) = lab.push(lab.targets[:1])
    assert failed.state == "failed"
    assert "docker did not load it (no space left on device)" in failed.finding
    assert len(left_in(lab.stage)) == 1
    lab.engines[0].behave_again("refuse")
    (loaded,) = lab.push(lab.targets[:1])
    assert (loaded.state, loaded.sent_bytes) == ("loaded", 0)
    assert left_in(lab.stage) == []
    assert lab.here.calls("image save") == 1  # the archive here was kept, too


def test_a_connection_that_breaks_is_made_again_and_the_transfer_goes_on(lab):
    open_transports = []

    @contextmanager
    def breakable(host, seconds):
        with lab.connect(host, seconds) as runner:
            open_transports.append(runner._transport)
            yield runner

    def cut(done_bytes):
        if done_bytes > 3_000_000:
            lab.watch.at_progress = None
            open_transports[-1].close()

    lab.watch.at_progress = cut
    (outcome,) = lab.push(lab.targets[:1], connect=breakable)
    assert outcome.state == "loaded", outcome.finding
    assert "took 2 attempts" in outcome.finding
    assert 0 < outcome.sent_bytes < 6_000_000 - 100_000  # the second attempt did not begin at the beginning
    assert lab.engines[0].holds(NAME) == lab.here.holds(NAME)
    assert left_in(lab.stage) == []


def test_a_part_is_gone_on_with(lab):
    archive = lab.archive()
    content = archive.path.read_bytes()
    remote = lab.stage / archive.file_name
    lab.stage.mkdir()
    Path(f"{remote}.part").write_bytes(content[:4_000_000])
    with lab.connect(lab.targets[0].host, 30) as runner:
        sent = send(runner, archive, str(remote), ends_at=_soon(), on_progress=lambda *at: None)
    assert sent == len(content) - 4_000_000
    assert remote.read_bytes() == content
    assert left_in(lab.stage) == [archive.file_name]


@pytest.mark.parametrize("part", [b"something else", b"x" * 7_000_000], ids=["short", "too long"])
def test_a_part_that_begins_otherwise_is_written_anew(lab, part):
    archive = lab.archive()
    remote = lab.stage / "it's a name"
    lab.stage.mkdir()
    Path(f"{remote}.part").write_bytes(part)
    with lab.connect(lab.targets[0].host, 30) as runner:
        assert send(runner, archive, str(remote), ends_at=_soon(), on_progress=lambda *at: None) == archive.size_bytes
    assert hashlib.sha256(remote.read_bytes()).hexdigest() == archive.sha256


def test_what_is_damaged_on_the_way_is_dropped_and_sent_again(lab):
    class Damaging:
        """A host on which the first file that is written has one byte too many."""

        def __init__(self, runner):
            self.runner, self.damaged = runner, 0

        def run(self, command, **options):
            if 'cat > "$1"' in command[4] and not self.damaged:
                self.damaged += 1
                command = [*command[:4], command[4].replace("cat >", "(cat; echo) >"), *command[5:]]
            return self.runner.run(command, **options)

    archive = lab.archive()
    remote = str(lab.stage / "file")
    lab.stage.mkdir()
    with lab.connect(lab.targets[0].host, 30) as runner:
        damaging = Damaging(runner)
        with pytest.raises(TransferFailed, match="arrived with the checksum"):
            send(damaging, archive, remote, ends_at=_soon(), on_progress=lambda *at: None)
        assert damaging.damaged == 1
        assert left_in(lab.stage) == []
        send(damaging, archive, remote, ends_at=_soon(), on_progress=lambda *at: None)
    assert left_in(lab.stage) == ["file"]


def test_over_shared_storage_one_copy_is_written_and_all_nodes_load_it(lab):
    outcomes = lab.push(shared=True)
    assert states(outcomes) == {"node1": "loaded", "node2": "loaded"}
    assert [bool(outcome.sent_bytes) for outcome in outcomes] == [True, False]
    assert [docker.holds(NAME) for docker in lab.engines] == [lab.here.holds(NAME)] * 2
    assert left_in(lab.stage) == []


def test_the_shared_copy_stays_while_a_node_needs_it_or_with_keep(lab):
    lab.engines[1].behave("refuse")
    assert states(lab.push(shared=True)) == {"node1": "loaded", "node2": "failed"}
    assert len(left_in(lab.stage)) == 1
    lab.engines[1].behave_again("refuse")
    outcomes = lab.push(shared=True, keep=True)
    assert states(outcomes) == {"node1": "present", "node2": "loaded"}
    assert [outcome.sent_bytes for outcome in outcomes] == [0, 0]
    assert (len(left_in(lab.stage)), len(left_in(lab.archives))) == (1, 1)


def test_a_node_that_does_not_see_the_shared_copy_says_so(lab):
    with pytest.raises(ImageFailed, match="cannot be read on this node; look whether that folder is mounted there"):
        collect(lab.targets[0], lab.archive(), lab.connect, AMPLE, lab.watch)


def test_a_shared_folder_that_no_node_can_write_fails_every_node_with_its_reason(lab, tmp_path):
    (tmp_path / "stage").write_text("a file where the folder should be")
    outcomes = lab.push(shared=True)
    assert states(outcomes) == {"node1": "failed", "node2": "failed"}
    assert all("there is no place for the archive" in outcome.finding for outcome in outcomes)


def test_a_node_that_is_down_fails_alone(lab):
    (away,) = parse_hosts("root@127.0.0.1:1")
    down = Target(name="down", host=away, image=NAME, engine="docker", folder=str(lab.stage))
    down_connect = connector(SshOptions(known_hosts=lab.stage / "absent"))

    def connect(host, seconds):
        return down_connect(host, seconds) if host == away else lab.connect(host, seconds)

    outcomes = lab.push([down, lab.targets[1]], connect=connect)
    assert states(outcomes) == {"down": "failed", "node2": "loaded"}


def test_a_node_without_docker_says_so(sshd, lab):
    (host,) = parse_hosts(sshd.target())
    host = host.with_defaults(user=None, port=None, key=sshd.key)
    bare = Target(name="bare", host=host, image=NAME, engine="docker", folder=None)

    @contextmanager
    def without_path(host, seconds):
        with connector(SshOptions(known_hosts=sshd.known_hosts))(host, seconds) as runner:
            yield WithoutDocker(runner)

    class WithoutDocker:
        def __init__(self, runner):
            self.runner = runner

        def run(self, command, **options):
            return self.runner.run(["env", "PATH=/nonexistent", "/usr/bin/env", *command[1:]], **options)

    with pytest.raises(ImageFailed, match="docker is not found on the PATH"):
        look(bare, without_path, AMPLE, lab.watch)


def _soon() -> float:
    return time.monotonic() + AMPLE
