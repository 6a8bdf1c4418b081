"""What is around steps, on a simulated GPU: feeds, evaluation, checkpoints, and whole runs of the programs."""

import json
from contextlib import ExitStack

import pytest
import torch

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.saves import Saves, resume
from hvdtrain.core.finite import SpikeWatch
from hvdtrain.core.position import Position
from hvdtrain.loop.evaluation import evaluate
from hvdtrain.loop.save_points import NEVER
from hvdtrain.program import assembly
from hvdtrain.program.run import Run
from hvdtrain.ranks.comm import HorovodComm, SerialComm
from hvdtrain.ranks.sync import GradientSync
from tests.simgpu.cases import EFFNET, FACTORS, FUNCTION, MLM
from tests.simgpu.programs import Prepared, main_of, parse
from tests.simgpu.simulator.horovod import two_ranks
from tests.simgpu.simulator.tensor import CUDA
from tests.unit.checkpoint.checkpoints import folder_of, record_of

# Whether replicas are equal, what is the rank's own, and the rest: docs/explanation/communication.md; two more for the
# state_dict of GradScaler.
CHECKPOINT_WAITS = 5
# How often the host waits inside the first step of a run, for the tensors of its split, and of two epochs, for noise.
WAITS_AT_A_BEGINNING = {"Resident.batches": 2, "draw_noise": 2 * 3}


def prepared(program, *words, comm=None):
    return Prepared(program, [*FACTORS["program"][program].split(), *words], comm or SerialComm(), CUDA)


def no_findings(gpu):
    return [str(finding) for finding in gpu.findings] == []


@pytest.mark.parametrize("program", [EFFNET, MLM])
def test_the_feed_waits_at_the_beginning_of_an_epoch_alone(gpu, program):
    made = prepared(program)
    coming = (micro_batch for _, inputs in made._inputs for micro_batch in inputs)
    next(coming)
    before = len(gpu.waits)
    assert [next(coming) for _ in range(4)]
    assert [str(wait) for wait in gpu.waits[before:]] == []
    assert no_findings(gpu)


@pytest.mark.parametrize(("program", "ranks"), [(EFFNET, 2), (MLM, 1)])
def test_an_evaluation_waits_at_its_ends_alone(gpu, program, ranks):
    with two_ranks(gpu):
        made = prepared(program, comm=HorovodComm(None) if ranks == 2 else SerialComm())
        made.run_step().read()
        evaluate(made.step, made.test, 1, micro_batch=8)  # brings the split to the device
        before = len(gpu.waits)
        assert evaluate(made.step, made.test, 1, micro_batch=8)["loss"] > 0
    waits = gpu.waits[before:]
    assert not [str(wait) for wait in waits if wait.passes("Step.evaluation")]
    assert len(waits) <= 1 + ranks * (program == EFFNET) + ranks, "\n".join(map(str, waits))
    assert no_findings(gpu)


def saves_of(made, folder):
    limits = GradientSync()  # has no state
    reports = type("Reports", (), {"spikes": SpikeWatch(0)})
    state = assembly.state_of(made.step, limits, reports, seed=0)
    return state, Saves(made.step, state, folder_of(folder), record_of(), NEVER, keep=1)


def test_a_checkpoint_waits_a_few_times_and_brings_everything_back(gpu, tmp_path):
    words = ["--precision", "fp16", "--ema-epochs", "2", "--optimizer", "adamw"]
    made = prepared(FUNCTION, *words)
    made.run_step().read()
    _, saves = saves_of(made, tmp_path)
    before = len(gpu.waits)
    saves.save(Position(step=1))
    assert len(gpu.waits) - before == CHECKPOINT_WAITS, "\n".join(map(str, gpu.waits[before:]))
    expected = made.weights()
    assert saves.wait(1)
    other = prepared(FUNCTION, *words)
    assert not torch.equal(other.weights(), expected)
    state, _ = saves_of(other, tmp_path)
    found, _ = files.find_newest(tmp_path / "checkpoints")
    assert resume(state, found).step == 1
    assert torch.equal(other.weights(), expected)
    other.run_step().read()
    before = len(gpu.waits)
    assert other.run_step().read().skipped is None
    assert len(gpu.waits) - before == 1  # what became of the step
    assert no_findings(gpu)


def run_of(program, words, folder):
    """A whole run: its result."""
    settings = parse(program, [*words, "--runs-dir", str(folder), "--run", "r"])
    with ExitStack() as stack:
        run = Run(SerialComm(), settings, stack)
        main_of(program)(run)
        run.started.require_end()
    [result] = folder.rglob("r/result.json")
    return json.loads(result.read_text())


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the next run has another file for stacks
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (FUNCTION, "--epochs 1 --batch-size-per-rank 32 --report-every-steps 2 --checkpoint-every 2steps"),
        pytest.param(EFFNET, f"{FACTORS['program'][EFFNET]} --epochs 1 --precision fp16", marks=pytest.mark.slow),
    ],
)
def test_a_whole_run_waits_between_steps_alone(gpu, tmp_path, program, words):
    assert run_of(program, words.split(), tmp_path)["exit_reason"] == "finished"
    waits = [wait for wait in gpu.waits if wait.passes("Step.__call__")]
    once = [wait for wait in waits if any(map(wait.passes, WAITS_AT_A_BEGINNING))]
    assert len(once) <= sum(WAITS_AT_A_BEGINNING.values())
    assert [str(wait) for wait in waits if wait not in once] == []
    assert no_findings(gpu)
