"""The commands run, plan, sweep, tune and check, which start a program on ranks or check whether they could."""

import argparse
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path

from launch.advice.estimate.failures import describe
from launch.cli import mistakes
from launch.cli.estimate_options import faults_of
from launch.cli.files import can_be_read_once, hosts_in, listed_hosts, measured_files, read, write
from launch.errors import CommandError, harmless
from launch.hosts.host import Host
from launch.hosts.hostfile import from_option
from launch.hosts.ssh import Ssh, agent_of
from launch.machine import mpi
from launch.machine.saved import read_topology
from launch.machine.software import require_hvdtrain
from launch.machine.system import ROOT, in_container
from launch.machine.topology import Topology
from launch.output import say
from launch.process import find
from launch.run.restart import restarts
from launch.run.start import mpijob, prepare, sbatch
from launch.run.start.launchers.choose import LAUNCHERS
from launch.run.start.request import NOTHING_MEASURED, RunRequest, check, default_hostfile, listed, usual_cores
from launch.run.start.shown import plan_text
from launch.run.supervise import journal, nccl
from launch.run.supervise import run as watched
from launch.run.supervise.screen import terminal_size
from launch.run.supervise.spot.notices import require_notices

# Options with the same names in a RunRequest.
AS_IN_REQUEST = (
    *("np", "per_host", "launcher", "gpus", "ranks_per_replica", "apptainer", "nsys", "network", "show"),
    *("after_checkpoint", "spot"),
)
SLURM, MPIJOB = "--batch FILE.sh", "--batch FILE.yaml"
# Option of run -> the options from which it requires one.
REQUIRES = {
    "--topology": ("hvdlaunch plan", SLURM),
    "--batch-option": ("--batch",),
    "--min-np": ("--restarts",),
    "--save-s": ("--hours",),
}
# Two options of run that do not work together, with the reason.
EXCLUDES = (
    ("--nccl-debug", "--restarts", "it reports on one attempt"),
    ("--nccl-debug", MPIJOB, "nothing is started here"),
    *((f"{each} -", SLURM, "the job has no standard input") for each in ("--hostfile", "--measured")),
    *((each, MPIJOB, "Kubernetes makes the hosts") for each in ("-H", "--hostfile")),
    ("--gpus", MPIJOB, "Kubernetes chooses the GPUs"),
    ("--measured", MPIJOB, "the pods do not have its file"),
    ("--apptainer", MPIJOB, "pods are containers already: use --batch-option image=IMAGE"),
    *((f"--launcher {name}", MPIJOB, kind.not_in_pods) for name, kind in LAUNCHERS.items() if kind.not_in_pods),
)


def _require_fitting(options: argparse.Namespace) -> None:
    """Raise CommandError with all options of run that lack another one, or do not work together."""
    present = {
        **{f"--{name.replace('_', '-')}": value for name, value in vars(options).items()},
        "--hostfile -": options.hostfile is not None and can_be_read_once(options.hostfile),
        "--measured -": any(map(can_be_read_once, options.measured)),
        f"--launcher {options.launcher}": True,
        "hvdlaunch plan": options.command == "plan",
        "-H": options.hosts,
        "--gpus": not isinstance(options.gpus, str),
        "--batch-option": options.batch_options,
        SLURM: options.batch is not None and options.batch.suffix not in mpijob.SUFFIXES,
        MPIJOB: options.batch is not None and options.batch.suffix in mpijob.SUFFIXES,
    }
    used = {name for name, value in present.items() if value}
    wrong = [
        f"{option} requires {' or '.join(needed)}"
        for option, needed in REQUIRES.items()
        if option in used and used.isdisjoint(needed)
    ]
    wrong += [
        f"{first} does not work with {second} ({why}): use only one"
        for first, second, why in EXCLUDES
        if {first, second} <= used
    ]
    if wrong:
        raise CommandError("; ".join(wrong))


