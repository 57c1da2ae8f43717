"""What every test of the engine shares: a cache of token stores that is not the user's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for all of a process's tests; ranks and programs that they start have it too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURST_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
