"""Steps of the programs on a simulated GPU: what is wrong, how often the host waits, and which weights come out."""

from contextlib import nullcontext

import pytest
import torch

from hvdtrain.core.model import batch_norm
from hvdtrain.ranks.comm import HorovodComm, SerialComm
from tests.simgpu import cases
from tests.simgpu.programs import Prepared
from tests.simgpu.simulator.cuda import simulated
from tests.simgpu.simulator.horovod import two_ranks
from tests.simgpu.simulator.tensor import CUDA

STEPS = 2  # in the first one buckets, momentum and the loss scale are made
# Distance of what the steps have changed, as a share of that: the GPU's kernels are those of the host, but for half
# precision, gradients that travel in fp16, and the order of sums.
NEAR = {"fp32": 0.01, "bf16": 0.2, "fp16": 0.2}

VALUES = cases.covering(at_once=1)
PAIRS = [case for case in cases.covering(at_once=2) if case not in VALUES]


def prepared(case, device, comm):
    return Prepared(case["program"], cases.words_of(case), comm, device)


def ranks(case, gpu):
    if cases.ranks_of(case) == 1:
        return nullcontext()
    return two_ranks(gpu, fuses=case["sums"] == cases.HOROVOD)  # as program.join has it


def comm(case):
    return HorovodComm(None) if cases.ranks_of(case) == 2 else SerialComm()


def on_host(case):
    """The weights before and after the same steps on the host, in fp32."""
    case = case | {"precision": "fp32"}
    with ranks(case, None):
        made = prepared(case, torch.device("cpu"), comm(case))
        before = made.weights()
        for _ in range(STEPS):
            made.run_step().read()
        return before, made.weights()


@pytest.mark.parametrize(
    "case", [*VALUES, *(pytest.param(case, marks=pytest.mark.slow) for case in PAIRS)], ids=cases.name_of
)
def test_a_step(case):
    with simulated() as gpu, ranks(case, gpu) as horovod:
        made = prepared(case, CUDA, comm(case))
        for _ in range(STEPS - 1):
            made.run_step().read()
        responses = [] if horovod is None else horovod.responses
        waits_before, responses_before = len(gpu.waits), len(responses)
        pending = made.run_step(measure=True)
        waits = gpu.waits[waits_before:]
        done = pending.read()
        weights = made.weights()
    assert [str(finding) for finding in gpu.findings] == []
    bound = cases.waits_of(
        case,
        responses=len(responses) - responses_before,
        norm_layers=len(batch_norm.layers(made.step.model)),
    )
    # Horovod may have answered for several tensors before the host asks for the first of them: a bound from above.
    is_bounded = len(waits) <= bound if case["sums"] == cases.HOROVOD else len(waits) == bound
    assert is_bounded, "\n".join(map(str, waits))
    assert done.skipped is None
    assert done.grad_norm > 0
    before, expected = on_host(case)
    changed = expected - before
    assert (weights - expected).norm() < NEAR[case["precision"]] * changed.norm()
