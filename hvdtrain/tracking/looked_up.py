"""Looks up what every rank does at its start; a keeper of hvdlaunch imports this once for all its forks."""

import os
import sys

import numpy as np

from hvdtrain.tracking.environment import code_hash, package_versions

if "mpi4py.MPI" in sys.modules:
    raise RuntimeError("MPI has started: it cannot be forked")

code_hash()
package_versions()
os.register_at_fork(after_in_child=np.random.seed)  # else all forks draw the same numbers
