"""Horovod's sums on the devices of all ranks, or of one: gradients sent too early, and time by its cycle."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from bench.jobs import job, mpirun, run
from bench.pairs import Case, Table

CUDA = torch.cuda.is_available()
SIZES_MIB = (1, 25, 250) if CUDA else (1,)
WARMUPS, REPEATS = 5, 20


def device_of_rank() -> torch.device:
    """Return the rank's own GPU, for which Horovod needs NCCL."""
    import horovod.torch as hvd

    hvd.init()
    if not CUDA:
        return torch.device("cpu")
    assert hvd.nccl_built(), "Horovod was built without NCCL"
    torch.cuda.set_device(hvd.local_rank())
    return torch.device("cuda", hvd.local_rank())


def times(out: Path) -> None:
    """Run one rank: the median of averages by MiB, ms, including the host's wait for each."""
    import horovod.torch as hvd

    device, found = device_of_rank(), {}
    for mib in SIZES_MIB:
        values, times_ms = torch.ones(mib * 2**18, device=device), []
        for _ in range(WARMUPS + REPEATS):
            started = time.perf_counter()
            hvd.allreduce_(values, op=hvd.Average, name=f"values.{mib}")
            assert values[-1].item() == 1  # waits for the device
            times_ms.append((time.perf_counter() - started) * 1000)
        found[mib] = statistics.median(times_ms[WARMUPS:])
    if hvd.rank() == 0:
        out.write_text(json.dumps(found))
    hvd.shutdown()


def sums(chosen: argparse.Namespace) -> Table:
    """Sums by Horovod on GPUs, or one: are gradients sent too early, and how long does a sum take, by its cycle?"""
    table = Table(
        name="sums",
        question=f"Horovod's averages over {chosen.np} ranks, ms, with the host's wait; none is sent too early:",
        columns=["cycle, ms", *(f"{mib} MiB" for mib in SIZES_MIB)],
    )
    for reducer in ("bucket", "horovod"):
        run([*mpirun(chosen.np), sys.executable, "-m", "tests.gpu.test_sums", "fp16", reducer])
    for cycle_ms in chosen.cycles_ms:
        found = job(mpirun(chosen.np), "cases.gpu_sums:times", env={"HOROVOD_CYCLE_TIME": f"{cycle_ms:g}"})
        table.add(cycle_ms, *(round(ms, 3) for ms in found.values()))
    return table


CASES = {"sums": Case(measure=sums, options={"np": 1, "cycles-ms": [1.0, 0.5, 5.0]})}
