"""Output of mpirun and ssh themselves during a run, separated from that of the ranks."""

import itertools
import re
from collections.abc import Collection, Iterator

# Beginnings of messages of mpirun, which it frames with lines of dashes, and of ssh.
FRAME = b"-" * 70
FRAMED = (b"Primary job ", b"mpirun ", b"prterun ", b"ORTE ", b"PRTE ", b"WARNING: Open MPI ")
UNFRAMED = (b"Connection to ", b"Timeout, server ", b"mpirun: Forwarding ", b"prterun: Forwarding ", b"srun: cluster ")

OUT = b"\x1f"  # before a line of a rank's standard output, by launch.rank.forwarder


class MarkedLines:
    """The lines of the ranks' standard output with `--show all`, which come over standard error."""

    def __init__(self) -> None:
        self._is_out, self._is_begun = False, False  # the current line

    def parts(self, chunk: bytes) -> Iterator[tuple[bool, bytes]]:
        """Yield whether a part of standard error is one of standard output, and the part without marks."""
        for is_out, pieces in itertools.groupby(self._pieces(chunk), lambda piece: piece[0]):
            yield is_out, b"".join(text for _, text in pieces)

    def _pieces(self, chunk: bytes) -> Iterator[tuple[bool, bytes]]:
        for piece in re.findall(rb"[^\n]*\n|[^\n]+", chunk):
            if self._is_begun:
                yield self._is_out, piece
            else:
                self._is_out = piece.startswith(OUT)
                yield self._is_out, piece.removeprefix(OUT)
            self._is_begun = not piece.endswith(b"\n")


class MpirunOutput:
    """The facts that mpirun and ssh have reported about the run on standard error."""

    def __init__(self, hosts: Collection[str]) -> None:
        self.rank: int | None = None  # the first one that failed
        self.how: str | None = None
        self.signal: int | None = None  # the one that killed the rank
        self.lost: str | None = None  # the lost host, according to mpirun
        self.gone: str | None = None  # the lost host, according to ssh, possibly a rank's own ssh
        self._hosts = hosts
        self._line = b""  # the incomplete last line
        self._begun = False  # whether a part of it was already shown
        self._block: list[bytes] = []  # a line of dashes, and the message of mpirun after it
        self._held = b""  # messages that are mere consequences, shown if no cause is found

    def feed(self, chunk: bytes) -> bytes:
        """Return the part of the output for the user; banners that one of our lines replaces are held back."""
        out = b""
        for piece in chunk.splitlines(keepends=True):
            self._line += piece
            if piece.endswith(b"\n"):
                out += self._line if self._begun else self._filtered(self._line)
                self._line, self._begun = b"", False
            elif self._begun or not self._may_be_ours():
                out += b"".join(self._block) + self._line
                self._block, self._line, self._begun = [], b"", True
        return out

    def flush(self) -> bytes:
        """Return the output that was held back, without banners that one of our lines replaces."""
        known = self.rank is not None or self.lost is not None or self.gone is not None
        return (b"" if known else self._held) + b"".join(self._block) + self._line

    def _may_be_ours(self) -> bool:
        """Return whether the incomplete line may become one that is held back."""
        signs = [FRAME, *UNFRAMED, *(FRAMED if self._block else ())]
        return len(self._block) > 1 or any(sign.startswith(self._line[: len(sign)]) for sign in signs)

    def _filtered(self, line: bytes) -> bytes:
        framing = re.fullmatch(FRAME + rb"-*\s*", line) is not None
        if len(self._block) > 1:
            self._block.append(line)
            if not framing and len(self._block) <= 40:
                return b""
            block, self._block = b"".join(self._block), []
            return b"" if self._is_replaced(block.decode(errors="replace")) else block
        before, self._block = b"".join(self._block), []  # ranks print lines of dashes, too
        if framing or (before and line.startswith(FRAMED)):
            self._block = [line] if framing else [before, line]
            return before if framing else b""
        text = line.decode(errors="replace")
        return before + (b"" if REMARKS.fullmatch(text) or self._is_consequence(text) else line)

    def _is_replaced(self, text: str) -> bool:
        """Return whether one of our lines will replace a framed message of mpirun; its facts are recorded."""
        for pattern in BANNERS:
            if (match := re.search(pattern, text, re.DOTALL)) is not None:
                known = match.groupdict()
                if "rank" in known and self.rank is None:
                    self.rank = int(known["rank"])
                    if "status" in known:
                        self.how = f"ended with status {known['status']}"
                    else:
                        self.how, self.signal = f"died of signal {known['signal']}", int(known["signal"].split()[0])
                self.lost = self.lost or known.get("host")
                return True
        return self._is_consequence(text)

    def _is_consequence(self, text: str) -> bool:
        """Return whether a message is a consequence of a cause that is, or will be, known."""
        if (match := SSH_LOST.match(text)) is not None and match["host"] in self._hosts:
            self.gone = match["host"]
            return True
        if CONSEQUENCES.match(text):
            self._held += text.encode()
            return True
        return False


BANNERS = (
    # Open MPI 4: Process name: [[53071,1],1]; Open MPI 5: [prterun-h1-10042@1,1]
    (
        r"one or more processes exited with non-zero status.*"
        r"Process name: \[[^\n]*,(?P<rank>\d+)\]\s+Exit code:\s+(?P<status>\d+)"
    ),
    r"noticed that process rank (?P<rank>\d+) with PID \d+ on node \S+\s+exited on\s+signal (?P<signal>\d+ \([^)]*\))",
    r"Primary job  terminated normally, but \d+ process",
    r"lost communication with a remote daemon.*Remote daemon: *\S+ on node (?P<host>\S+)",
)
# mpirun's messages about itself: forwarded signals, and on a busy machine a failed call for a child that was faster;
# srun's message if no plugin binds.
REMARKS = re.compile(
    r"(?:mpirun|prterun): Forwarding signal \d+ to job\s*"
    r"|\[[^]\s]+\] plm:\w+: Warning: setpgid\([^)]*\) failed in parent .*\s*"
    r"|srun: cluster configuration lacks support for cpu binding\s*"
)
SSH_LOST = re.compile(r"(?:Timeout, server|Connection to) (?P<host>\S+) (?:not responding|closed by remote host)")
# Messages that mpirun adds when a host or a rank is lost.
CONSEQUENCES = re.compile(
    r"-+\n(?:(?:ORTE|PRTE) was unable to reliably start one or more daemons|(?:ORTE|PRTE) does not know how to route"
    r"|WARNING: Open MPI failed to TCP connect to a peer MPI process)|\[[^]\s]+:\d+\] PMIX ERROR"
)
