"""How the nodes of a site are reached when an inventory or a target says nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.inventory.hosts import parse_jump


@dataclass(frozen=True, kw_only=True, slots=True)
class SshDefaults:
    """What hosts that say nothing else are reached with."""

    user: str | None = None
    port: int | None = None
    key: Path | None = None  # private key file; `~` is the home directory
    jump: str | None = None  # a host to go through, as [user@]host[:port]; several, separated by commas, in this order
    jump_key: Path | None = None  # private key for the jump hosts; null: the same as `key`

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port < 65536:
            raise ValueError(f"ssh.port is {self.port}; expected a number from 1 to 65535")
        if self.jump is not None:
            parse_jump(self.jump, None)  # raises what is wrong with it
