"""Ranks of tests start as forks of this process, a keeper that has imported torch, Horovod and the programs.

A fork costs a few hundredths of a second of a core where the imports cost 2 s. The process that a launcher has started
(sitecustomize.py) stands for it. MPI and Horovod start in the fork. What is about the order of imports, about memory,
processes or a terminal has to start by itself.

    python forkserver.py NAME     of its socket; until its standard input ends
"""

import atexit
import gc
import importlib
import os
import socket
import sys
from functools import cache

from launch.run.rank import keeper

PROGRAMS = ("hvdtrain.effnet", "hvdtrain.bert", "hvdtrain.bandwidth")
# What they import once the ranks have agreed on their settings.
LATE = (
    *("hvdtrain.program.job", "hvdtrain.program.start", "hvdtrain.program.training"),
    *("hvdtrain.recipe.sync_batch_norm", "hvdtrain.core.replica.parts", "hvdtrain.parallel.stages.layout"),
    *("hvdtrain.parallel.sync.rounds", "hvdtrain.loop.witnesses.find_nan", "torch.utils.serialization"),
    *("hvdtrain.tasks.vision.data", "hvdtrain.tasks.vision.models", "hvdtrain.tasks.vision.task"),
    *("hvdtrain.tasks.text.data", "hvdtrain.tasks.text.export", "hvdtrain.tasks.text.model"),
    *("hvdtrain.tasks.text.pretrained", "hvdtrain.tasks.text.task", "hvdtrain.tasks.text.weights"),
    "torch.utils.tensorboard",
)


@atexit.register  # before any other, so that it is called last
def end() -> None:
    """Python would take its modules apart, for half a second of a core."""
    if (mpi := sys.modules.get("mpi4py.MPI")) and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    status = 0
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):  # the forks have both, but not the variables
        os.environ.pop(name, None)
    first = keeper.fixed(os.environ)
    for name in ("horovod.torch", *PROGRAMS, *LATE):
        importlib.import_module(name)
    for name in PROGRAMS:
        del sys.modules[name]  # each is a __main__
    images, environment = (
        sys.modules[f"hvdtrain.{name}"] for name in ("tasks.vision.images", "insight.tracking.environment")
    )
    images.digits = cache(images.digits)
    images.digits(), environment.code_hash(), environment.package_versions()
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{sys.argv[1]}")
        server.listen(64)
        while "lifeline" not in (request := keeper.serve(server, first)):
            pass
    del sys.path[0]
    try:
        keeper.run(request["words"], request["lifeline"])
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        raise
