"""All communication between ranks; the only package that imports Horovod and mpi4py."""
