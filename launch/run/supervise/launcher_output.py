"""Output of a launcher itself and of ssh during a run, separated from that of the ranks."""

import re
import signal
from collections.abc import Collection, Iterator

from launch.run.start.launchers.launcher import Messages

FRAME = b"-" * 70  # mpirun frames its messages with lines of dashes
MAX_FRAMED_LINES = 40
OUT = b"\x1f"  # before a line of a rank's standard output, by launch.run.rank.forwarder
SSH_LOST = re.compile(r"(?:Timeout, server|Connection to) (?P<host>\S+) (?:not responding|closed by remote host)")
NUMBERS = {**{signal.strsignal(number): number for number in signal.Signals}, "Out Of Memory": signal.SIGKILL}


class LauncherOutput:
    """The facts that a launcher and ssh have reported about the run on standard error."""

    def __init__(self, messages: Messages, hosts: Collection[str]) -> None:
        self.rank: int | None = None  # the first one that failed
        self.how: str | None = None
        self.status: int | None = None  # of this rank, 128 + signal after a signal
        self.signal: int | None = None  # the one that killed the rank
        self.lost: str | None = None  # the lost host, according to the launcher
        self.gone: str | None = None  # the lost host, according to ssh, possibly a rank's own ssh
        self._messages, self._hosts = messages, hosts
        self._line = b""  # the incomplete last line
        self._begun = False  # whether a part of it was already shown
        self._is_out = False  # whether it is one of standard output
        self._block: list[bytes] = []  # a line of dashes, and the message of mpirun after it
        self._held = b""  # messages that are mere consequences, shown if no cause is found

    def feed(self, chunk: bytes) -> Iterator[tuple[bool, bytes]]:
        """Yield the parts for the user, each with whether it is of standard output, which `--show all` marks.

        Messages that one of our lines replaces are held back.
        """
        for piece in re.findall(rb"[^\n]*\n|[^\n]+", chunk):
            if self._begun and piece.startswith((FRAME, *self._messages.lines)):  # after a progress bar of a rank
                self._begun = False
            is_whole, is_start = piece.endswith(b"\n"), not (self._begun or self._line)
            if is_start:
                self._is_out = piece.startswith(OUT)
            if self._is_out:
                yield True, piece.removeprefix(OUT) if is_start else piece
                self._begun = not is_whole
                continue
            self._line += piece
            if is_whole:
                yield False, self._line if self._begun else self._filtered(self._line)
                self._line, self._begun = b"", False
            elif self._begun or not self._may_be_ours():
                yield False, b"".join(self._block) + self._line
                self._block, self._line, self._begun = [], b"", True

    def flush(self) -> bytes:
        """Return the output that was held back, without messages that one of our lines replaces."""
        known = self.rank is not None or self.lost is not None or self.gone is not None
        return (b"" if known else self._held) + b"".join(self._block) + self._line

    def _may_be_ours(self) -> bool:
        """Return whether the incomplete line may become one that is held back."""
        signs = [FRAME, *self._messages.lines, *(self._messages.framed if self._block else ())]
        return len(self._block) > 1 or any(sign.startswith(self._line[: len(sign)]) for sign in signs)

    def _filtered(self, line: bytes) -> bytes:
        """Return the part of the output that a complete line adds for the user."""
        is_frame = re.fullmatch(FRAME + rb"-*\s*", line) is not None
        if len(self._block) > 1:
            self._block.append(line)
            if not is_frame and len(self._block) <= MAX_FRAMED_LINES:
                return b""
            block, self._block = b"".join(self._block), []
            return b"" if self._is_replaced(block.decode(errors="replace")) else block
        before, self._block = b"".join(self._block), []  # ranks print lines of dashes, too
        if is_frame or (before and line.startswith(self._messages.framed)):
            self._block = [line] if is_frame else [before, line]
            return before if is_frame else b""
        return before + (b"" if self._is_replaced(line.decode(errors="replace")) else line)

    def _is_replaced(self, text: str) -> bool:
        """Return whether a message is one that the user does not need; its facts are recorded."""
        for pattern in self._messages.deaths:
            find = re.search if text.count("\n") > 1 else re.match  # ranks may print such words, too
            if (match := find(pattern, text, re.DOTALL)) is not None:
                self._note(match.groupdict())
                return True
        if (match := SSH_LOST.match(text)) is not None and match["host"] in self._hosts:
            self.gone = match["host"]
            return True
        if re.match(self._messages.consequences, text):
            self._held += text.encode()
            return True
        return re.fullmatch(self._messages.remarks, text) is not None

    def _note(self, known: dict[str, str]) -> None:
        """Note a death; the first counts."""
        if "rank" in known and self.rank is None:
            self.rank = int(known["rank"])
            if "status" in known:
                self.how, self.status = f"ended with status {known['status']}", int(known["status"])
            else:
                name = known["signal"]
                text = f"{NUMBERS[name]} ({name})" if name in NUMBERS else name
                self.how, self.signal = f"died of signal {text}", int(text.split()[0])
                self.status = 128 + self.signal
        self.lost = self.lost or known.get("host")
