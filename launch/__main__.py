"""hvdlaunch, as `python -m launch` and as a command. It imports little, so that Ctrl-C rarely shows a traceback."""

import os
import signal

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run hvdlaunch; Ctrl-C during the import of its modules ends it silently with status 130.

    The handler does not raise an exception, because a module could replace it: enums and dataclasses raise a
    RuntimeError.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in the background of a shell
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from launch.cli import main as command_line

    command_line.main()


if __name__ == "__main__":
    main()
