"""A folder on one host of a cluster, read and written through that host's supervisor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from harness.launch.nodes.team import Member

PIECE_BYTES = 16 * 2**20  # of one call: in the memory of both hosts at that time


class HostFolder:
    """See `harness.launch.launcher.Folder`. Every method raises HostLost."""

    def __init__(self, member: Member, path: str, *, first: bool) -> None:
        self._member = member
        self.host = member.name
        self.path = path
        self.first = first

    def files(self) -> dict[str, int]:
        return cast(dict[str, int], self._member.call("files", self.path))

    def read(self, name: str) -> Iterator[bytes]:
        first = 0
        while True:
            piece = cast(bytes | None, self._member.call("read", f"{self.path}/{name}", first, PIECE_BYTES))
            if piece is None:
                raise FileNotFoundError(f"{name} is gone from {self.host}")
            yield piece
            first += len(piece)
            if len(piece) < PIECE_BYTES:
                return

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        first = 0
        for piece in pieces:
            self._member.call("write", f"{self.path}/{name}", first, piece)
            first += len(piece)

    def remove(self) -> None:
        self._member.call("remove", self.path)
