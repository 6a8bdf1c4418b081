"""Binds each rank to its planned GPU and cores, then runs the program.

    mpirun ... python -m launch.run.rank.bind -- python -m hvdtrain.effnet ...

The plan is in HVDLAUNCH_PLAN (JSON by host, zlib, base64), and names the launcher's variable with the rank. The program
finds the attempt and other facts in HVDLAUNCH_RANK (JSON). A forwarder handles the program's output. Standard library
only: this runs once per rank on every host.
"""

import base64
import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import zlib
from typing import Any, NoReturn
from uuid import UUID

from launch.run.rank import forwarder, stand_in

FACTS = "HVDLAUNCH_RANK"
MAX_CORE = 65_535
LOCKS = f"/tmp/hvdlaunch-{os.getuid()}"  # noqa: S108 (the same for every login and job, unlike $TMPDIR; checked)
FLOCK = struct.Struct("hhqqi0q")  # struct flock of fcntl.h: type, whence, start, length, pid
TAKEN = 75  # EX_TEMPFAIL of sysexits.h: a later start selects other GPUs


def main(argv: list[str]) -> NoReturn:
    """Run the program after `--`: this process stands for it."""
    stand_in.die_with(os.getppid())
    program = argv[argv.index("--") + 1 :] if "--" in argv else []
    if not program:
        refuse("usage: python -m launch.run.rank.bind -- PROGRAM [ARGUMENT]...")
    slot = own_slot(os.environ)
    # Cores shared by the ranks of this host: a wrapper around the training, such as nsys, is bound as well.
    facts = {**slot["attempt"], "cores": sorted(os.sched_getaffinity(os.getppid()))}
    launcher = stand_in.become_guard()
    with contextlib.suppress(OSError):  # keep_output reports it
        if job := os.environ.get("HVDLAUNCH_JOB"):  # first: if this rank is refused, an old log would look like its own
            os.close(forwarder.rotate_log(job, slot["rank"]))
    require_planned_place(slot)
    if slot["local_rank"] == 0:  # for all ranks of this host
        hold_gpus(slot["on_host"])
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(slot["on_host"])
    for name, value in slot["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if slot["path"] is not None:
        os.environ["PATH"] = slot["path"]  # the user's: an mpirun with an absolute path puts its own folder first
    os.environ.setdefault("HOME", os.path.expanduser("~"))  # noqa: PTH111 (this host's, from its list of users)
    errors, logs = keep_output(slot)
    os.environ[FACTS] = json.dumps({**facts, **logs})
    bind_to(slot["cores"])
    file = program[0] if "/" in program[0] else slot["executable"] or program[0]
    stand_in.start(file, program, launcher, errors, facts["keeper"], in_session=has_own_cores(slot))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(file, program)  # noqa: S606 (that is what this file is for)
    except OSError as error:
        os.dup2(errors, 2)
        refuse(f"rank {slot['rank']} on {slot['host']} cannot start {file!r}: {error.strerror}")


def own_slot(environment: Any) -> dict[str, Any]:
    """Return this rank's place in the plan, with the local rank that the launcher has assigned."""
    try:
        plan = json.loads(zlib.decompress(base64.b64decode(environment["HVDLAUNCH_PLAN"])))
        rank_variable, local_rank_variable = plan["rank_variables"]
        rank = int(environment[rank_variable])
        slot = slot_of(rank, plan)
        slot |= {name: plan[name] for name in ("executable", "path", "terminals", "attempt")}
        slot["show_all"] = plan["show"] == "all"
        first = rank - slot["local_rank"]
        slot["on_host"] = [slot_of(other, plan) for other in range(first, first + len(slot["ranks"]))]
        slot["found_local_rank"] = int(environment.get(local_rank_variable, slot["local_rank"]))
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError, zlib.error):
        refuse(
            "this process has no place in HVDLAUNCH_PLAN: start it with hvdlaunch run, from the same version of the "
            "project as on this host"
        )
    return slot


def require_planned_place(slot: dict[str, Any]) -> None:
    """Refuse a rank that the launcher has placed differently than planned."""
    hostname, local_rank = socket.gethostname(), slot["found_local_rank"]
    if hostname != slot["hostname"] or local_rank != slot["local_rank"]:
        refuse(
            f"rank {slot['rank']} was planned as local rank {slot['local_rank']} on {slot['hostname']} but is local "
            f"rank {local_rank} on {hostname}: list every host once in -H, under its own name"
        )


