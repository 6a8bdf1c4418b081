"""A terminal that the kernel makes."""

import contextlib
import fcntl
import os
import re
import struct
import termios
import threading
import time
import tty


class Pty:
    """A terminal of the kernel; what is written to its `end` is kept."""

    def __init__(self, columns=80):
        self._reader, self.end = os.openpty()
        tty.setraw(self.end)
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.text = ""
        threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self):
        with contextlib.suppress(OSError):  # so ends a terminal
            while chunk := os.read(self._reader, 4096):
                self.text += chunk.decode()

    def settled(self):
        """What is to be seen once all that was written has come through the kernel."""
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            before = self.text
            time.sleep(0.02)
            if self.text != before:
                end = time.monotonic() + 0.2
        return self.lines()

    def lines(self):
        """What is to be seen, as far as carriage returns and erased ends of lines go."""
        lines, at = [""], 0
        for part in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+", self.text):
            if part == "\n":
                lines, at = [*lines, ""], 0
            elif part == "\r":
                at = 0
            elif part == "\x1b[K":
                lines[-1] = lines[-1][:at]
            else:
                lines[-1] = lines[-1][:at] + part + lines[-1][at + len(part) :]
                at += len(part)
        return lines
