"""Slurm's srun, which starts ranks as one step of the allocation, without daemons of MPI: they connect over PMIx."""

import os
import re
import signal
from dataclasses import dataclass

from launch.errors import CommandError
from launch.hosts import srun
from launch.machine.topology import OUTSIDE
from launch.placement.slots import hosts_of
from launch.process import ask, find
from launch.run.start.launchers.launcher import Launcher, Messages
from launch.run.start.launchers.openmpi import OpenMpi, of_ranks
from launch.run.start.plan import Plan

ANSWER_S = 10.0
# launch.run.rank.bind binds to the cores of the plan; the first rank that fails ends the step.
STEP = ("--overlap", "--cpu-bind=none", "--mpi=pmix", "--kill-on-bad-exit=1", "--input=none")
SIGNALS = "|".join([*(re.escape(signal.strsignal(number) or "") for number in signal.Signals), "Out Of Memory"])


@dataclass(frozen=True, kw_only=True)
class Srun(Launcher):
    """srun inside an allocation."""

    path: str

    name = "srun"
    rank_variable = "SLURM_PROCID"
    local_rank_variable = "SLURM_LOCALID"
    receivers = ("srun",)
    has_daemons = False
    exports_all = True
    not_in_pods = "the pods are not in a Slurm allocation"
    messages = Messages(
        lines=(b"srun: ", b"slurmstepd"),
        deaths=(
            r"^srun: error: \S+: tasks? (?P<rank>\d+)[\d,-]*: Exited with exit code (?P<status>\d+)",
            rf"^srun: error: \S+: tasks? (?P<rank>\d+)[\d,-]*: (?P<signal>{SIGNALS})",
            r"^srun: error: Node failure on (?P<host>[^\s,]+)",
        ),
        remarks=r"srun: (?:cluster configuration lacks support for cpu binding|Force Terminated \S+|"
        r"launch/slurm: _step_signal: Terminating \S+|Terminating \S+)\s*",
        consequences=r"srun: (?:Job step aborted: Waiting up to|error: Timed out waiting for job step to complete)"
        r"|slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ (?:CANCELLED|FAILED)",
    )

    @classmethod
    def over(cls, mpirun: OpenMpi, *, is_dry: bool) -> Launcher:
        """Return the srun in PATH; CommandError without an allocation, or if this Slurm has no PMIx."""
        path = find("srun") or "srun"
        if not is_dry:
            if not srun.inside(os.environ):
                raise CommandError(
                    "--launcher srun: this is not a Slurm allocation. Start it in a job (salloc, sbatch), or use "
                    "--launcher mpirun."
                )
            listed = ask([path, "--mpi=list"], timeout_s=ANSWER_S)
            if "pmix" not in listed.out + listed.err:
                raise CommandError("--launcher srun: this Slurm has no PMIx (srun --mpi=list). Use --launcher mpirun.")
        return cls(path=path, python=mpirun.python, mpi=mpirun.mpi, ssh=mpirun.ssh)

    def start(self, plan: Plan) -> list[str]:
        """Return srun with its options; the step has all GPUs of the job, of which launch.run.rank.bind shows some."""
        hosts = hosts_of(plan.slots)
        gpus = {sum(gpu.unusable != OUTSIDE for gpu in own.gpus) for own in plan.topologies.values()}
        return [
            self.path,
            *STEP,
            *([f"--gres=gpu:{max(gpus)}"] if plan.slots[0].gpu is not None and len(gpus) == 1 else []),
            f"--nodes={len(hosts)}",
            f"--ntasks={len(plan.slots)}",
            # The ranks of a host one after the other, as the plan numbers them.
            "--distribution=arbitrary",
            f"--nodelist={','.join(host.name for host in hosts for _ in range(host.slots))}",
        ]

    def ours(self, plan: Plan) -> list[tuple[str, str, str]]:
        """Return the parameters of ranks."""
        return of_ranks(plan)

    def variables(self, plan: Plan) -> dict[str, str]:
        """Return Open MPI's parameters, for which there is no mpirun, except those that the user has set."""
        return {f"OMPI_MCA_{name}": value for _, name, value in self.parameters(plan)}

    def environment(self, plan: Plan) -> dict[str, str]:
        """Return the environment of srun: without the variables of the step or batch script that it is started in."""
        return {**srun.step_environment(plan.environment), **self.variables(plan)}
