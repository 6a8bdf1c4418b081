"""Looks up what every rank does at its start; a keeper of hvdlaunch imports this once for all its forks."""

import os
import sys

import numpy as np

from hvdtrain.insight.tracking.environment import code_hash, package_versions

_KEEPER = os.getpid()

if "mpi4py.MPI" in sys.modules:
    raise RuntimeError("MPI has started: it cannot be forked")


def _seed_fork() -> None:
    """Give a rank random numbers of its own, as a start by itself would; its own forks have the rank's."""
    if os.getppid() == _KEEPER:
        np.random.seed()  # noqa: NPY002 (of programs that use it)


os.register_at_fork(after_in_child=_seed_fork)
code_hash()
package_versions()
