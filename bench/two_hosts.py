"""Two hosts on this machine with a link of a given rate between them, for as long as one mpirun lasts.

A host is a network namespace with its own name; ranks of one share memory, ranks of two have TCP over the link alone.
All of it lives in one process space whose first process dies with this one, kill -9 included: the kernel then takes
every process and interface. Needs root and iproute2.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pairs import PATIENCE_S, environment

NIC = "eth0"
ADDRESSES = ("10.74.0.1", "10.74.0.2")
# Sends alone. By default Open MPI's TCP lets the receiver ask for each piece, and what it asks waits behind the data
# that it sends itself: two ranks that exchange 8 MB at 100 Mbit/s come to 48 Mbit/s in place of 95.
FULL_DUPLEX = {"btl_tcp_flags": "1"}

# /sys/class/net shows the interfaces of whoever mounted it.
_HOST = """
echo $NAME > /proc/sys/kernel/hostname
mount -t sysfs sysfs /sys
ip link set lo up
"""
_CABLE = """
ip address add $ADDRESS/24 dev eth0
ip link set eth0 up
[ "$RATE" = none ] || tc qdisc add dev eth0 root tbf rate $RATE burst 128kb latency 50ms
"""
_SCRIPT = f"""set -e
mount -t tmpfs tmpfs /dev/shm
export H2
NAME=h2 unshare --net --uts --mount sh -ec '{_HOST} exec sleep infinity' &
H2=$!
until [ $(readlink /proc/$H2/ns/net) != $(readlink /proc/self/ns/net) ]; do sleep 0.01; done
NAME=h1
{_HOST}
ip link add eth0 type veth peer name eth0 netns $H2
ADDRESS={ADDRESSES[0]}
{_CABLE}
ADDRESS={ADDRESSES[1]} nsenter --target=$H2 --net sh -ec '{_CABLE}'
"$@"
"""
_NAMESPACES = "setpriv --pdeathsig=KILL unshare --mount --uts --ipc --net --pid --fork --kill-child --mount-proc"
# In place of ssh: mpirun gives it the host and a command line.
_AGENT = '#!/bin/sh\nshift\nexec nsenter --target=$H2 --net --uts --mount sh -c "$*"\n'


def why_not() -> str | None:
    """Why there can be no two hosts here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are made of Linux namespaces, which need root"
    if missing := [name for name in ("ip", "tc", "unshare", "nsenter", "setpriv", "mpirun") if not shutil.which(name)]:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(_inside("1gbit", ["true"]), capture_output=True, text=True, timeout=20, check=False)
    return f"the kernel refuses: {' '.join(tried.stderr.split())}" if tried.returncode else None


def mpirun(rate: str, ranks_per_host: int, agent: Path) -> list[str]:
    """Starts ranks on both hosts, those of the first one first."""
    hosts = ",".join(f"{address}:{ranks_per_host}" for address in ADDRESSES)
    words = ["mpirun", "-np", str(len(ADDRESSES) * ranks_per_host), "-H", hosts, "--bind-to", "none"]
    settings = {
        "plm_rsh_agent": str(agent),
        "pml": "ob1",
        "btl": "vader,tcp,self",
        "btl_tcp_if_include": NIC,
        "oob_tcp_if_include": NIC,
        "mpi_yield_when_idle": "1",
        **FULL_DUPLEX,
    }
    return _inside(rate, [*words, *(word for pair in settings.items() for word in ("--mca", *pair))])


def run(rate: str, ranks_per_host: int, program: Sequence[str]) -> None:
    """A Python file and its words on all ranks; ends the bench where it fails. `rate` as tc spells it, or none."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        agent = Path(folder) / "agent"
        agent.write_text(_AGENT)
        agent.chmod(0o755)
        words = [*mpirun(rate, ranks_per_host, agent), sys.executable, *program]
        done = subprocess.run(words, env={**environment(), "TMPDIR": folder}, timeout=2 * PATIENCE_S, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(program)}: exit status {done.returncode}")


def _inside(rate: str, words: Sequence[str]) -> list[str]:
    return [*_NAMESPACES.split(), "env", f"RATE={rate}", "sh", "-c", _SCRIPT, "sh", *words]


def sent_bytes() -> int:
    """What this rank's host has sent over the link."""
    return int(Path(f"/sys/class/net/{NIC}/statistics/tx_bytes").read_text())
