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
import json, os, resource, sys, threading, torch
from hvdtrain.safety.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(10 * 2**20)[::1024] = 1  # each page of more than glibc ever learns to keep
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
os._exit(0)  # to clear up would take a second
"""
pytestmark = pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION"), reason="another C library than glibc")


@pytest.fixture(scope="module")
def faults():
    """How often the kernel had to give memory, by the user's setting, and in a thread."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, json.dumps([*SETTINGS.values()])],
        env={**own, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip((*SETTINGS, "in-a-thread"), map(int, done.stdout.split()), strict=True))


@pytest.mark.parametrize("setting", SETTINGS)
def test_memory_that_was_freed_is_not_given_back_unless_the_user_has_settings(faults, setting):
    assert (faults[setting] < 1000) == (not SETTINGS[setting])  # of 4 KiB each: 40 MiB twenty times are 204,800


def test_a_thread_such_as_horovods_keeps_its_memory_too(faults):
    assert faults["in-a-thread"] < 20000  # the heap may grow once more, by one piece of 10,240
