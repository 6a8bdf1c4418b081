"""--sync two-level and local: groups of ranks, on one host, against a plain loop and through the real programs."""

import itertools

import pytest
import torch
from torch.nn import functional

from hvdtrain.feed.order import cut, permutation, shard
from tests.mpi.conftest import EFFNET, PROGRAMS, slow
from tests.mpi.interrupted import TINY, same_end
from tests.refusals import require_facts
from tests.steps import images_of, split

IMAGES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS, LR, CLIP_NORM = 50, 12, 2, 2, 0.05, 1.45
TRAIN = [*TINY, "--batch-size-per-rank", "32", "--epochs", "2"]


def images():
    """A few at random; on a scale on which a net learns."""
    return images_of(split(IMAGES, side=8), split(4, side=8), is_mirrorable=False)


def net():
    """Without batch norm: the batches of ranks do not matter."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)
    )


class PlainGroup:
    """One group's model in the shortest loop."""

    def __init__(self):
        torch.manual_seed(0)
        self.norms = []
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4)
        for one in self.model.parameters():
            self.optimizer.state[one]["momentum_buffer"] = torch.zeros_like(one)

    def step(self, samples):
        tensors = images().train.tensors
        self.optimizer.zero_grad()
        pictures = tensors["images"][samples].float() / 255
        functional.cross_entropy(self.model(pictures), tensors["labels"][samples]).backward()
        self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM).item())
        self.optimizer.step()

    def tensors(self):
        parameters = list(self.model.parameters())
        return [*parameters, *(self.optimizer.state[one]["momentum_buffer"] for one in parameters)]


@torch.no_grad()
def meet(groups):
    for alike in zip(*(group.tensors() for group in groups), strict=True):
        mean = sum(alike) / len(alike)
        for one in alike:
            one.copy_(mean)


