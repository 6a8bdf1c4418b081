"""hvdlaunch topo | gpus | hostfile | plan | run | sweep: the command line."""

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from launch.cli.options import parser
from launch.errors import CommandError, LaunchError, harmless, in_one_line

if TYPE_CHECKING:
    from types import FrameType

    from launch.choose.selection import Choice
    from launch.hosts.host import Host
    from launch.machine.topology import Topology
    from launch.start.render import PreparedRun
    from launch.start.request import RunRequest
    from launch.watch.supervise import RestartPolicy


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Do what the command line says, and end with its status."""
    _open_standard_files()
    words = list(sys.argv[1:] if argv is None else argv)
    words, program = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = parser().parse_args(words)
    options.program, options.words = program, words
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # while ranks run, launch.watch.run has them
        signal.signal(number, _leave)
    try:
        if program and options.command not in ("plan", "run", "sweep"):
            raise CommandError(f"{options.command} takes no program: leave out what stands after --")
        status = _do(options)
        sys.stdout.flush()
    except LaunchError as error:
        below = (f"    {harmless(line)}".rstrip() for line in error.details)
        print("\n".join([f"hvdlaunch: {in_one_line(error)}", *below]), file=sys.stderr)
        sys.exit(error.status)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            print(f"hvdlaunch: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status)


def _do(options: argparse.Namespace) -> int:
    do = {"topo": _topo, "gpus": _gpus, "hostfile": _hostfile, "plan": _plan, "run": _run, "sweep": _sweep}
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


def _read(file: str) -> tuple[str, str]:
    """A file's text and its name for messages."""
    from launch.files import read_text, text_of

    try:
        return (text_of(sys.stdin.buffer), "standard input") if file == "-" else (read_text(Path(file)), file)
    except (OSError, ValueError) as error:
        raise LaunchError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _write(file: Path, text: str) -> None:
    from launch.files import write_whole

    try:
        write_whole(file, text)
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror}") from error


def _topology(options: argparse.Namespace) -> "Topology":
    if options.source is not None:
        from launch.machine.saved import read_topology as read_saved

        text, name = _read(options.source)
        return read_saved(text, name=name, gpu_name=options.gpu_name)
    if options.gpu_name is not None:
        raise LaunchError("--gpu-name is for a saved text, --from FILE; this host is asked for its own")
    from launch.machine.local import local_topology

    return local_topology(gpus=True, timeout_s=options.driver_timeout_s)


