"""That freed memory is kept, by the faults that the kernel counts."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, threading, torch
from hvdtrain.ranks.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(10 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
if sys.argv[1:] == ["in-a-thread"]:
    counted = []
    for _ in range(4):  # the heap grows until there is room beside what stays in it
        thread = threading.Thread(target=lambda: counted.append(faults()))
        thread.start()
        thread.join()
    print(min(counted))
else:
    faults()
    print(faults())
"""


@pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION"), reason="another C library than glibc")
@pytest.mark.parametrize(
    ("setting", "few"),
    [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False), ({"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}, False)],
    ids=["by-itself", "users-threshold", "users-tunables"],
)
def test_memory_that_was_freed_is_not_given_back_unless_the_user_has_settings(setting, few):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**own, **setting}, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) < 1000) == few  # of 4 KiB each: 40 MiB twenty times are 204,800


@pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION"), reason="another C library than glibc")
def test_a_thread_such_as_horovods_keeps_its_memory_too():
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    words = [sys.executable, "-c", FAULTS, "in-a-thread"]
    done = subprocess.run(words, env={**own, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000
