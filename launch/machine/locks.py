"""Which GPUs other runs of this user hold on this host: launch.rank.bind keeps a locked file for each.

The folder is closed to other users, and a container may have a /tmp of its own: of runs there the driver tells.
"""

import fcntl
import os
from collections.abc import Iterable

LOCKS = f"/tmp/hvdlaunch-{os.getuid()}"  # noqa: S108 (as in launch.rank.bind, which checks it)


def held(uuids: Iterable[str]) -> frozenset[str]:
    """Those of these GPUs, by UUID, that a run holds."""
    try:
        folder = os.open(LOCKS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return frozenset()
    try:
        if os.fstat(folder).st_uid != os.getuid():
            return frozenset()
        return frozenset(uuid for uuid in uuids if _is_locked(folder, f"{uuid.replace('/', '_')}.lock"))
    finally:
        os.close(folder)


def _is_locked(folder: int, name: str) -> bool:
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until it is closed, at once
    except OSError as error:
        return isinstance(error, BlockingIOError)  # else a file system without locks
    finally:
        os.close(file)
    return False
