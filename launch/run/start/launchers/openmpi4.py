"""mpirun of Open MPI 4."""

from launch.run.start.launchers.openmpi import OpenMpi
from launch.run.start.plan import Plan


class OpenMpi4(OpenMpi):
    """mpirun of Open MPI 4, whose daemons are part of it."""

    version = 4
    option = "--mca"
    plm = "rsh"
    ras = "^slurm,tm,lsf,gridengine,loadleveler,alps"
    interfaces = "oob_tcp_if_include"
    whole_names = "orte_keep_fqdn_hostnames"

    def of_daemons(self, plan: Plan) -> list[tuple[str, str, str]]:
        """Return option, name and value; a run that may start again does not wait between SIGTERM and SIGKILL.

        launch.run.rank.stand_in leaves its ranks a moment, but mpirun shows no output of it.
        """
        at_once = [(self.option, "odls_base_sigkill_timeout", "0")] if plan.request.attempt.keeper else []
        return [*super().of_daemons(plan), *at_once]
