"""That freed memory is kept, by the faults that the kernel counts."""

import json
import os
import subprocess
import sys

import pytest

SETTINGS = {
    "by-itself": {},
    "users-threshold": {"MALLOC_TRIM_THRESHOLD_": "131072"},
    "users-tunables": {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"},
}
FAULTS = """
import ctypes, json, os, resource, sys, threading
from hvdtrain.safety.memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        memory = libc.malloc(40 * 2**20)  # more than glibc ever learns to keep
        ctypes.memset(memory, 1, 40 * 2**20)
        libc.free(memory)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def in_a_thread():
    counted = []
    for _ in range(4):  # the heap grows until there is room beside what stays in it
        thread = threading.Thread(target=lambda: counted.append(faults()))
        thread.start()
        thread.join()
    return min(counted)

def tell(count, setting):
    if os.fork():
        assert os.wait()[1] == 0
    else:
        os.environ.update(setting)
        keep_freed_memory()
        print(count(), flush=True)
        os._exit(0)

for setting in json.loads(sys.argv[1]):
    tell(lambda: (faults(), faults())[1], setting)
tell(in_a_thread, {})
"""


@pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION"), reason="another C library than glibc")
def test_memory_that_was_freed_is_not_given_back_unless_the_user_has_settings():
    """Also in a thread, as Horovod has one."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    words = [sys.executable, "-c", FAULTS, json.dumps([*SETTINGS.values()])]
    done = subprocess.run(words, env=own, capture_output=True, text=True, check=True)
    *by_setting, in_a_thread = map(int, done.stdout.split())
    # Pages of 4 KiB: 40 MiB five times are 51,200.
    assert [count < 1000 for count in by_setting] == [not setting for setting in SETTINGS.values()]
    assert in_a_thread < 20000  # the heap may grow once more, by one piece of 10,240
