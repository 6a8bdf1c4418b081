"""hvdlaunch run | plan | sweep | tune | check | estimate | gpus | topo | hostfile: the command line."""

import argparse
import io
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launch import output
from launch.cli import mistakes
from launch.cli.options import parser
from launch.errors import CommandError, LaunchError, harmless, in_one_line

if TYPE_CHECKING:
    from types import FrameType

WITH_PROGRAM = ("run", "plan", "sweep", "tune")
COMMANDS = (*WITH_PROGRAM, "check", "estimate", "gpus", "topo", "hostfile")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Carry out the command line, and exit with its status."""
    _open_standard_files()
    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments, program = (
        (arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :])
        if "--" in arguments
        else (arguments, None)
    )
    try:
        status = _do(_options(arguments, program))
        sys.stdout.flush()
    except LaunchError as error:
        below = (f"    {harmless(line)}".rstrip() for line in error.details)
        output.say("\n".join([f"error: {in_one_line(error)}", *below]))
        sys.exit(error.status)
    except OSError as error:
        if error.filename is not None:  # streams have no file name
            output.say(f"error: {harmless(str(error.filename))}: {error.strerror}")
            sys.exit(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            output.say(f"error: standard output cannot be written: {error.strerror}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status)


def _options(arguments: list[str], program: list[str] | None) -> argparse.Namespace:
    """Parse the options, with `words` and `program` (None without --). Without arguments print help."""
    if not arguments and program is None:
        arguments = ["--help"]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        raise CommandError(_without_command(arguments, program))
    options = parser().parse_args(arguments)
    takes_program = "stray" in options
    if takes_program and options.stray:
        stray, meant = options.stray[0], _meant(arguments, program)
        wrong = f"{stray!r} is not the value of an option. Write" if program else "put -- before the program:"
        raise CommandError(f"{wrong} {meant}; see hvdlaunch {options.command} --help")
    if program and not takes_program:
        raise CommandError(f"{options.command} takes no program: leave out what stands after --")
    options.program, options.arguments = program or [], arguments
    return options


def _without_command(arguments: list[str], program: list[str] | None) -> str:
    """Return the message for a command line that has only a program or begins with an option."""
    place = next((place for place, word in enumerate(arguments) if word in COMMANDS), None)
    command = "run" if place is None else arguments[place]
    arguments = [command, *(arguments if place is None else [*arguments[:place], *arguments[place + 1 :]])]
    try:
        if command not in WITH_PROGRAM:
            parser().parse_args(arguments)
            return f"no command: write {shlex.join(['hvdlaunch', *arguments])}; see hvdlaunch --help"
        return f"no command: write {_meant(arguments, program)}; see hvdlaunch --help"
    except CommandError as error:
        return f"no command: put {command} first; {error}"


def _meant(arguments: list[str], program: list[str] | None) -> str:
    """Return the complete command that was probably meant; CommandError if it would not be valid."""
    options = parser().parse_args(arguments)
    if options.stray and program and program[0].startswith("-"):  # train.py -- --lr 1
        arguments, program = arguments[: len(arguments) - len(options.stray)], [*options.stray, *program]
    while (options := parser().parse_args(arguments)).stray and program:
        arguments = [*arguments[: len(arguments) - len(options.stray)], *options.stray[1:]]
    arguments = arguments[: len(arguments) - len(options.stray)]
    if options.command == "sweep" and options.sizes is None:
        arguments += ["-np", "1,2,4"]
    program = program or options.stray or ["PROGRAM"]
    installed = options.apptainer is not None or shutil.which(program[0]) is not None
    program = mistakes.runnable(program, installed=installed)
    if (wrong := mistakes.in_program(program, installed=True)) is not None:
        raise CommandError(wrong)
    return shlex.join(["hvdlaunch", *arguments, "--", *program])


def _do(options: argparse.Namespace) -> int:
    """Carry out the command. Each command is in a separate module, imported only if needed."""
    if options.command in ("topo", "gpus", "hostfile"):
        from launch.cli import show

        do = {"topo": show.topo, "gpus": show.gpus, "hostfile": show.hostfile}
    elif options.command == "estimate":
        from launch.cli.estimate import estimate

        do = {"estimate": estimate}
    else:
        from launch.cli import start

        try:
            Path.cwd()
        except OSError as error:
            raise CommandError("this folder is gone: cd to one that exists") from error
        do = {"run": start.run, "plan": start.run, "sweep": start.sweep, "tune": start.tune, "check": start.check_hosts}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # launch.__main__ has handled it until now
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # while ranks run, supervise handles them
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _leave)
    return do[options.command](options)


def _open_standard_files() -> None:
    """Open /dev/null for standard files that the caller has closed, so that no other file gets their numbers."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(free, True)  # else mpirun would get them closed
    os.close(free)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files need not be UTF-8
    output.guard_errors()


def _leave(number: int, _: "FrameType | None") -> NoReturn:
    sys.exit(128 + number)
