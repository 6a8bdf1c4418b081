"""hvdtrain: PyTorch training with Horovod and MPI that starts right and keeps its accuracy as ranks grow."""

import os

if os.environ.pop("HVDTRAIN_MPI_FIRST", None):
    # A newcomer: if it ended before MPI_Init, as in the imports to come, who has started it would wait for ever.
    # This is the one import of MPI outside hvdtrain.ranks, whose modules import torch.
    from hvdtrain.ranks.memory import keep_freed_memory
    from hvdtrain.safety import exits

    exits.end_by_signal()
    keep_freed_memory()
    from mpi4py import MPI  # noqa: F401
