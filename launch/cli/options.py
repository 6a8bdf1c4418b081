"""The commands of hvdlaunch and their options."""

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from launch import __version__
from launch.cli import mistakes, values
from launch.cli.estimate_options import add_failures, add_options
from launch.errors import CommandError
from launch.hosts.ssh import SILENCE_S
from launch.run.start.launchers.choose import LAUNCHERS
from launch.run.start.mpijob import MEMORY
from launch.run.start.request import CORES_ON_CPUS, CORES_WITH_GPU
from launch.run.supervise.spot.clouds import CLOUDS
from launch.run.supervise.stops import GRACE_S

TRAINING = "-- python -m hvdtrain.effnet"
_NO_START: dict[str, Any] = {
    "topology": [],
    "nsys": False,
    "measured": [],
    "min_np": None,
    "spot": None,
    "after_checkpoint": None,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message.removesuffix('.')}; see {self.prog} --help")


class _Command(_Parser):
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Override argparse's errors with messages that refer to this command's help."""
        wrong = mistakes.in_options(args or (), self._option_string_actions)
        if wrong is not None:
            self.error(wrong)
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(mistakes.unknown(rest, self._option_string_actions))
        return parsed, rest


class _Version(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        from launch.machine.software import code_digest

        print(f"hvdlaunch {__version__}, code {code_digest()}")
        sys.exit(0)


@cache
def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    top = _Parser(
        prog="hvdlaunch",
        usage="hvdlaunch COMMAND [options] [-- PROGRAM [ARGUMENT]...]",
        description="From the machine's topology to running ranks.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=_Version, nargs=0, help="this version, and a digest of its code")
    commands = top.add_subparsers(
        title="commands", metavar="COMMAND", required=True, prog="hvdlaunch", parser_class=_Command
    )

    def command(name: str, text: str, example: str) -> argparse.ArgumentParser:
        example = f"example: hvdlaunch {name} {example}"
        added = commands.add_parser(name, help=text, description=text, epilog=example, allow_abbrev=False)
        added.set_defaults(command=name)
        return added

    run = command("run", "start a program on GPUs or CPUs of one host or many", f"-H node1,node2 {TRAINING}")
    _add_start_options(run)
    _add_nccl_debug(run)
    _add_job_options(run)
    plan = command("plan", "show who would run where, the files and the exact command", f"-np 4 {TRAINING}")
    _add_start_options(plan)
    add_failures(plan)
    plan.set_defaults(batch=None, batch_options=[], nccl_debug=False)
    sweep = command(
        "sweep",
        "run a program at several sizes, report what each gives in time, accuracy and cost; continues where it stopped",
        f"-np 1,2,4 {TRAINING}",
    )
    _add_sweep_options(sweep)
    _add_run_options(sweep)
    tune = command(
        "tune", "measure the remedies that a program names, and end with a faster command line", f"-np 2 {TRAINING}"
    )
    _add_tune_options(tune)
    _add_run_options(tune)
    _add_check_options(
        command(
            "check",
            "report every fault of all hosts before a run, each with a fix",
            "-H node1,node2",
        )
    )
    _add_gpus_options(command("gpus", "choose the best K GPUs and their ring order, and print why", "-k 4"))
    _add_topo_options(command("topo", "show how GPUs, NUMA nodes and NICs of this host are connected", "--pair 0,3"))
    _add_hostfile_options(
        command("hostfile", "read a list of hosts in any spelling, write it in another", "-H a:8,b:4 --format mpich")
    )
    add_options(
        command(
            "estimate",
            "predict speed, cost and failures of other numbers of GPUs, from short runs; starts nothing",
            "runs/effnet/one --gpus 8,64 --gpus-per-host 8 --link 200gbit",
        )
    )
    for subparser in (run, plan, sweep, tune):
        subparser.usage = f"{subparser.prog} [options] -- PROGRAM [ARGUMENT]..."
        subparser.add_argument("--no-check", action="store_true", help="do not look for what differs between the hosts")
        subparser.add_argument("stray", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # a program without --
    examples = [
        f"  {subparser.epilog.removeprefix('example: ')}" for subparser in commands.choices.values() if subparser.epilog
    ]
    top.epilog = "\n".join(["examples:", *examples, "", "hvdlaunch COMMAND --help tells the options of a command."])
    return top


def _add_start_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `run`, and of `plan`, which shows what `run` would do."""
    text = "ranks; default: one for each slot of the hosts, or for each free GPU if they have no number"
    command.add_argument("-np", type=values.count, metavar="N", help=text)
    _add_run_options(command)
    _add_ends(command)
    text = "choose GPUs by the output of check --bandwidth --json, map ranks to them by what those of a run sent: its "
    _add_measured(command, "FILE|RUN", f"{text}folder, or the traffic.json in it; default: by a table of link speeds")
    text = "profile with Nsight Systems: JOB-rank-R.nsys-rep, on each host"
    command.add_argument("--nsys", action="store_true", help=text)
    text = "a saved topology, so that no host is probed: for plan and Slurm scripts; default host: localhost"
    command.add_argument("--topology", action="append", default=[], metavar="[HOST=]FILE", help=text)


