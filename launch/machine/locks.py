"""The GPUs that other runs of this user hold on this host: launch.rank.bind locks a file for each.

The kernel keeps such a lock for one process, the first rank of the host, and drops it when that process ends; child
processes do not keep it. The folder is closed to other users, and a container may have a private /tmp: for runs that
cannot be seen here, only the driver reports use of a GPU.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator

LOCKS = f"/tmp/hvdlaunch-{os.getuid()}"  # noqa: S108 (as in launch.rank.bind, which checks it)
FLOCK = struct.Struct("hhqqi0q")  # struct flock of fcntl.h: type, whence, start, length, pid


def held(uuids: Iterable[str]) -> dict[str, int]:
    """Return the GPUs held by a run, by UUID, with the pid of its first rank on this host, 0 if it is hidden."""
    with contextlib.suppress(OSError), _opened(LOCKS, os.O_RDONLY | os.O_DIRECTORY) as folder:
        if os.fstat(folder).st_uid == os.getuid():
            holders = {uuid: _holder(folder, f"{uuid.replace('/', '_')}.lock") for uuid in uuids}
            return {uuid: pid for uuid, pid in holders.items() if pid is not None}
    return {}


def _holder(folder: int, name: str) -> int | None:
    """Return the process that has locked this file; None if it is not locked, or on a file system without locks."""
    with contextlib.suppress(OSError), _opened(name, os.O_RDONLY, folder) as file:
        lock_request = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, lock_request))
        return None if kind == fcntl.F_UNLCK else pid
    return None


@contextlib.contextmanager
def _opened(name: str, flags: int, folder: int | None = None) -> Iterator[int]:
    number = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    try:
        yield number
    finally:
        os.close(number)
