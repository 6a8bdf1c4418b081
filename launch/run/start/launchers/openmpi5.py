"""mpirun of Open MPI 5."""

from launch.run.start.launchers.openmpi import OpenMpi


class OpenMpi5(OpenMpi):
    """mpirun of Open MPI 5: its daemons are PRRTE's."""

    version = 5
    option = "--prtemca"
    plm = "ssh"
    ras = "^slurm,pbs,lsf,gridengine,flux"
    interfaces = "prte_if_include"
    whole_names = "prte_keep_fqdn_hostnames"