def slot_of(rank: int, plan: Any) -> dict[str, Any]:
    """Return the place of a rank; LookupError if the plan has none."""
    first = 0
    for host in plan["hosts"]:
        if first <= rank < first + len(host["ranks"]):
            local_rank = rank - first
            slot = {**host, **host["ranks"][local_rank], "rank": rank, "local_rank": local_rank}
            break
        first += len(host["ranks"])
    else:
        raise LookupError(rank)
    if "gpu_uuids" in slot:  # NVIDIA's, 32 digits for each rank
        slot["gpu_uuid"] = f"GPU-{UUID(slot['gpu_uuids'][32 * local_rank : 32 * local_rank + 32])}"
    # torchrun's variables for the rank's place, whose groups are hosts, and the rendezvous.
    size = sum(len(host["ranks"]) for host in plan["hosts"])
    places = {"RANK": rank, "WORLD_SIZE": size, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": size}
    places |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": len(host["ranks"])}
    places |= {"GROUP_RANK": plan["hosts"].index(host), "GROUP_WORLD_SIZE": len(plan["hosts"])}
    torch = {**{name: str(place) for name, place in places.items()}, **plan["rendezvous"]}
    slot["environment"] = {**torch, **slot["environment"]}
    cores = (range(max(low, 0), min(high, MAX_CORE) + 1) for low, high in slot["cores"])
    return {**slot, "cores": set().union(*cores)}


def has_own_cores(slot: dict[str, Any]) -> bool:
    """Return whether this rank is bound to cores that no other rank of the host may use.

    Such a rank is to have a session of its own. Linux's autogroups give each session the same share of a core: next to
    a busy program a rank then has half of its core, while ranks in one session share one such half. Ranks that share
    cores are faster in one session (docs/explanation/benchmarks.md).
    """
    others = [other["cores"] for other in slot["on_host"] if other["local_rank"] != slot["local_rank"]]
    return bool(slot["cores"]) and all(cores and cores.isdisjoint(slot["cores"]) for cores in others)


def visible_gpus(slots: list[dict[str, Any]]) -> str:
    """Return CUDA_VISIBLE_DEVICES for the ranks of a host: local rank i finds its GPU at index i, as under torchrun."""
    uuids = [slot["gpu_uuid"] for slot in slots]
    return ",".join(uuids if all(uuids) else [str(slot["gpu"]) for slot in slots if slot["gpu"] is not None])


def hold_gpus(slots: list[dict[str, Any]]) -> None:
    """Lock a file for each GPU of these slots, for the lifetime of this process, including the program.

    If two runs are launched simultaneously, one gets all GPUs of a host, since one rank locks them all in a fixed
    order. Other users' runs have another folder, and if /tmp is not writable there are no locks: then only the driver
    reports use of a GPU.
    """
    wanted = {slot["gpu_uuid"]: slot for slot in slots if slot["gpu_uuid"]}
    folder = lock_folder() if wanted else None
    if folder is None:
        return
    for uuid, slot in sorted(wanted.items()):
        name = f"{uuid.replace('/', '_')}.lock"
        try:
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        except OSError:
            continue  # /tmp is full
        os.set_inheritable(file, True)  # by the program; its children have the file, but not the lock
        holder = lock(file)
        if holder is not None:
            run = "another run of yours" + (f" (pid {holder})" if holder else "")
            gpu = f"GPU {slot['gpu']} of {slot['host']}"
            line = f"{gpu} was claimed by {run} after planning. Run the command again for other free GPUs."
            with contextlib.suppress(OSError), open(os.environ.get("HVDLAUNCH_REPORT", ""), "x") as report:  # noqa: PTH123
                json.dump({"said": f"hvdlaunch: error: {line}"}, report)  # so that the launcher adds no line
            refuse(line, TAKEN)
    os.close(folder)


def lock_folder() -> int | None:
    """Open the private folder of this user's locks; None if /tmp is not writable, or the folder is another user's."""
    with contextlib.suppress(OSError):  # it exists already, or cannot be created
        os.mkdir(LOCKS, 0o700)  # noqa: PTH102 (importing pathlib takes longer than the rest of this file)
    try:
        folder = os.open(LOCKS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        facts = os.fstat(folder)
        if facts.st_uid == os.getuid() and not facts.st_mode & 0o077:
            return folder
        os.close(folder)
    except FileNotFoundError:
        return None
    except OSError:  # a link, a file, or another user's
        pass
    say(f"warning: {LOCKS} on {socket.gethostname()} is not private to you: GPUs are not locked")
    return None


def lock(file: int) -> int | None:
    """Lock the file for this process; else return the pid of the holder, 0 if it is not visible here."""
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock_request = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, lock_request))
            if kind != fcntl.F_UNLCK:  # else the holder has just ended
                return int(pid)
        except OSError:
            return None  # a file system without locks
        else:
            return None


def keep_output(slot: dict[str, Any]) -> tuple[int, dict[str, str]]:
    """Start a forwarder for this rank's output; return a copy of the original standard error.

    Also return the folder of the `logs`. If the host cannot store a log, or the job has no name, the output is not
    forwarded.
    """
    if not (job := os.environ.get("HVDLAUNCH_JOB")):
        return 2, {}
    folder = f"{forwarder.LOGS}/{job}"
    try:
        log = forwarder.new_log(job, slot["rank"])
        errors = forwarder.start(log, slot["rank"], show_all=slot["show_all"], terminals=slot["terminals"])
    except OSError as error:
        if slot["local_rank"] == 0:
            why = f"{folder} on {slot['host']} cannot be written: {error.strerror}"
            say(f"warning: {why}: the output of its ranks is shown but not kept")
        return 2, {}
    if slot["terminals"][0] is None:  # into a pipe Python would write 8 KiB at a time; so far this was a terminal
        os.environ["PYTHONUNBUFFERED"] = os.environ.get("PYTHONUNBUFFERED") or "1"
    logs = f"{os.getcwd()}/{folder}"  # noqa: PTH109
    turn_on_flight_recorder(f"{logs}/{forwarder.TORCH_CALLS}")
    return errors, {"logs": logs}


def turn_on_flight_recorder(file: str) -> None:
    """Let torch record its collectives, and at a time-out of NCCL dump them into `file` with the rank appended."""
    for value, *names in (
        ("2000", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("1", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
        (file, "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ):
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


def bind_to(cores: set[int]) -> None:
    """Run on these cores, as far as this process may use them."""
    allowed = os.sched_getaffinity(0) & cores
    if allowed:
        os.sched_setaffinity(0, allowed)


def refuse(message: str, status: int = 2) -> NoReturn:
    """Print one line, and exit with the status."""
    say(f"error: {message}")
    sys.exit(status)


def say(line: str) -> None:
    """Print one line, if standard error takes it."""
    with contextlib.suppress(OSError, ValueError):
        print(f"hvdlaunch: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