def _topo(options: argparse.Namespace) -> int:
    from launch.machine import saved
    from launch.machine.show import table
    from launch.machine.topology import PeerAccess, to_json

    if options.source is not None and not (options.json or options.picture or options.pair):
        text, name = _read(options.source)
        found = saved.read_text(text, name=name, gpu_name=options.gpu_name)
        print(table.peer_table(found) if isinstance(found, PeerAccess) else table.table(found))
        return 0
    topology = _topology(options)
    if options.picture is not None:
        from launch.machine.show.picture import draw

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
    from launch.choose.selection import select
    from launch.machine.topology import restrict

    topology = _topology(options)
    if options.source is None:
        topology = restrict(topology, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not topology.gpus:
        raise LaunchError("no GPU found on this host: give a saved topology with --from FILE")
    found = select(topology, options.k, busy=options.busy)
    others = {"runner-up": found.runner_up, "worst": found.worst}
    if options.json:
        import json

        answer: dict[str, Any] = {
            "gpus": list(found.best.gpus),
            "ring": list(found.best.ring),
            "bandwidth_gbps": found.best.bandwidth_gbps,
            "reason": found.best.reason,
        }
        for name, choice in others.items():
            answer[name.replace("-", "_")] = None if choice is None else list(choice.gpus)
            answer[f"{name.replace('-', '_')}_bandwidth_gbps"] = None if choice is None else choice.bandwidth_gbps
        print(json.dumps(answer))
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
    from launch.hosts import hostfile

    hosts = _hosts(options)
    assert hosts is not None  # the parser requires one of its sources
    text = hostfile.write(hosts, options.format)
    if options.output is None:
        print(text, end="")
    else:
        _write(options.output, text)
    return 0


def _hosts(options: argparse.Namespace) -> "tuple[Host, ...] | None":
    from launch.hosts import hostfile
    from launch.hosts.slurm import from_slurm

    if options.hosts is not None:
        return hostfile.from_option(options.hosts)
    if options.slurm_nodes is not None:
        return from_slurm(options.slurm_nodes)
    file = options.source if "source" in options else options.hostfile
    if file is None:
        return None
    text, name = _read(file)
    return hostfile.read(text, name=name)


def _request(options: argparse.Namespace) -> "RunRequest":
    from launch.hosts import hostfile
    from launch.machine.saved import read_topology
    from launch.reach.ssh import Ssh, agent_of
    from launch.start.request import RunRequest

    if not options.program:
        raise CommandError("no program: put it after --, as in hvdlaunch run -np 2 -- python -m hvdtrain.effnet")
    topologies = {}
    for given in options.topology:
        host, equals, file = given.partition("=")
        if not equals or not file or [named.name for named in hostfile.from_option(host)] != [host]:
            raise CommandError(f"--topology {given!r}: give HOST=FILE, one host")
        if host in topologies:
            raise CommandError(f"--topology {given!r}: {host} has one already, give each host once")
        text, name = _read(file)
        topologies[host] = read_topology(text, name=name)
    return RunRequest(
        np=options.np,
        program=tuple(options.program),
        hosts=_hosts(options),
        topologies=topologies,
        launcher=options.launcher,
        gpus=options.gpus,
        binding=options.bind,
        ranks_per_replica=options.ranks_per_replica,
        apptainer=options.apptainer,
        nsys=options.nsys,
        network=options.network,
        exports=tuple(options.exports),
        as_root=options.allow_run_as_root,
        reach=Ssh(
            agent=agent_of(os.environ, options.ssh_options),
            options=tuple(options.ssh_options),
            silence_s=options.silence_s,
        ),
        driver_timeout_s=options.driver_timeout_s,
    )


def _prepared(options: argparse.Namespace) -> "PreparedRun":
    from launch.start.prepare import prepare

    return prepare(_request(options), os.environ, Path.cwd())


def _plan(options: argparse.Namespace) -> int:
    from launch.start.shown import plan_text

    print(plan_text(_prepared(options)))
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.topology and not (options.dry_run or options.sbatch):
        raise CommandError("--topology is for plan, --dry-run and --sbatch: a run asks its hosts")
    if options.sbatch is not None and options.hostfile == "-":
        raise CommandError("--hostfile -: the job has no such input: write it to a file, or give -H")
    if options.sbatch_options and options.sbatch is None:
        raise CommandError("--sbatch-option is for the script that --sbatch FILE writes: add that")
    if not 0 <= options.grace_s < math.inf:
        raise CommandError(f"--grace-s {options.grace_s:g}: give a number of seconds, at least 0")
    policy = _restart_policy(options)
    if options.sbatch is not None:
        return _sbatch(options)
    if policy is not None and not options.dry_run:
        from launch.watch.supervise import supervise

        return supervise(_request_reader(options), policy, os.environ)
    prepared = _prepared(options)
    for remark in prepared.plan.remarks:
        print(f"hvdlaunch: {harmless(remark)}", file=sys.stderr, flush=True)
    if options.dry_run:
        from launch.start.shown import shell_line

        print(shell_line(prepared))
        return 0
    from launch.watch.run import run

    return run(prepared, grace_s=options.grace_s).status


def _restart_policy(options: argparse.Namespace) -> "RestartPolicy | None":
    from launch.watch.supervise import RestartPolicy

    if options.restarts < 0:
        raise CommandError(f"--restarts {options.restarts}: give a number of at least 0")
    if options.min_np is not None and not options.restarts:
        raise CommandError("--min-np is for a run that is started again: add --restarts N")
    least = options.np if options.min_np is None else options.min_np
    if options.restarts and not 1 <= least <= max(1, options.np):
        raise CommandError(f"--min-np {least}: give a number from 1 to -np, which is {options.np}")
    return RestartPolicy(restarts=options.restarts, min_np=least, grace_s=options.grace_s) if options.restarts else None


def _request_reader(options: argparse.Namespace) -> "Callable[[], RunRequest]":
    """What reads the request, with the hostfile as it is then; standard input can be read but once."""
    first = _request(options)
    return (lambda: first) if options.hostfile == "-" else (lambda: _request(options))


def _sweep(options: argparse.Namespace) -> int:
    from launch.study.sweep import Study, sweep

    options.np = max(options.sizes)
    study = Study(
        request=_request(options),
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
    from launch.start import sbatch
    from launch.start.prepare import prepare
    from launch.start.request import check

    request, own = _request(options), sbatch.parse_options(options.sbatch_options)
    check(request, request.hosts, os.environ)
    if request.hosts is None:
        sbatch.require_room(request.np, own)
    cpus = None
    if request.topologies:
        slots = prepare(request, os.environ, Path.cwd()).plan.slots
        cpus = sbatch.cpus_per_task(slots, request.topologies)
    words = _without(("--sbatch", "--sbatch-option", "--topology"), options.words[1:])
    script = sbatch.sbatch(
        [sys.executable, "-P", "-m", "launch", "run", *words, "--", *options.program],
        name=sbatch.job_name(request.program),
        folder=str(Path.cwd()),
        np=request.np,
        nodes=[host.name for host in request.hosts or ()],
        gpus=request.gpus != "none",
        grace_s=options.grace_s,
        cpus_per_task=cpus,
        options=own,
        environment=os.environ,
    )
    _write(options.sbatch, script)
    print(f"submit it with: sbatch {options.sbatch}")
    return 0


def _without(options: Collection[str], words: list[str]) -> list[str]:
    """The same command without these options and their values."""
    kept, skip = [], False
    for word in words:
        if skip or word.partition("=")[0] in options:
            skip = not skip and word in options
        else:
            kept.append(word)
    return kept
