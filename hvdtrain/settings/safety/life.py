"""A sign of life: what a run does now, in place on a terminal, else in a line after a minute of silence.

Under hvdlaunch it is a part of hvdlaunch's line. A thread shows it, so that steps do nothing for it.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.settings.safety import exits, output

SHOWN_AFTER_S = 2.0  # of silence, on a terminal
EVERY_S = 0.5  # between two looks
SAID_AFTER_S = 60.0  # without one


class Activity:
    """Something that takes time, such as an import."""

    def __init__(self, what: str) -> None:
        self._what, self._began_s = what, time.monotonic()

    def text(self) -> str:
        """Return what to show; empty as long as it is not worth a line."""
        lasted_s = time.monotonic() - self._began_s
        return f"{self._what}, {lasted_s:.0f} s" if output.silent_s() >= SHOWN_AFTER_S else ""


_doing: Activity | None = None


def doing(what: str | Activity | None) -> None:
    """Set what this process does from now on."""
    global _doing  # noqa: PLW0603 (of the process)
    _doing = Activity(what) if isinstance(what, str) else what


def begin() -> None:
    """Show from now on what this process does; called by one rank."""
    if not output.sees_prints():
        return
    show = _way_of_showing()

    def show_activity() -> None:
        text = ""
        while not output.ended.wait(EVERY_S):
            activity, before = _doing, text
            text = "" if activity is None else activity.text()
            if text or before:
                show(activity, text)

    threading.Thread(target=show_activity, name="sign-of-life", daemon=True).start()


def _way_of_showing() -> Callable[[Activity | None, str], object]:
    if output.has_terminal():
        return _report if "HVDLAUNCH_REPORT" in os.environ else lambda _, text: output.draw(text)
    is_watched, said = _launcher_has_terminal(), list[Activity | None]()

    def say(activity: Activity | None, text: str) -> None:
        """Say it after a minute of silence; to a person also once what is loading."""
        is_new = is_watched and type(activity) is Activity and activity not in said
        if text and (is_new or output.silent_s() >= SAID_AFTER_S):
            said[:] = [activity]
            exits.print_message("note", text)

    return say


def _report(_: Activity | None, text: str) -> None:
    exits.report(doing=text)


def _launcher_has_terminal() -> bool:
    """Return whether a person sees what the launcher of this process, such as mpirun, prints."""
    try:
        return str(Path(f"/proc/{os.getppid()}/fd/2").readlink()).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False