def run(options: argparse.Namespace) -> int:
    """Start a program and supervise it; or show what would happen, or write a batch script."""
    _require_fitting(options)
    if not 0 <= options.grace_s < math.inf:
        raise CommandError(f"--grace-s {options.grace_s:g}: pass a number of seconds, at least 0")
    policy = _restart_policy(options)
    if options.batch is not None:
        return (_mpijob if options.batch.suffix in mpijob.SUFFIXES else _sbatch)(options)
    _require(options.command, options)
    if options.command == "plan":
        return _plan(options)
    with journal.alone(os.environ):
        return _start(options, _request(options), policy)


def _start(options: argparse.Namespace, request: RunRequest, policy: restarts.RestartPolicy | None) -> int:
    if policy is not None:
        _note_root(options)
        return restarts.run_with_restarts(_request_reader(options, request), policy, os.environ)
    environment = nccl.with_log(os.environ, Path.cwd()) if options.nccl_debug else os.environ
    prepared = prepare.prepare(request, environment, Path.cwd())
    require_notices(prepared)
    _note_root(options)
    for remark in prepared.plan.remarks:
        say(harmless(remark))
    journal.begin(prepared)
    if options.nccl_debug:
        result, log = nccl.run_logged(prepared, grace_s=options.grace_s)
        for line in nccl.lines_of(log, prepared):
            say(harmless(line))
    else:
        result = watched.run(prepared, grace_s=options.grace_s)
    journal.end(prepared, result)
    return result.status


def sweep(options: argparse.Namespace) -> int:
    """Run a program at several sizes."""
    from launch.advice.study import sweep

    require_hvdtrain("sweep")  # for the table
    _require("sweep", options, [] if options.sizes else ["-np 1,2,4 (ranks of each run)"])
    options.np = max(options.sizes)
    request = _request(options)
    _note_root(options)
    study = sweep.Study(
        request=request,
        sizes=options.sizes,
        seeds=options.seeds,
        mode=options.mode,
        name=options.name,
        price_per_gpu_hour=options.price_per_gpu_hour,
        target=options.target,
        min_efficiency=options.min_efficiency,
        max_accuracy_loss=options.max_accuracy_loss,
    )
    return sweep.sweep(study, os.environ)


def tune(options: argparse.Namespace) -> int:
    """Measure the remedies that a program proposes."""
    from launch.advice.tune import tune

    _require("tune", options)
    request = _request(options)
    _note_root(options)
    return tune.tune(
        request,
        os.environ,
        arguments=_without(("--minutes", "--confirm-seeds", "--name"), options.arguments[1:]),
        minutes=options.minutes,
        confirm_seeds=options.confirm_seeds,
        name=options.name,
    )


def check_hosts(options: argparse.Namespace) -> int:
    """Report problems of hosts; no rank is started on them except the measurements of --bandwidth."""
    from launch.advice.study import bandwidth
    from launch.advice.study import check as study

    if options.nccl_debug and not options.bandwidth:
        raise CommandError("--nccl-debug logs what --bandwidth starts: add that")
    if options.measured and not options.bandwidth:
        raise CommandError("--measured says how many bytes --bandwidth sums: add that")
    if options.bandwidth and options.apptainer is not None:
        raise CommandError("--bandwidth measures with the project of the hosts: leave --apptainer out, or --bandwidth")
    if options.bandwidth:
        require_hvdtrain("check --bandwidth")
    options.program = ["true"]
    request = _request(options)
    if request.measured != NOTHING_MEASURED:
        raise CommandError("--measured: check sums the bytes of a run. Pass the folder of a run, not measurements.")
    if request.traffic is not None and len(request.traffic.parts) > 1:
        raise CommandError(
            f"--measured: a replica of that run is {len(request.traffic.parts)} ranks, and check sums over single "
            "ones. Pass a run of whole replicas."
        )
    if options.bandwidth:
        _note_root(options)
    checked = study.check(request, os.environ, Path.cwd(), runs_dir=options.runs_dir, data_dir=options.data_dir)
    checked = study.with_speeds(checked, request, Path.cwd())
    if options.bandwidth:
        checked = bandwidth.with_bandwidth(checked, request, os.environ, nccl_debug=options.nccl_debug)
    print(study.to_json(checked) if options.json else study.text(checked))
    return checked.status


