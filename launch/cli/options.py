"""The words that hvdlaunch takes: its commands and their options."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from launch.cores import parse_numbers
from launch.errors import harmless
from launch.machine.local import DRIVER_TIMEOUT_S
from launch.reach.ssh import SILENCE_S
from launch.watch.stops import GRACE_S

MOST_SECONDS = 86_400


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"hvdlaunch: {harmless(' '.join(message.split()))}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = _Parser(
        prog="hvdlaunch",
        description="From the machine's topology to running ranks.",
        allow_abbrev=False,
        epilog="hvdlaunch COMMAND --help tells the options of a command.",
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, text: str, **more: Any) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False, **more)
        added.set_defaults(command=name)
        return added

    _add_topo_options(command("topo", "show how GPUs, NUMA nodes and NICs of this host are connected"))
    _add_gpus_options(command("gpus", "choose the best K GPUs and their ring order, and say why"))
    _add_hostfile_options(command("hostfile", "read a list of hosts in any spelling, write it in another"))

    usage = "hvdlaunch {} -np N [options] -- PROGRAM [ARGUMENT]..."
    plan = command("plan", "show who would run where, the files and the exact command", usage=usage.format("plan"))
    run = command("run", "start a program on GPUs or CPUs of one host or many", usage=usage.format("run"))
    for either in (plan, run):
        either.add_argument("-np", type=int, required=True, metavar="N", help="how many ranks")
        _add_run_options(either)
        either.add_argument(
            "--nsys", action="store_true", help="under Nsight Systems: JOB-rank-R.nsys-rep in this folder, on each host"
        )
        either.add_argument(
            "--topology", action="append", default=[], metavar="HOST=FILE", help="a saved topology; no host is asked"
        )
    _add_ends(run)
    run.add_argument(
        "--sbatch", type=Path, metavar="FILE", help="write a Slurm batch script that does it, start nothing"
    )
    run.add_argument(
        "--sbatch-option",
        dest="sbatch_options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for that script, also in place of our own ones: time=4:00:00, partition=gpu, exclusive",
    )
    run.add_argument("--dry-run", action="store_true", help="print the exact command, start nothing")
    sweep = command(
        "sweep",
        "run a program at several sizes, tell what each gives in time, accuracy and cost; continues where it stopped",
        usage="hvdlaunch sweep -np 1,2,4 [options] -- PROGRAM [ARGUMENT]...",
    )
    _add_sweep_options(sweep)
    _add_run_options(sweep)
    return top


def _add_topo_options(topo: argparse.ArgumentParser) -> None:
    _add_source(topo)
    topo.add_argument("--json", action="store_true", help="for programs, and for --from")
    topo.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw it")
    topo.add_argument("--pair", type=_indices, metavar="A,B", help="say how two GPUs are connected, and how fast")


def _add_gpus_options(gpus: argparse.ArgumentParser) -> None:
    gpus.add_argument("-k", type=int, required=True, metavar="K", help="how many")
    _add_source(gpus)
    gpus.add_argument("--busy", type=_indices, default=(), metavar="A,B...", help="GPUs that are taken")
    gpus.add_argument("--json", action="store_true", help="for programs")


def _add_hostfile_options(hostfile: argparse.ArgumentParser) -> None:
    hosts = hostfile.add_mutually_exclusive_group(required=True)
    hosts.add_argument("-H", dest="hosts", metavar="A:8,B:4", help="hosts and their slots")
    hosts.add_argument("--slurm-nodes", metavar="NODES", help="as Slurm spells them: 'node[01-03,07]:8'")
    hosts.add_argument("--from", dest="source", metavar="FILE", help="a hostfile, rankfile or hosts.toml; - for stdin")
    hostfile.add_argument(
        "--format", choices=("openmpi", "mpich", "horovod", "rankfile"), default="openmpi", help="what to write"
    )
    hostfile.add_argument("-o", dest="output", type=Path, metavar="FILE", help="where to; else standard output")


def _add_source(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="what nvidia-smi topo -m printed; - for stdin",
    )
    command.add_argument("--gpu-name", metavar="NAME", help="the GPUs' model, which a saved text does not say: A100")
    _add_driver_timeout(command)


def _add_driver_timeout(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--driver-timeout-s",
        type=_seconds,
        default=DRIVER_TIMEOUT_S,
        metavar="S",
        help=f"the GPU driver of a host may take so long to answer; default: {DRIVER_TIMEOUT_S:g}",
    )


def _add_run_options(command: argparse.ArgumentParser) -> None:
    """The options of every command that starts, or would start, a program."""
    hosts = command.add_mutually_exclusive_group()
    hosts.add_argument("-H", dest="hosts", metavar="A:8,B:4", help="hosts and their slots; default: this host")
    hosts.add_argument("--hostfile", metavar="FILE", help="the same from a file, in any spelling")
    hosts.add_argument("--slurm-nodes", metavar="NODES", help="the same as Slurm spells it; default in an allocation")
    command.add_argument(
        "--network",
        metavar="CIDR|NAME",
        help="where several hosts meet: 10.0.0.0/16, or an interface's name; default: the fastest network they share",
    )
    command.add_argument("--launcher", choices=("auto", "mpirun", "horovodrun"), default="auto", help="default: mpirun")
    command.add_argument(
        "--gpus", type=_gpus_option, default="auto", metavar="auto|0,3...|none", help="default: the best free ones"
    )
    command.add_argument(
        "--bind",
        choices=("numa", "cores", "none"),
        default="numa",
        help="to the near NUMA node, or to cores of its own",
    )
    command.add_argument(
        "--ranks-per-replica",
        type=int,
        metavar="K",
        help="keep each K consecutive ranks, as the stages of one replica, on one host",
    )
    command.add_argument("--apptainer", type=_image, metavar="IMAGE", help="run the program inside this image")
    command.add_argument(
        "-x", dest="exports", action="append", default=[], metavar="NAME", help="give this variable to every rank"
    )
    command.add_argument("--allow-run-as-root", action="store_true", help="needed as root, as in containers")
    command.add_argument(
        "--ssh-option",
        dest="ssh_options",
        type=_ssh_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for ssh to the hosts, also in place of our own ones: StrictHostKeyChecking=accept-new",
    )
    command.add_argument(
        "--silence-s",
        type=_seconds,
        default=SILENCE_S,
        metavar="S",
        help=f"a host may be silent for so long before the run ends; default: {SILENCE_S:g}",
    )
    _add_driver_timeout(command)


def _add_sweep_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("-np", dest="sizes", type=_sizes, required=True, metavar="1,2,4...", help="ranks of each run")
    command.add_argument("--seeds", type=int, default=1, metavar="S", help="runs of each size, with seeds 0, 1...")
    command.add_argument(
        "--mode", choices=("weak", "strong"), default="weak", help="the program keeps the batch per rank, or the global"
    )
    command.add_argument("--price-per-gpu-hour", type=float, metavar="X", help="for the cost, in any currency")
    command.add_argument("--target-accuracy", type=float, metavar="PERCENT", help="tell the time to it")
    command.add_argument("--min-efficiency", type=float, metavar="PERCENT", help="limit for the advice")
    command.add_argument("--max-accuracy-loss", type=float, metavar="POINTS", help="limit for the advice")
    command.add_argument("--name", help="folder in sweeps/; default: the same for the same program and options")
    command.set_defaults(topology=[], nsys=False)


def _add_ends(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="after a failure start again, from the newest checkpoint, on the hosts that are left; at most N times",
    )
    run.add_argument(
        "--min-np", type=int, metavar="M", help="with --restarts: go on with as few ranks as these; default: -np"
    )
    run.add_argument(
        "--grace-s",
        type=float,
        default=GRACE_S,
        metavar="S",
        help=f"asked to end, the program has so many seconds to save; default: {GRACE_S:g}",
    )


def _indices(text: str) -> tuple[int, ...]:
    indices = parse_numbers(text)
    if indices is None or len(set(indices)) < len(indices):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPU indices, each once, as in 0,3 or 0-3")
    return tuple(indices)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = parse_numbers(text)
    if sizes is None or len({*sizes, 0}) <= len(sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of ranks, each once, as in 1,2,4")
    return tuple(sorted(sizes))


def _gpus_option(text: str) -> str | tuple[int, ...]:
    return text if text in ("auto", "none") else _indices(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 1 to {MOST_SECONDS}")
    return seconds


def _ssh_option(text: str) -> str:
    # Open MPI splits them at blanks and hands them on through a shell of the host.
    if not re.fullmatch(r"[A-Za-z]+=[\w@%+:,./~-]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KEY=VALUE without blanks or quotes; put other options into ~/.ssh/config"
        )
    return text


def _image(text: str) -> str:
    if text.startswith("-"):  # apptainer would take it for an option of its own
        raise argparse.ArgumentTypeError(f"{text!r} is no image: give its path, as in ./image.sif")
    return text
