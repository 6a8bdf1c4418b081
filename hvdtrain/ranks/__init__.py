"""All that crosses ranks; the only place of Horovod and mpi4py."""
