"""hvdlaunch run | plan | sweep | check | gpus | topo | hostfile: the command line."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from launch.cli import mistakes
from launch.cli.options import parser
from launch.errors import CommandError, LaunchError, harmless, in_one_line

if TYPE_CHECKING:
    from types import FrameType


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Do what the command line says, and end with its status."""
    _open_standard_files()
    words = list(sys.argv[1:] if argv is None else argv)
    words, program = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, None)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # while ranks run, launch.watch.run has them
        signal.signal(number, _leave)
    try:
        status = _do(_options(words, program))
        sys.stdout.flush()
    except LaunchError as error:
        below = (f"    {harmless(line)}".rstrip() for line in error.details)
        print("\n".join([f"hvdlaunch: {in_one_line(error)}", *below]), file=sys.stderr)
        sys.exit(error.status)
    except OSError as error:
        if error.filename is not None:  # no stream has one
            print(f"hvdlaunch: {in_one_line(LaunchError(f'{error.filename}: {error.strerror}'))}", file=sys.stderr)
            sys.exit(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            print(f"hvdlaunch: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status)


def _options(words: list[str], program: list[str] | None) -> argparse.Namespace:
    """The options, with `words` and the `program`; None where there is no -- before it. Alone hvdlaunch prints help."""
    if not words and program is None:
        words = ["--help"]
    if (wrong := mistakes.before_a_command(words, program or ())) is not None:
        raise CommandError(wrong)
    options = parser().parse_args(words)
    takes_program = "stray" in options
    if takes_program and options.stray:
        wrong = mistakes.without_dashes(words, options.stray, program or ())
        raise CommandError(f"{wrong}; see hvdlaunch {options.command} --help")
    if program and not takes_program:
        raise CommandError(f"{options.command} takes no program: leave out what stands after --")
    options.program, options.words = program or [], words
    return options


def _do(options: argparse.Namespace) -> int:
    """What each command does stands in a module of its own, which the others need not wait for."""
    if options.command in ("topo", "gpus", "hostfile"):
        from launch.cli import show

        return {"topo": show.topo, "gpus": show.gpus, "hostfile": show.hostfile}[options.command](options)
    from launch.cli import start

    do = {"run": start.run, "plan": start.run, "sweep": start.sweep, "check": start.check_hosts}
    return do[options.command](options)


def _open_standard_files() -> None:
    """Open /dev/null in place of those that the caller has closed, so that no other file gets their numbers."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(free)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _leave(number: int, _: "FrameType | None") -> NoReturn:
    sys.exit(128 + number)
