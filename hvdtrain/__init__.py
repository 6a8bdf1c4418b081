"""hvdtrain: PyTorch training with Horovod and MPI that starts right and keeps its accuracy as ranks grow."""

import os
import sys

if os.environ.pop("_HVDTRAIN_MPI_FIRST", None):
    # A newcomer: if it ended before MPI_Init, as in the imports to come, who has started it would wait for ever.
    # This is the one import of MPI outside hvdtrain.ranks.
    from hvdtrain.ranks.memory import keep_freed_memory
    from hvdtrain.safety import exits

    exits.end_by_signal()
    keep_freed_memory()
    from mpi4py import MPI  # noqa: F401
elif sys.argv[:1] == ["-m"]:  # python -m hvdtrain.effnet, which is to come and imports torch
    from hvdtrain.safety.room import require_room

    require_room(os.environ)
