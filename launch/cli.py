"""hvdlaunch topo | gpus | hostfile | plan | run | sweep: the command line."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from launch.errors import CommandError, LaunchError

if TYPE_CHECKING:
    from types import FrameType

    from launch.hostfile import Host
    from launch.prepare import Ready, Wanted
    from launch.selection import Choice
    from launch.topology import Topology


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Do what the command line says, and end with its status."""
    _open_standard_files()
    words = list(sys.argv[1:] if argv is None else argv)
    words, program = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = parser().parse_args(words)
    options.program, options.words = program, words
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # it is for ranks, which are not there yet
    try:
        if program and options.do not in (_plan, _run, _sweep):
            raise CommandError(f"{options.command} takes no program: leave out what stands after --")
        status = options.do(options)
        sys.stdout.flush()
    except LaunchError as error:
        print(f"hvdlaunch: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.status)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            print(f"hvdlaunch: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status)


def _open_standard_files() -> None:
    """Give a caller that has closed them /dev/null, so that no file of ours gets their numbers."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(free)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _leave(number: int, _: "FrameType | None") -> NoReturn:
    sys.exit(128 + number)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"hvdlaunch: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
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

    def command(name: str, do: Any, text: str, **more: Any) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text, allow_abbrev=False, **more)
        one.set_defaults(do=do, command=name)
        return one

    topo = command("topo", _topo, "show how GPUs, NUMA nodes and NICs of this host are connected")
    _add_source(topo)
    topo.add_argument("--json", action="store_true", help="for programs, and for --from")
    topo.add_argument("--picture", type=Path, metavar="FILE", help="draw it, as .svg or .png")
    topo.add_argument("--pair", type=_indices, metavar="A,B", help="say how two GPUs are connected, and how fast")

    gpus = command("gpus", _gpus, "choose the best K GPUs and their ring order, and say why")
    gpus.add_argument("-k", type=int, required=True, metavar="K", help="how many")
    _add_source(gpus)
    gpus.add_argument("--busy", type=_indices, default=(), metavar="A,B...", help="GPUs that are taken")
    gpus.add_argument("--json", action="store_true", help="for programs")

    hostfile = command("hostfile", _hostfile, "read a list of hosts in any spelling, write it in another")
    hosts = hostfile.add_mutually_exclusive_group(required=True)
    hosts.add_argument("-H", dest="hosts", metavar="A:8,B:4", help="hosts and their slots")
    hosts.add_argument("--slurm-nodes", metavar="NODES", help="as Slurm spells them: 'node[01-03,07]:8'")
    hosts.add_argument("--from", dest="source", metavar="FILE", help="a hostfile, rankfile or hosts.toml; - for stdin")
    hostfile.add_argument(
        "--format", choices=("openmpi", "mpich", "horovod", "rankfile"), default="openmpi", help="what to write"
    )
    hostfile.add_argument("-o", dest="output", type=Path, metavar="FILE", help="where to; else standard output")

    usage = "hvdlaunch {} -np N [options] -- PROGRAM [ARGUMENT]..."
    plan = command(
        "plan", _plan, "show who would run where, the files and the exact command", usage=usage.format("plan")
    )
    run = command("run", _run, "start a program on GPUs or CPUs of one host or many", usage=usage.format("run"))
    for one in (plan, run):
        one.add_argument("-np", type=int, required=True, metavar="N", help="how many ranks")
        _add_run_options(one)
        one.add_argument(
            "--topology", action="append", default=[], metavar="HOST=FILE", help="a saved topology; no host is asked"
        )
    run.add_argument(
        "--sbatch", type=Path, metavar="FILE", help="write a Slurm batch script that does it, start nothing"
    )
    run.add_argument("--dry-run", action="store_true", help="print the exact command, start nothing")
    sweep = command(
        "sweep",
        _sweep,
        "run a program at several sizes, tell what each gives in time, accuracy and cost; continues where it stopped",
        usage="hvdlaunch sweep -np 1,2,4 [options] -- PROGRAM [ARGUMENT]...",
    )
    _add_sweep_options(sweep)
    _add_run_options(sweep)
    return top


def _add_source(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="what nvidia-smi topo -m or rocm-smi --showtopo printed; - for stdin",
    )
    command.add_argument("--gpu-name", metavar="NAME", help="the GPUs' model, which a saved text does not say: A100")


def _add_run_options(command: argparse.ArgumentParser) -> None:
    """The options of every command that starts, or would start, a program."""
    hosts = command.add_mutually_exclusive_group()
    hosts.add_argument("-H", dest="hosts", metavar="A:8,B:4", help="hosts and their slots; default: this host")
    hosts.add_argument("--hostfile", metavar="FILE", help="the same from a file, in any spelling")
    hosts.add_argument("--slurm-nodes", metavar="NODES", help="the same as Slurm spells it; default in an allocation")
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
    command.add_argument("--apptainer", metavar="IMAGE", help="run the program inside this image")
    command.add_argument(
        "-x", dest="exports", action="append", default=[], metavar="NAME", help="give this variable to every rank"
    )
    command.add_argument("--allow-run-as-root", action="store_true", help="needed as root, as in containers")


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
    command.set_defaults(topology=[])


def _indices(text: str) -> tuple[int, ...]:
    words = text.split(",")
    indices = tuple(int(word) for word in words if word.isascii() and word.isdecimal())
    if len(set(indices)) < len(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPU indices, each once, as in 0,3")
    return indices


def _sizes(text: str) -> tuple[int, ...]:
    words = text.split(",")
    sizes = {int(word) for word in words if word.isascii() and word.isdecimal()} - {0}
    if len(sizes) < len(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of ranks, each once, as in 1,2,4")
    return tuple(sorted(sizes))


def _gpus_option(text: str) -> str | tuple[int, ...]:
    return text if text in ("auto", "none") else _indices(text)


def _read(file: str) -> tuple[str, str]:
    """A file's text and its name for messages."""
    try:
        if file == "-":
            return sys.stdin.buffer.read().decode(), "standard input"
        return Path(file).read_bytes().decode(), file  # as they are, line ends too
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{file} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from error


