"""That freed memory is kept, by the faults that the kernel counts."""

import json
import os
import subprocess
import sys

import pytest

SETTINGS = [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}]
FAULTS = """
import ctypes, json, os, resource, sys
from hvdtrain.settings.safety.memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        memory = libc.malloc(40 * 2**20)  # more than glibc ever learns to keep
        ctypes.memset(memory, 1, 40 * 2**20)
        libc.free(memory)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for setting in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0
    else:
        os.environ.update(setting)
        keep_freed_memory()
        faults()
        print(faults(), flush=True)
        os._exit(0)
"""


@pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION"), reason="another C library than glibc")
def test_memory_that_was_freed_is_not_given_back_unless_the_user_has_settings():
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    words = [sys.executable, "-c", FAULTS, json.dumps(SETTINGS)]
    done = subprocess.run(words, env=own, capture_output=True, text=True, check=True)
    # Pages of 4 KiB: 40 MiB five times are 51,200.
    assert [int(count) < 1000 for count in done.stdout.split()] == [not setting for setting in SETTINGS]
