"""The last output of a rank of any program: the end of its log, from the host that has it.

python -m launch.supervise.rank_logs FILE       prints the end of a log on this host, as one line of JSON
"""

import contextlib
import json
import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.documents import parse
from launch.errors import LaunchError
from launch.placement.slots import RankSlot
from launch.probe.hosts import is_local
from launch.probe.ssh import SSH, Ssh

FOLDER = "logs"  # where launch.rank.forwarder writes them
END_BYTES = 16_384
ANSWER_S = 5.0
MARK = "hvdlaunch-words "
# Printed by multiprocessing's processes because a rank has ended, and so never the reason.
_FOLLOWS = re.compile(
    r"^.*: UserWarning: resource_tracker: .*\n?(?:[ \t]+warnings\.warn\(.*\n?)?"
    r'|^Traceback \(most recent call last\):\n(?:  .*\n)*?  File ".*", line \d+, in spawn_main\n(?:[ \t]+.*\n)*.*\n?',
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class Logs:
    """The logs of a run; each is on its rank's host."""

    folder: Path  # equal on all hosts, or shared by them
    python: str  # the project's interpreter on the hosts
    ssh: Ssh = SSH

    def file(self, rank: int) -> Path:
        """Return the log file of a rank."""
        return self.folder / f"rank-{rank}.log"

    def end(self, slot: RankSlot) -> str:
        """Return the last output of a rank; empty if its host does not respond."""
        file = self.file(slot.rank)
        if is_local(slot.host):
            return end_of(file)
        command = [self.python, "-P", "-m", "launch.supervise.rank_logs", str(file)]
        try:
            answer = self.ssh.ask(slot.host, command, str(Path.cwd()), mark=MARK, timeout_s=ANSWER_S)
            return str(parse(answer))[-END_BYTES:]
        except (LaunchError, ValueError):
            return ""


def end_of(file: Path) -> str:
    """Return the end of a log, as on a terminal; empty if it cannot be read or is not a regular file.

    It has nothing that follows from the end of the rank, unless there is nothing else.
    """

    def without_links(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    with contextlib.suppress(OSError), open(file, "rb", opener=without_links) as log:
        facts = os.fstat(log.fileno())
        if stat.S_ISREG(facts.st_mode):
            log.seek(max(0, facts.st_size - END_BYTES))
            text = log.read(END_BYTES).decode(errors="replace")
            # Only the last state of a redrawn line, such as a progress bar, was visible.
            lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
            shown = "\n".join(lines).strip("\n")
            return _FOLLOWS.sub("", shown).strip("\n") or shown
    return ""


if __name__ == "__main__":
    print(f"{MARK}{json.dumps(end_of(Path(sys.argv[1])))}", flush=True)