def _write(file: Path, text: str) -> None:
    beside = file.with_name(f"{file.name}.part")
    try:
        beside.write_text(text)
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise LaunchError(f"{file} cannot be written: {error.strerror}") from error


def _topology(options: argparse.Namespace) -> "Topology":
    if options.source is not None:
        from launch.saved import read_topology as read_saved

        text, name = _read(options.source)
        return read_saved(text, name=name, gpu_name=options.gpu_name)
    if options.gpu_name is not None:
        raise LaunchError("--gpu-name is for a saved text, --from FILE; this host is asked for its own")
    from launch.probe import this_topology

    return this_topology(gpus=True)


def _topo(options: argparse.Namespace) -> int:
    from launch import saved, table
    from launch.topology import PeerAccess, to_json

    if options.source is not None and not (options.json or options.picture or options.pair):
        text, name = _read(options.source)
        found = saved.read_text(text, name=name, gpu_name=options.gpu_name)
        print(table.peer_table(found) if isinstance(found, PeerAccess) else table.table(found))
        return 0
    topology = _topology(options)
    if options.picture is not None:
        from launch.picture import draw

        draw(topology, options.picture)
    if options.pair is not None:
        if len(options.pair) != 2:
            raise LaunchError("--pair takes two GPUs, as in 0,1")
        print(table.describe_pair(topology, *options.pair))
    elif options.json:
        import json

        print(json.dumps(to_json(topology), indent=1))
    elif options.picture is None:
        print(table.table(topology))
    return 0


