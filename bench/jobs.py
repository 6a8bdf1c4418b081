"""Ranks of a case: launchers, the answer of a job's rank 0, and two hosts with a slow link between them.

Run as a program, this file is one rank: it calls the function of bench/ that the job names.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.resolve()
PATIENCE_S = 3600  # limit for a job that hangs


def job(launch: Sequence[str], function: str, *, env: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    """Run a job; return what rank 0 writes to the file that `function` gets as its first argument.

    `function` is MODULE:NAME below bench/. Each rank works in a folder that is removed at the end. Ends the benchmark
    if the job fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        words = [*launch, sys.executable, str(HERE / "jobs.py"), function, str(out), json.dumps(arguments)]
        run(words, cwd=Path(folder), env=env)
        return json.loads(out.read_text())


def run(words: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run a command that must succeed; if it fails, end the benchmark with its output."""
    how: dict[str, Any] = {"cwd": cwd, "env": {**environment(), **(env or {})}, "text": True, "errors": "replace"}
    done = subprocess.run(words, capture_output=True, check=False, **how)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n{' '.join(words)}: exit status {done.returncode}")


def environment() -> dict[str, str]:
    """Return the environment of a job: one thread per rank, a timeout for mpirun, root allowed, bench/ importable.

    The caller's PYTHONPATH comes before the checkout, for example to test wheels.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "MPIEXEC_TIMEOUT": str(PATIENCE_S),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE.parent)]),
    }


def mpirun(ranks: int, *words: str) -> list[str]:
    """Return the prefix that starts ranks like a user would."""
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *words]


def hvdlaunch(ranks: int, *words: str) -> list[str]:
    """Return the hvdlaunch of this interpreter."""
    return [sys.executable, "-m", "launch", "run", "-np", str(ranks), *words, "--"]


def torchrun(ranks: int) -> list[str]:
    """Use only the loopback: torchrun's default port may be in use. Arguments must start with the interpreter."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    address = f"--master-addr 127.0.0.1 --master-port {port}"
    return f"timeout {PATIENCE_S} torchrun --nnodes 1 --nproc-per-node {ranks} {address} --no-python".split()


# Two hosts are network namespaces with their own host names. Both are in one process namespace, whose first process
# dies with this one, even after kill -9: the kernel then removes every process and interface.
NIC = "eth0"
ADDRESSES = ("10.74.0.1", "10.74.0.2")
_HOST = """
echo $NAME > /proc/sys/kernel/hostname
mount -t sysfs sysfs /sys
ip link set lo up
"""
_CABLE = f"""
ip address add $ADDRESS/24 dev {NIC}
ip link set {NIC} up
[ "$RATE" = none ] || tc qdisc add dev {NIC} root tbf rate $RATE burst 128kb latency 50ms
"""
_SCRIPT = f"""set -e
mount -t tmpfs tmpfs /dev/shm
export H2
NAME=h2 unshare --net --uts --mount sh -ec '{_HOST} exec sleep infinity' &
H2=$!
until [ $(readlink /proc/$H2/ns/net) != $(readlink /proc/self/ns/net) ]; do sleep 0.01; done
NAME=h1
{_HOST}
ip link add {NIC} type veth peer name {NIC} netns $H2
ADDRESS={ADDRESSES[0]}
{_CABLE}
ADDRESS={ADDRESSES[1]} nsenter --target=$H2 --net sh -ec '{_CABLE}'
"$@"
"""
NAMESPACES = "setpriv --pdeathsig=KILL unshare --mount --uts --ipc --net --pid --fork --kill-child --mount-proc"
_AGENT = '#!/bin/sh\nshift\nexec nsenter --target=$H2 --net --uts --mount sh -c "$*"\n'  # replaces ssh
# btl_tcp_flags: an all-reduce sends in both directions at once, which Open MPI's default does not
# (docs/explanation/benchmarks.md).
_OPEN_MPI = {
    "pml": "ob1",
    "btl": "vader,tcp,self",
    "btl_tcp_if_include": NIC,
    "oob_tcp_if_include": NIC,
    "mpi_yield_when_idle": "1",
    "btl_tcp_flags": "1",
}


@contextmanager
def two_hosts(rate: str, ranks_per_host: int) -> Iterator[list[str]]:
    """Yield an mpirun over both hosts, the first one's ranks first; needs root and iproute2.

    `rate` is in tc's notation, or none.
    """
    missing = [name for name in ("ip", "tc", "unshare", "nsenter", "setpriv") if not shutil.which(name)]
    if os.geteuid() != 0 or missing:
        sys.exit(f"two hosts are network namespaces: run as root, with {', '.join(missing) or 'iproute2'} installed")
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        agent = Path(folder) / "agent"
        agent.write_text(_AGENT)
        agent.chmod(0o755)
        hosts = ",".join(f"{address}:{ranks_per_host}" for address in ADDRESSES)
        settings = {**_OPEN_MPI, "plm_rsh_agent": str(agent)}
        yield [
            *(*NAMESPACES.split(), "env", f"RATE={rate}", f"TMPDIR={folder}", "sh", "-c", _SCRIPT, "sh"),
            *("mpirun", "-np", str(len(ADDRESSES) * ranks_per_host), "-H", hosts, "--bind-to", "none"),
            *(word for pair in settings.items() for word in ("--mca", *pair)),
        ]


def main() -> None:
    """Run one rank of a job."""
    function, out, arguments = sys.argv[1:]
    module, _, name = function.partition(":")
    sys.path = [*sys.path[1:], str(HERE.parent)]
    getattr(import_module(f"bench.{module}"), name)(Path(out), **json.loads(arguments))


if __name__ == "__main__":
    main()
