"""mpirun of Open MPI 5."""

from launch.errors import CommandError
from launch.run.start.launchers.openmpi import OpenMpi
from launch.run.start.plan import Plan


class OpenMpi5(OpenMpi):
    """mpirun of Open MPI 5: its daemons are PRRTE's, and ranks can survive the loss of one."""

    version = 5
    option = "--prtemca"
    plm = "ssh"
    ras = "^slurm,pbs,lsf,gridengine,flux"
    interfaces = "prte_if_include"
    whole_names = "prte_keep_fqdn_hostnames"

    def require_survival(self, plan: Plan) -> None:
        """Raise CommandError for --grow on several hosts."""
        if plan.request.grow and len({slot.host for slot in plan.slots}) > 1:
            raise CommandError(
                "--grow: with Open MPI 5.0.11 replacement ranks can join on one host only: drop --grow, or use one "
                "host; with --restarts lost hosts come back when the run starts again"
            )