def expected(ranks, every_steps, from_epoch, group_size):
    """Weights and momenta of local SGD with clipped gradients, one group after the other."""
    groups = [PlainGroup() for _ in range(ranks // group_size)]
    numbers = itertools.count(1)
    for epoch in range(EPOCHS):
        order = permutation(IMAGES, seed=7, epoch=epoch)
        batches = cut(IMAGES, GLOBAL_BATCH)
        for place, number in zip(batches, numbers, strict=False):
            batch = order[place]
            if not every_steps or epoch < from_epoch:
                for group in groups:
                    group.step(batch)
                continue
            for index, group in enumerate(groups):
                own = range(index * group_size, (index + 1) * group_size)
                group.step(torch.cat([batch[shard(len(batch), rank, ranks)] for rank in own]))
            if number % every_steps == 0 or place == batches[-1]:
                meet(groups)
    assert min(groups[0].norms) < CLIP_NORM < max(groups[0].norms)
    parts = groups[0].tensors()
    half = len(parts) // 2
    return [torch.cat([one.detach().flatten() for one in some]) for some in (parts[:half], parts[half:])]


@pytest.mark.parametrize(
    ("ranks", "rounds", "group_size", "wire"),
    [
        (2, (0, 0), 1, "none"),
        (4, (3, 0), 2, "none"),  # a group of one would hide what is divided by the number of ranks
        slow(4, (0, 0), 2, "none"),
        (2, (0, 0), 1, "fp16"),
        slow(2, (2, 1), 1, "fp16"),
    ],
)
def test_weights_are_those_of_a_plain_loop(run, tmp_path, ranks, rounds, group_size, *, wire):
    """On the wire fp16 rounds by 2^-11."""
    every_steps, from_epoch = rounds
    words = map(str, (PROGRAMS / "group_steps.py", tmp_path, every_steps, from_epoch, group_size, wire))
    done = run("mpirun", ranks, list(words))
    assert done.returncode == 0, done.stderr
    of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    for name, other in itertools.product(of_ranks[0], of_ranks[1:]):
        assert torch.equal(of_ranks[0][name], other[name]), name
    weights, momenta = expected(ranks, every_steps, from_epoch, group_size)
    flat, _ = expected(ranks, 0, 0, group_size)
    bound = 1e-6 if wire == "none" else 1e-3
    assert (of_ranks[0]["weights"] - weights).abs().max() < bound
    assert (of_ranks[0]["momenta"] - momenta).abs().max() < bound
    assert every_steps == 0 or (weights - flat).abs().max() > 1e-4  # what local is, is seen


FEW = (*TINY, "--images=640", "--batch-size-per-rank", "64")  # 5 steps an epoch
FP16 = (*FEW, "--epochs", "1", "--sync", "two-level", "--sync-group-size", "1")
FP16 = (*FP16, "--compression", "fp16", "--checkpoint-every-steps", "2", "--check-replicas-every", "2")


@pytest.mark.slow
def test_a_run_in_fp16_between_groups_goes_on_with_the_same_bits(runs, reference):
    run = runs(2, FP16)
    run.killed("step4", saved=2)
    run.finish()
    same_end(run, reference(2, FP16))


@pytest.mark.slow
def test_a_nan_between_groups_in_fp16_is_skipped_by_all_and_named(runs):
    run = runs(2, FP16)
    said = run.finish(HVDTRAIN_FAULT="nan@rank1:step3")
    assert "step 3: skipped on all ranks, NaN or Inf in the loss of rank 1" in said
    assert run.result["skipped_steps"] == 1
    assert len(run.weights) == 1


LOCAL = (*FEW, "--epochs", "2", "--sync", "local", "--sync-every", "3")
LOCAL = (*LOCAL, "--sync-group-size", "1", "--checkpoint-every-steps", "1", "--report-every-steps", "3")


def test_a_run_is_saved_where_groups_meet_and_goes_on_from_there_with_the_same_bits(runs, reference):
    """They meet after 3 and 5 steps of an epoch; killed in the middle of a round, or asked to leave there."""
    run = runs(2, LOCAL)
    run.killed("step5", saved=3)
    said = run.asked("step7")
    assert "saved at step 9" in said
    run.finish()
    same_end(run, reference(2, LOCAL))


def nans(steps):
    """In the loss of rank 1."""
    return ",".join(f"nan@rank1:step{step}" for step in steps)


@pytest.mark.parametrize(
    "words",
    [[], slow(["--find-nan", "--optimizer", "adamw", "--precision", "bf16", "--clip-norm", "1"])],
)
def test_a_group_that_skips_a_step_is_equal_to_the_others_where_they_meet(runs, words):
    run = runs(2, LOCAL)
    said = run.finish("--check-replicas-every", "2", *words, HVDTRAIN_FAULT=nans([1, 2, 3]))
    assert "step 2: skipped on rank 1, NaN or Inf in the loss of rank 1" in said
    skipped = [(line["step"], line["rank"], line["ranks"]) for line in run.lines if line.get("event") == "skipped"]
    assert skipped == [(step, 1, "rank 1") for step in (1, 2, 3)]
    assert run.result["skipped_steps"] == 3
    assert len(run.weights) == 1


@pytest.mark.slow
def test_a_group_that_skips_too_many_steps_ends_the_run_where_all_meet(runs):
    run = runs(2, LOCAL)
    run.finish("--max-skipped-steps", "3", status=3, HVDTRAIN_FAULT=nans(range(6, 11)))
    assert run.result["exit_reason"] == "too many skipped steps"
    assert run.result["steps"] == 9


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--sync", "local", "--sync-every", "4"], "--sync: all 2 ranks are on "),
        slow(["--sync", "two-level", "--sync-group-size", "2"], "--sync-group-size 2: 2 ranks"),
        slow(["--sync", "local", "--sync-every", "99", "--sync-group-size", "1"], "--sync-every 99: an epoch has "),
    ],
)
def test_a_wrong_choice_is_one_line(run, words, line):
    done = run("mpirun", 2, [*EFFNET, *TRAIN, *words])
    assert done.returncode == 2
    (said,) = [one for one in done.stderr.splitlines() if one.startswith("hvdtrain: ")]
    require_facts(said, f"hvdtrain: error: {line}")
