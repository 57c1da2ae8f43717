"""SSH (paramiko): verified host keys, keys from file or agent, jump hosts, quoted arguments, deadlines.

Host keys are compared with known_hosts. An unknown host is refused unless the caller chose to accept new ones, which
are then added to the file; a host whose key has changed is refused always (OpenSSH's `accept-new`). paramiko is
imported here and nowhere else.
"""

from __future__ import annotations

from cluster.transport.ssh.opening import SshOptions as SshOptions
from cluster.transport.ssh.opening import connector as connector
