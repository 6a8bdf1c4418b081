"""Open MPI's mpirun: what versions 4 and 5 share. Other launchers start ranks of Open MPI, too."""

from dataclasses import replace
from itertools import chain
from typing import ClassVar

from launch.hosts.hostfile import to_option
from launch.hosts.ssh import UNANSWERED
from launch.placement.network import LOOPBACK
from launch.placement.slots import hosts_of
from launch.run.start.launchers.launcher import Launcher, Messages
from launch.run.start.plan import Plan

BINDING = ("--bind-to", "none", "--map-by", "slot")  # launch.run.rank.bind binds to the cores of the plan
MESSAGES = Messages(
    # From mpirun, from ssh, and from srun if it replaces ssh.
    lines=(
        *(b"Connection to ", b"Timeout, server ", b"srun: cluster "),
        *(b"mpirun: Forwarding ", b"prterun: Forwarding "),
    ),
    framed=(b"Primary job ", b"mpirun ", b"prterun ", b"ORTE ", b"PRTE ", b"WARNING: Open MPI ", b"MPI_ABORT was "),
    # Process name: [[53071,1],1] of Open MPI 4, [prterun-h1-10042@1,1] of Open MPI 5
    deaths=(
        r"one or more processes exited with .*Process name: \[[^\n]*,(?P<rank>\d+)\]\s+Exit code:\s+(?P<status>\d+)",
        r"process rank (?P<rank>\d+) with PID \d+ on node \S+\s+exited on\s+signal (?P<signal>\d+ \([^)]*\))",
        r"MPI_ABORT was invoked on rank (?P<rank>\d+) in communicator MPI_COMM_WORLD\b.*[Ee]rrorcode:? (?P<status>\d+)",
        r"Primary job  terminated normally, but \d+ process",
        r"lost communication with a remote daemon.*Remote daemon: *\S+ on node (?P<host>\S+)",
    ),
    # Forwarded signals; on a busy machine a failed call for a child that was faster; srun if no plugin binds.
    remarks=r"(?:mpirun|prterun): Forwarding signal \d+ to job\s*"
    r"|\[[^]\s]+\] plm:\w+: Warning: setpgid\([^)]*\) failed in parent .*\s*"
    r"|srun: cluster configuration lacks support for cpu binding\s*",
    # Added when a host or a rank is lost.
    consequences=r"-+\n(?:(?:ORTE|PRTE) was unable to reliably start one or more daemons"
    r"|(?:ORTE|PRTE) does not know how to route"
    r"|WARNING: Open MPI failed to TCP connect to a peer MPI process)|\[[^]\s]+:\d+\] PMIX ERROR",
)


class OpenMpi(Launcher):
    """mpirun; the fields spell the parameters of one version's daemons."""

    name = "mpirun"
    rank_variable = "OMPI_COMM_WORLD_RANK"
    local_rank_variable = "OMPI_COMM_WORLD_LOCAL_RANK"
    receivers = ("mpirun", "orterun", "prterun", "mpiexec")
    messages = MESSAGES
    version: ClassVar[int]
    option: ClassVar[str]
    plm: ClassVar[str]  # starts daemons by ssh and not by the batch system, which ignores our ssh options
    ras: ClassVar[str]  # takes the host list from us
    interfaces: ClassVar[str]
    whole_names: ClassVar[str]  # else a.b and a.c both become host a

    def __str__(self) -> str:
        return str(self.mpi)

    @classmethod
    def over(cls, mpirun: "OpenMpi", *, is_dry: bool) -> Launcher:  # noqa: ARG003
        """Return this mpirun."""
        return mpirun

    def start(self, plan: Plan) -> list[str]:
        """Return mpirun with its options."""
        return [
            self.mpi.path,
            *(["--allow-run-as-root"] if plan.request.as_root else []),
            *np_and_hosts(plan),
            *BINDING,
            *self.agent(),
            *chain.from_iterable(self.parameters(plan)),
            *(word for name in plan.exports for word in ("-x", name)),
        ]

    def ours(self, plan: Plan) -> list[tuple[str, str, str]]:
        """Return the parameters of daemons and ranks."""
        return [*self.of_daemons(plan), *of_ranks(plan)]

    def agent(self) -> list[str]:
        """Return the option for the daemons' agent: the one with which hvdlaunch has probed the hosts.

        The user's parameter may be that of the other version.
        """
        return [self.option, f"plm_{self.plm}_agent", " ".join(self.ssh.agent)]

    def of_daemons(self, plan: Plan) -> list[tuple[str, str, str]]:
        """Return option, name and value: ssh without prompts, detection of silent links, the daemons' networks."""
        daemons = {
            "plm": self.plm,
            "ras": self.ras,
            # qrsh and llspawn would take the agent's place in a job of SGE or LoadLeveler.
            **dict.fromkeys((f"plm_{self.plm}_disable_qrsh", f"plm_{self.plm}_disable_llspawn"), "1"),
            # By default Open MPI waits over ten minutes for a silent link.
            "oob_tcp_keepalive_time": str(self.ssh.sign_every_s),
            "oob_tcp_keepalive_intvl": str(self.ssh.sign_every_s),
            "oob_tcp_keepalive_probes": str(UNANSWERED),
            self.whole_names: "1",
        }
        if self.ssh.arguments:
            daemons[f"plm_{self.plm}_args"] = " ".join(self.ssh.arguments)
        if plan.daemon_networks:
            daemons[self.interfaces] = plan.daemon_networks
        return [(self.option, *each) for each in daemons.items()]


def of_ranks(plan: Plan) -> list[tuple[str, str, str]]:
    """Return option, name and value for ranks: UCX would choose networks by itself, and GPUs use NCCL.

    Open MPI's ofi, which only serves one-sided operations, would take a second of each start or end.
    """
    network = plan.network or str(LOOPBACK)
    return [("--mca", "pml", "ob1"), ("--mca", "btl", "^openib,ofi"), ("--mca", "btl_tcp_if_include", network)]


def np_and_hosts(plan: Plan) -> list[str]:
    """Return the options for the ranks and their hosts; Open MPI 5 knows this machine by few of its names."""
    hosts = [replace(host, name="localhost") if host.name in plan.local else host for host in hosts_of(plan.slots)]
    return ["-np", str(len(plan.slots)), "-H", to_option(hosts)]
