"""mpirun of Open MPI 4."""

from launch.start.launchers.openmpi import OpenMpi


class OpenMpi4(OpenMpi):
    """mpirun of Open MPI 4, whose daemons are part of it."""

    version = 4
    option = "--mca"
    plm = "rsh"
    ras = "^slurm,tm,lsf,gridengine,loadleveler,alps"
    interfaces = "oob_tcp_if_include"
    whole_names = "orte_keep_fqdn_hostnames"