def _add_job_options(run: argparse.ArgumentParser) -> None:
    """Add the options that write a job file instead of starting ranks."""
    text = "write a Slurm script, or a Kubeflow MPIJob if the name ends in .yaml; default: run now"
    run.add_argument("--batch", type=Path, metavar="FILE", help=text)
    text = (
        "of a script: time=4:00:00, exclusive; of an MPIJob: image=IMAGE, claim=NAME of a volume for all pods, both "
        f"needed, cpu=N and memory=SIZE for each rank; default: {CORES_WITH_GPU} cores for each rank with a GPU, "
        f"{CORES_ON_CPUS} on CPUs, or by --topology; {MEMORY}"
    )
    _add_list(run, "--batch-option", "KEY=VALUE", text)


def _add_list(command: argparse.ArgumentParser, option: str, metavar: str, text: str, **how: Any) -> None:
    """Add an option that may be repeated; its values are in a list, such as `ssh_options`."""
    dest = f"{option.strip('-').replace('-', '_')}s"
    command.add_argument(option, dest=dest, action="append", default=[], metavar=metavar, help=text, **how)


def _add_topo_options(topo: argparse.ArgumentParser) -> None:
    _add_source(topo)
    topo.add_argument("--json", action="store_true", help="for programs, and for --topology")
    topo.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw it; default: a table in words")
    topo.add_argument("--pair", type=values.indices, metavar="A,B", help="only these two GPUs; default: all pairs")


def _add_gpus_options(gpus: argparse.ArgumentParser) -> None:
    gpus.add_argument("-k", type=int, required=True, metavar="K", help="how many")
    _add_source(gpus)
    text = "choose by the output of check --bandwidth --json; default: by a table of link speeds"
    gpus.add_argument("--measured", metavar="FILE", help=text)
    text = "those to choose from; default: all that are free"
    gpus.add_argument("--gpus", type=values.some_gpus, default="all", metavar="all|0-3", help=text)
    gpus.add_argument("--json", action="store_true", help="for programs")


def _add_hostfile_options(hostfile: argparse.ArgumentParser) -> None:
    _add_hosts(hostfile, required=True)
    formats = ("openmpi", "mpich", "horovod", "rankfile")
    hostfile.add_argument("--format", choices=formats, default="openmpi", help="what to write; default: openmpi")
    hostfile.add_argument("-o", dest="output", type=Path, metavar="FILE", help="where to; default: standard output")


def _add_check_options(check: argparse.ArgumentParser) -> None:
    _add_host_options(check)
    for name in ("runs", "data"):
        text = f"the {name} folder; default: {name}"
        check.add_argument(f"--{name}-dir", type=Path, default=Path(name), metavar="DIR", help=text)
    check.add_argument("--json", action="store_true", help="for programs; default: a table and the findings")
    check.add_argument("--bandwidth", action="store_true", help="measure each host, every two hosts, GPUs, and all")
    text = "with --bandwidth: compare ways to sum the gradients of this run: its folder, or the traffic.json in it; "
    _add_measured(check, "RUN", f"{text}default: not known")
    _add_nccl_debug(check)
    check.set_defaults(bind="numa", show="0", np=None, no_check=False, **_NO_START)


def _add_measured(command: argparse.ArgumentParser, metavar: str, text: str) -> None:
    command.add_argument("--measured", action="append", default=[], metavar=metavar, help=text)


def _add_nccl_debug(command: argparse.ArgumentParser) -> None:
    text = "keep NCCL's log of each rank in logs/JOB, and report what NCCL does"
    command.add_argument("--nccl-debug", action="store_true", help=text)


