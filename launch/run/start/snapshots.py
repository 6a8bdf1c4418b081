"""Memory of this process for the newest states of a run: it survives the ranks, and is gone with this process."""

import os
from types import TracebackType

from launch.run.start.plan import Plan


class Snapshots:
    """A file without a name that ranks on this host open through /proc; without memory files there is none."""

    def __init__(self) -> None:
        name = f"hvdlaunch-{os.urandom(16).hex()}"
        try:
            self._file = os.memfd_create(name)
            self.place = f"{os.getpid()} {self._file} {name}"  # for the ranks
        except OSError:
            self._file, self.place = -1, ""

    def __enter__(self) -> "Snapshots":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.place:
            os.close(self._file)

    @property
    def is_used(self) -> bool:
        """Whether ranks have kept a state."""
        return bool(self.place) and os.fstat(self._file).st_size > 0

    def begin(self, plan: Plan) -> None:
        """Forget the states if the next rank 0 cannot take them: those of a later start would be older."""
        if self.place and plan.slots[0].host not in plan.local:
            os.ftruncate(self._file, 0)