def _gpus(options: argparse.Namespace) -> int:
    from launch.probe import restrict
    from launch.selection import select

    topology = _topology(options)
    if options.source is None:
        topology = restrict(topology, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not topology.gpus:
        raise LaunchError("no GPU found on this host: give a saved topology with --from FILE")
    found = select(topology, options.k, busy=options.busy)
    others = {"runner-up": found.runner_up, "worst": found.worst}
    if options.json:
        import json

        told: dict[str, Any] = {
            "gpus": list(found.best.gpus),
            "ring": list(found.best.ring),
            "bandwidth_gbps": found.best.bandwidth_gbps,
            "reason": found.best.reason,
        }
        for name, choice in others.items():
            told[name.replace("-", "_")] = None if choice is None else list(choice.gpus)
            told[f"{name.replace('-', '_')}_bandwidth_gbps"] = None if choice is None else choice.bandwidth_gbps
        print(json.dumps(told))
        return 0
    print(f"GPUs {','.join(map(str, found.best.gpus))}, ring {'-'.join(map(str, found.best.ring))}{_speed(found.best)}")
    print(f"why: {found.best.reason}")
    for name, choice in others.items():
        if choice is not None:
            print(f"{name}: {','.join(map(str, choice.gpus))}{_speed(choice)}")
    return 0


def _speed(choice: "Choice") -> str:
    return "" if choice.bandwidth_gbps is None else f", {choice.bandwidth_gbps:g} GB/s"


def _hostfile(options: argparse.Namespace) -> int:
    from launch import hostfile

    hosts = _hosts(options)
    assert hosts is not None  # the parser requires one of its sources
    text = hostfile.write(hosts, options.format)
    if options.output is None:
        print(text, end="")
    else:
        _write(options.output, text)
    return 0


def _hosts(options: argparse.Namespace) -> "tuple[Host, ...] | None":
    from launch import hostfile

    if options.hosts is not None:
        return hostfile.from_option(options.hosts)
    if options.slurm_nodes is not None:
        return hostfile.from_slurm(options.slurm_nodes)
    file = options.source if "source" in options else options.hostfile
    if file is None:
        return None
    text, name = _read(file)
    return hostfile.read(text, name=name)


def _wanted(options: argparse.Namespace) -> "Wanted":
    from launch import hostfile
    from launch.prepare import Wanted
    from launch.saved import read_topology

    if not options.program:
        raise CommandError("no program: put it after --, as in hvdlaunch run -np 2 -- python -m hvdtrain.effnet")
    topologies = {}
    for given in options.topology:
        host, equals, file = given.partition("=")
        if not equals or not file or [one.name for one in hostfile.from_option(host)] != [host]:
            raise CommandError(f"--topology {given!r}: give HOST=FILE, one host")
        if host in topologies:
            raise CommandError(f"--topology {given!r}: {host} has one already, give each host once")
        text, name = _read(file)
        topologies[host] = read_topology(text, name=name)
    return Wanted(
        np=options.np,
        program=tuple(options.program),
        hosts=_hosts(options),
        topologies=topologies,
        launcher=options.launcher,
        gpus=options.gpus,
        binding=options.bind,
        apptainer=options.apptainer,
        exports=tuple(options.exports),
        as_root=options.allow_run_as_root,
    )


def _prepared(options: argparse.Namespace) -> "Ready":
    from launch.prepare import prepare

    return prepare(_wanted(options), os.environ, Path.cwd())


def _plan(options: argparse.Namespace) -> int:
    from launch.plan import show

    print(show(_prepared(options)))
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.topology and not options.dry_run:
        raise CommandError("--topology is for plan and --dry-run: a run asks its hosts")
    if options.sbatch is not None:
        return _sbatch(options)
    ready = _prepared(options)
    for remark in ready.remarks:
        print(f"hvdlaunch: {remark}", file=sys.stderr, flush=True)
    if options.dry_run:
        from launch.plan import shell_line

        print(shell_line(ready))
        return 0
    from launch.run import run

    return run(ready).status


def _sweep(options: argparse.Namespace) -> int:
    from launch.sweep import Study, sweep

    options.np = max(options.sizes)
    study = Study(
        wanted=_wanted(options),
        sizes=options.sizes,
        seeds=options.seeds,
        mode=options.mode,
        name=options.name,
        price_per_gpu_hour=options.price_per_gpu_hour,
        target_accuracy=options.target_accuracy,
        min_efficiency=options.min_efficiency,
        max_accuracy_loss=options.max_accuracy_loss,
    )
    return sweep(study, os.environ)


def _sbatch(options: argparse.Namespace) -> int:
    from launch.command import sbatch

    wanted = _wanted(options)
    words = [sys.executable, "-P", "-m", "launch", "run", *_without_sbatch(options.words[1:]), "--", *options.program]
    name = Path(wanted.program[-1] if len(wanted.program) == 1 else wanted.program[0]).name
    nodes = [host.name for host in wanted.hosts or ()]
    script = sbatch(words, name=name, folder=str(Path.cwd()), np=wanted.np, nodes=nodes, gpus=wanted.gpus != "none")
    _write(options.sbatch, script)
    print(f"submit it with: sbatch {options.sbatch}")
    return 0


def _without_sbatch(words: list[str]) -> list[str]:
    """The same command without --sbatch FILE."""
    kept, skip = [], False
    for word in words:
        if skip or word == "--sbatch" or word.startswith("--sbatch="):
            skip = word == "--sbatch"
        else:
            kept.append(word)
    return kept
