"""Which GPUs other runs of this user hold on this host: launch.rank.bind locks a file for each.

The kernel keeps such a lock for one process, the first rank of the host, and drops it when that process ends: nothing
that it has started keeps it. The folder is closed to other users, and a container may have a /tmp of its own: of runs
there the driver tells.
"""

import fcntl
import os
import struct
from collections.abc import Iterable

LOCKS = f"/tmp/hvdlaunch-{os.getuid()}"  # noqa: S108 (as in launch.rank.bind, which checks it)
FLOCK = struct.Struct("hhqqi0q")  # struct flock of fcntl.h: type, whence, start, length, pid


def held(uuids: Iterable[str]) -> dict[str, int]:
    """Those of these GPUs, by UUID, that a run holds, and the pid of its first rank here, 0 if it is not seen."""
    try:
        folder = os.open(LOCKS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return {}
    try:
        if os.fstat(folder).st_uid != os.getuid():
            return {}
        holders = {uuid: _holder(folder, f"{uuid.replace('/', '_')}.lock") for uuid in uuids}
    finally:
        os.close(folder)
    return {uuid: pid for uuid, pid in holders.items() if pid is not None}


def _holder(folder: int, name: str) -> int | None:
    """The process that has locked this file; None if none has."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return None
    try:
        lock_request = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, lock_request))
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(file)
    return None if kind == fcntl.F_UNLCK else pid