def _require(what: str, options: argparse.Namespace, missing: Sequence[str] = ()) -> None:
    """Raise CommandError with everything that is missing, including the program, or if the program cannot be a rank."""
    if not options.program and not missing:
        example = f"{options.command} -np {'1,2' if options.command == 'sweep' else 2}"
        raise CommandError(f"no program: put it after --, for example hvdlaunch {example} -- python -m hvdtrain.effnet")
    if not options.program:
        raise CommandError(f"{what} requires {', '.join([*missing, '-- PROGRAM (what each rank runs)'])}")
    installed = options.apptainer is not None or shutil.which(options.program[0]) is not None
    wrong = [f"{what} requires {', '.join(missing)}"] if missing else []
    if (mistake := mistakes.in_program(options.program, installed=installed)) is not None:
        wrong.append(mistake)
    if wrong:
        raise CommandError("; ".join(wrong))


def _request(options: argparse.Namespace) -> RunRequest:
    mpirun = find("mpirun")
    in_files = () if mpirun is None else mpi.from_files(mpirun, os.environ)
    parameters = (*mpi.from_environment(os.environ), *in_files)
    of_hosts, of_run = measured_files(options)
    return RunRequest(
        **{name: getattr(options, name) for name in AS_IN_REQUEST},
        program=tuple(options.program),
        hosts=_hosts(options, parameters),
        topologies=_topologies(options.topology),
        binding=options.bind,
        exports=tuple(options.exports),
        as_root=os.geteuid() == 0,
        terminals=(terminal_size(sys.stdout), terminal_size(sys.stderr)),
        ssh=Ssh(
            agent=agent_of(parameters, os.environ, options.ssh_options),
            options=tuple(options.ssh_options),
            silence_s=options.silence_s,
        ),
        check=not options.no_check,
        measured=of_hosts,
        traffic=of_run,
        parameters=in_files,
    )


def _hosts(options: argparse.Namespace, parameters: Sequence[mpi.Parameter]) -> tuple[Host, ...] | None:
    hosts = listed_hosts(options)
    named = default_hostfile(parameters, os.environ) if hosts is None else None
    if named is None:
        return hosts
    if named.in_file:
        _note_once(f"note: the hosts are those of {harmless(str(named))}")
    return hosts_in(named.value)


@cache
def _note_once(line: str) -> None:  # a run with restarts reads its hosts again and again
    say(line)


def _topologies(specifications: Collection[str]) -> dict[str, Topology]:
    """Return the saved topologies by host; without a host name it is localhost."""
    topologies: dict[str, Topology] = {}
    for word in specifications:
        host, file = word.split("=", 1) if "=" in word else ("localhost", word)
        if not file or [named.name for named in from_option(host)] != [host]:
            raise CommandError(f"--topology {word!r}: pass HOST=FILE, one host")
        if host in topologies:
            raise CommandError(f"--topology {word!r}: {host} has one already: name each host once")
        text, name = read(file)
        topologies[host] = read_topology(text, name=name)
    return topologies


def _plan(options: argparse.Namespace) -> int:
    prepared = prepare.prepare(_request(options), os.environ, Path.cwd())
    print(plan_text(prepared))
    if options.hours is not None:
        ranks = len(prepared.plan.slots)
        lines = describe(faults_of(options), gpus=ranks, hours=options.hours, save_s=options.save_s)
        print("\n".join(["", *lines]))
    return 0


def _note_root(options: argparse.Namespace) -> None:
    """Print a note if ranks start as root outside a container."""
    if os.geteuid() == 0 and not options.allow_run_as_root and not in_container(ROOT, os.environ):
        say("note: the ranks run as root (mpirun --allow-run-as-root)")


