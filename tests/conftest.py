"""What every test shares: properties are tried on the same examples each time, and never against a clock.

A run that fails is then the change's fault, not the seed's. `--hypothesis-profile=explore` looks at new examples.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import pytest
from hypothesis import settings

from cluster.files import progress
from harness.launch import supervisor
from harness.launch.forkserver import ForkServer

# Read when torch is loaded, so it stands before every import of it. OpenMP's threads otherwise spin while they wait for
# one that has no core: on a busy machine small tensors took seven times the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what runs in its background with SIGINT ignored, which the programs of these tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_lines_by_the_clock(monkeypatch):
    """What commands say because they take long depends on how busy the machine is."""
    monkeypatch.setattr(progress, "FIRST_SECONDS", 3600.0)


settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeatable")


class _KeptServer(ForkServer):
    """A fork server that the next command of this process with the same environment gets, unless it is in use."""

    idle: ClassVar[list[ForkServer]] = []

    def close(self) -> None:
        if not self._ready or self.closed or self.ended or self.pids or self in self.idle:
            super().close()
            return
        self.idle.append(self)
        if len(self.idle) > supervisor.MAX_SERVERS:
            ForkServer.close(self.idle.pop(0))


def _server(environment: Mapping[str, str], preload: Sequence[str]) -> ForkServer:
    if preload != supervisor.ENGINE_PRELOAD:
        return ForkServer(environment, preload)
    of_pytest = {"PYTEST_CURRENT_TEST": ""}
    for server in _KeptServer.idle:
        if server.environment | of_pytest == {**environment, **of_pytest} and not server.ended:
            _KeptServer.idle.remove(server)
            return server
    return _KeptServer(environment, preload)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of token stores that is not the user's: one for all of a process's tests, whose ranks and programs have
    it too. With the same environment they share a fork server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURST_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def kept_fork_servers() -> Iterator[None]:
    """Of commands that tests run in their own process: each server takes seconds of processor time to load torch, and
    forks the ranks of every trial anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "ForkServer", _server)
        yield
    while _KeptServer.idle:
        ForkServer.close(_KeptServer.idle.pop())
