"""hvdtrain: PyTorch training with Horovod and MPI that starts right and keeps its accuracy as ranks grow."""
