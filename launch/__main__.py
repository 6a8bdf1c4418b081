"""hvdlaunch, as `python -m launch` and as a command. Few imports: until there is a handler Ctrl-C shows a traceback."""

import os
import signal

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """hvdlaunch; Ctrl-C while its modules are imported ends it with status 130 and prints nothing.

    Not by an exception, which a module could turn into another one: enums and dataclasses raise a RuntimeError.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # in the background of a shell
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from launch.cli import main as command_line

    command_line.main()


if __name__ == "__main__":
    main()
