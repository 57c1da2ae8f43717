"""Advisory locks on open files, which the kernel drops when their holder dies; some file systems have none."""

from __future__ import annotations

import errno
import fcntl
from typing import IO, Any

# Lustre mounted without flock, NFS without its lock service, and FUSE file systems that do not implement it.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def try_lock(file: IO[Any] | int, *, shared: bool = False, wait: bool = False) -> bool | None:
    """Lock a file; returns whether it is ours now, or None where the file system has no locks.

    Without `wait` a lock that another program holds is not waited for. Raises OSError for a file system that fails.
    """
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True