def _restart_policy(options: argparse.Namespace) -> restarts.RestartPolicy | None:
    if options.restarts < 0:
        raise CommandError(f"--restarts {options.restarts}: pass a number of at least 0")
    if options.min_np is not None and options.np is not None and options.min_np > options.np:
        raise CommandError(f"--min-np {options.min_np}: pass a number from 1 to -np, which is {options.np}")
    if not options.restarts:
        return None
    return restarts.RestartPolicy(restarts=options.restarts, min_np=options.min_np, grace_s=options.grace_s)


def _request_reader(options: argparse.Namespace, first: RunRequest) -> Callable[[], RunRequest]:
    """Return a function that reads the request with the current hostfile, unless that is a pipe."""
    once = any(map(can_be_read_once, filter(None, (options.hostfile, *options.measured))))
    return (lambda: first) if once else (lambda: _request(options))


def _sbatch(options: argparse.Namespace) -> int:
    request, sbatch_options = _request(options), sbatch.parse_options(options.batch_options)
    hosts = listed(request, {})  # the job does not use the allocation that hvdlaunch runs in
    np = sbatch.tasks(request.np, hosts, sbatch_options)
    unknown = np is None and not request.topologies
    missing = ["-np N (the tasks of the job), or -H A:N with a number for each host"] if unknown else []
    _require("--batch", options, missing)
    check(request, hosts, os.environ)
    slots = prepare.prepare(request, os.environ, Path.cwd()).plan.slots if request.topologies else ()
    np = len(slots) or np or 0
    if hosts is None:
        sbatch.require_room(np, sbatch_options)
    arguments = _without(("--batch", "--batch-option", "--topology"), options.arguments[1:])
    script = sbatch.sbatch(
        [sys.executable, "-P", "-m", "launch", "run", *arguments, "--", *options.program],
        name=sbatch.job_name(request.program),
        folder=str(Path.cwd()),
        np=np,
        per_host=request.per_host,
        nodes=[host.name for host in hosts or ()],
        gpus=request.gpus != "none",
        grace_s=options.grace_s,
        cores_per_rank=sbatch.cores_per_rank(slots, request.topologies) or usual_cores(request),
        options=sbatch_options,
        environment=os.environ,
    )
    write(options.batch, script)
    print(f"submit it with: sbatch {shlex.quote(str(options.batch))}")
    return 0


def _mpijob(options: argparse.Namespace) -> int:
    """Write an MPIJob."""
    request = _request(options)
    pod_options = mpijob.parse_options(options.batch_options, usual_cores(request))
    _require("--batch", options, mpijob.missing(pod_options, options.np))
    workers = mpijob.workers(options.np, request.per_host)
    check(request, workers, os.environ)
    arguments = _without(("--batch", "--batch-option"), options.arguments[1:])
    ssh = [word for option in mpijob.SSH for word in ("--ssh-option", option)]
    run = os.environ.get("HVDLAUNCH_JOB")  # else a unique name, or two jobs would share a run folder
    program = sbatch.job_name(request.program)
    name = mpijob.plain_name(run) if run else mpijob.plain_name(program, stamp=prepare.job_of({}))
    job = mpijob.mpijob(
        ["hvdlaunch", "run", *arguments, *ssh, "--", *options.program],
        name=name,
        options=pod_options,
        workers=workers,
        gpus=request.gpus != "none",
        grace_s=options.grace_s,
        restarts=options.restarts > 0,
        exports=request.exports,
        environment=os.environ,
    )
    write(options.batch, job)
    if secret := mpijob.secrets(request.exports, os.environ):
        lines = "|".join(secret)
        print(f"first: env | grep -E '^({lines})=' | kubectl create secret generic {name} --from-env-file=/dev/stdin")
    print(f"submit it with: kubectl create -f {shlex.quote(str(options.batch))}")
    return 0


def _without(options: Collection[str], arguments: list[str]) -> list[str]:
    """Return the command without these options and their values."""
    kept, skip = [], False
    for word in arguments:
        if skip or word.partition("=")[0] in options:
            skip = not skip and word in options
        else:
            kept.append(word)
    return kept