def _add_hosts(command: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the two options that list hosts."""
    none = "one of the two is needed" if required else "default: the Slurm allocation, or this host"
    hosts = command.add_mutually_exclusive_group(required=required)
    text = f"hosts and their slots, A alone: one for each GPU; also 'n[01-03]:8', as Slurm spells it; {none}"
    hosts.add_argument("-H", dest="hosts", metavar="A:8,B:4", help=text)
    text = f"the same from a file in any spelling, - for standard input; {none}"
    hosts.add_argument("--hostfile", metavar="FILE", help=text)


def _add_source(command: argparse.ArgumentParser) -> None:
    text = "the output of nvidia-smi topo -m or hvdlaunch topo --json, - for standard input; default: this host"
    command.add_argument("--topology", metavar="FILE", help=text)
    text = "the GPUs' model, which a saved text lacks: A100; default: links without their speed"
    command.add_argument("--gpu-name", metavar="NAME", help=text)


def _add_run_options(command: argparse.ArgumentParser) -> None:
    """Add the options of every command that starts, or would start, a program."""
    _add_host_options(command)
    text = "numa: to the cores near its GPU, on CPUs to a share of its own; cores: always to a share; default: numa"
    command.add_argument("--bind", choices=("numa", "cores", "none"), default="numa", help=text)
    text = "show rank 0, or all ranks line by line; each has its logs/JOB/rank-R.log; default: 0"
    command.add_argument("--show", choices=("0", "all"), default="0", help=text)


def _add_host_options(command: argparse.ArgumentParser) -> None:
    """Add the options of every command that probes hosts."""
    _add_hosts(command)
    command.add_argument("--per-host", type=values.count, metavar="N", help="slots of each host; default: the list's")
    text = "network between the hosts: 10.0.0.0/16, or an interface's name; default: the fastest that connects all"
    command.add_argument("--network", metavar="CIDR|NAME", help=text)
    text = "what starts the ranks; default: auto, which is mpirun"
    command.add_argument("--launcher", choices=("auto", *LAUNCHERS), default="auto", help=text)
    text = "those to choose from on each host, none: CPUs; default: all that are free, CPUs where there is none"
    command.add_argument("--gpus", type=values.gpus_or_none, default="all", metavar="all|0-3|none", help=text)
    text = "keep each K consecutive ranks, such as the stages of one replica, on one host; default: no groups"
    command.add_argument("--ranks-per-replica", type=int, metavar="K", help=text)
    command.add_argument("--apptainer", type=values.image, metavar="IMAGE", help="run inside this image; default: none")
    text = "pass this variable to every rank; default: PATH, NCCL_*, OMP_* and others, on one host all"
    command.add_argument("-x", dest="exports", action="append", default=[], metavar="NAME", help=text)
    command.add_argument("--allow-run-as-root", action="store_true", help=argparse.SUPPRESS)  # silences the note
    text = "for ssh to the hosts, instead of our own: StrictHostKeyChecking=accept-new; default: ~/.ssh/config"
    _add_list(command, "--ssh-option", "KEY=VALUE", text, type=values.ssh_option)
    text = f"how long a host may be silent before the run ends; default: {SILENCE_S:g}"
    command.add_argument("--silence-s", type=values.seconds, default=SILENCE_S, metavar="S", help=text)


def _add_sweep_options(command: argparse.ArgumentParser) -> None:
    text = "ranks of each run; no default"
    command.add_argument("-np", dest="sizes", type=values.sizes, metavar="1,2,4...", help=text)
    text = "runs of each size, with seeds 0, 1...; default: 1"
    command.add_argument("--seeds", type=int, default=1, metavar="S", help=text)
    text = "the program keeps the batch per rank, or the global batch; default: weak"
    command.add_argument("--mode", choices=("weak", "strong"), default="weak", help=text)
    command.add_argument("--price-per-gpu-hour", type=float, metavar="X", help="in any currency; default: no cost")
    text = "report the time to this accuracy in percent, or value of the task's best metric; default: no"
    command.add_argument("--target", "--target-accuracy", dest="target", type=float, metavar="VALUE", help=text)
    command.add_argument("--min-efficiency", type=float, metavar="PERCENT", help="for the advice; default: no limit")
    command.add_argument("--max-accuracy-loss", type=float, metavar="POINTS", help="for the advice; default: no limit")
    command.add_argument("--name", help="folder in sweeps/; default: the same for the same program and options")
    command.set_defaults(**_NO_START)


def _add_tune_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("-np", type=values.count, metavar="N", help="ranks; default: as hvdlaunch run")
    text = "of all starts together; what was not tried by then is named; default: 15"
    command.add_argument("--minutes", type=float, default=15.0, metavar="M", help=text)
    text = "whole trainings with N seeds, where a remedy makes another training; default: 0"
    command.add_argument("--confirm-seeds", type=int, default=0, metavar="N", help=text)
    command.add_argument("--name", help="folder in tunes/; default: the same for the same program and options")
    command.set_defaults(**_NO_START)


def _add_ends(run: argparse.ArgumentParser) -> None:
    text = "after a failure restart from the newest checkpoint, at most N times; default: 0"
    run.add_argument("--restarts", type=int, default=0, metavar="N", help=text)
    text = "with --restarts: continue on the remaining hosts with as few ranks as these; default: as many as at first"
    run.add_argument("--min-np", type=values.count, metavar="M", help=text)
    text = (
        "save and stop if this cloud gives notice that it ends a host, with --restarts continue without it; default: no"
    )
    run.add_argument("--spot", choices=tuple(CLOUDS), help=text)
    text = "run this shell command on rank 0's host for each whole checkpoint, $HVDLAUNCH_CHECKPOINT; default: none"
    run.add_argument("--after-checkpoint", metavar="COMMAND", help=text)
    text = f"seconds for the program to save when it is asked to stop; default: {GRACE_S:g}"
    run.add_argument("--grace-s", type=float, default=GRACE_S, metavar="S", help=text)
