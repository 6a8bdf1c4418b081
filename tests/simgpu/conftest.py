import os

from tests.simgpu.start import INSIDE

collect_ignore = [] if INSIDE in os.environ else ["inside"]  # needs a process of its own, which test_simgpu.py starts
