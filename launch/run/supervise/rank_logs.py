"""The output that ranks leave for their launcher: the end of a log, from the host that has it, and rank 0's report.

python -m launch.run.supervise.rank_logs FILE       prints the end of a log on this host, as one line of JSON
"""

import contextlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.documents import Document, parse
from launch.errors import LaunchError
from launch.files import open_regular, read_text
from launch.hosts.probe import is_local
from launch.hosts.ssh import SSH, Ssh
from launch.placement.slots import RankSlot

FOLDER = "logs"  # where launch.run.rank.forwarder writes them
END_BYTES = 16_384
ANSWER_S = 5.0
MARK = "hvdlaunch-words "
MAX_DIGITS = 19  # of a step
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
        command = [self.python, "-P", "-m", "launch.run.supervise.rank_logs", str(file)]
        try:
            answer = self.ssh.ask(slot.host, command, str(Path.cwd()), mark=MARK, timeout_s=ANSWER_S)
            return str(parse(answer))[-END_BYTES:]
        except (LaunchError, ValueError):
            return ""


def end_of(file: Path) -> str:
    """Return the end of a log, as on a terminal; empty if it cannot be read or is not a regular file.

    It has nothing that follows from the end of the rank, unless there is nothing else.
    """
    with contextlib.suppress(OSError), open_regular(file, flags=os.O_NOFOLLOW) as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - END_BYTES))
        text = log.read(END_BYTES).decode(errors="replace")
        # Only the last state of a redrawn line, such as a progress bar, was visible.
        lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
        shown = "\n".join(lines).strip("\n")
        return _FOLLOWS.sub("", shown).strip("\n") or shown
    return ""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Rank 0's report so far; empty for programs without hvdtrain."""

    run_folder: str | None = None
    checkpoint: int | None = None  # the newest saved step
    snapshot: int | None = None  # the newest step in memory
    is_shared: bool = True  # all hosts see the run folder
    saves: bool = False  # the program saves and stops at SIGUSR1
    exit_reason: str | None = None  # finished, preempted...
    explanation: str | None = None  # the program's own explanation of its failure
    doing: str = ""  # what it does now, in words


def read_report(file: Path) -> RankReport:
    """Read the report; return an empty one if the file is missing or malformed."""
    try:
        known = Document(parse(read_text(file))).values
    except (OSError, ValueError):
        return RankReport()
    texts = {key: value for key, value in known.items() if isinstance(value, str)}
    return RankReport(
        run_folder=texts.get("run_folder"),
        checkpoint=_step(texts.get("checkpoint", "")),
        snapshot=_step(texts.get("snapshot", "")),
        saves=texts.get("saves") == "yes",
        is_shared=texts.get("is_shared") != "no",
        exit_reason=texts.get("exit_reason"),
        explanation=texts.get("said"),
        doing=texts.get("doing", ""),
    )


def _step(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < MAX_DIGITS else None


if __name__ == "__main__":
    print(f"{MARK}{json.dumps(end_of(Path(sys.argv[1])))}", flush=True)
