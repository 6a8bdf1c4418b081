import random
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hvdtrain
from hvdtrain.core.layout import require_gradient
from hvdtrain.program import job, start
from hvdtrain.program.checks import require_dense
from hvdtrain.program.job import FunctionTask, make_job
from hvdtrain.program.settings import parse
from hvdtrain.program.training import Training
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings import command_line
from hvdtrain.settings.safety import exits
from tests.ranks import Rank
from tests.refusals import refused, require_facts
from tests.steps import CPU

SAMPLES = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
SETTINGS = hvdtrain.Settings(batch_size_per_rank=5, epochs=2)


def losses(model, batch):
    return mse_loss(model(batch["inputs"]), batch["inputs"], reduction="none").mean(1)


def job_of(task=losses, *, model=None, comm=None, train=SAMPLES, **options):
    comm = comm or SerialComm()
    model = model or (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
    given = {"model": model, "task": task, "data": (train, SAMPLES[:4]), "cuts": None, "max_steps": None}
    return make_job(comm, SETTINGS, CPU, **given | options)


def test_a_job_of_tensors_and_a_function():
    job, test = job_of()
    assert (len(job.train), len(test)) == (20, 4)
    assert (job.sizes.micro_batch, job.sizes.steps_per_epoch, job.steps, job.length_option) == (5, 4, 8, "--epochs")
    assert [block.name for block in job.cuts.blocks.row] == ["0", "1"]
    assert job_of(model=nn.Linear(3, 3))[0].cuts.blocks is None
    job, _ = job_of(max_steps=3)
    assert (job.steps, job.length_option) == (3, "--max-steps")


def test_a_function_makes_the_model_with_the_seed_of_the_run():
    weights = []
    for _ in range(2):
        torch.rand(1)
        weights.append(job_of()[0].model[0].weight)
    assert torch.equal(*weights)


def test_a_function_is_tried_before_there_is_a_run():
    seen = []

    def tried(model, batch):
        seen.append((len(batch["inputs"]), model.training, torch.is_grad_enabled()))
        return losses(model, batch)

    assert job_of(tried)[0].model.training
    assert seen == [(samples, False, False) for samples in (2, 2, 1, 1)]  # the second of the test data


def test_test_data_of_another_form_and_losses_without_a_gradient_are_refused():
    line = refused(lambda: job_of(data=(SAMPLES, SAMPLES[:, :2])))
    assert line.startswith("the loss function with the test data: failed on two samples")

    def slope(model, batch):
        inputs = batch["inputs"].requires_grad_()
        return torch.autograd.grad(model(inputs).sum(), inputs)[0].sum(1)

    assert "compute it under `with torch.enable_grad():`" in refused(lambda: job_of(slope))
    assert "the loss has no gradient" in refused(lambda: require_gradient(torch.zeros(())))


@pytest.mark.parametrize(("restart", "saved", "is_tried"), [(0, "r", True), (1, None, True), (1, "r", False)])
def test_a_restart_does_not_try_again_what_has_trained(monkeypatch, restart, saved, is_tried):
    seen = []
    monkeypatch.setenv("HVDLAUNCH_RANK", f'{{"restart": {restart}}}')
    monkeypatch.setattr(job, "unfinished_run", lambda _: saved)
    job_of(lambda model, batch: seen.append(1) or losses(model, batch))
    assert bool(seen) is is_tried


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (lambda model, batch: losses(model, batch).mean(), "()"),
        (lambda model, batch: model(batch["inputs"]), "(2, 3)"),
        (lambda *_: 0.5, "a float"),
    ],
)
def test_a_loss_that_is_not_each_samples_is_refused(function, returned):
    line = refused(lambda: job_of(function))
    assert line.startswith(f"the loss function returned {returned} for 2 samples. Return each sample's loss, (2,), ")


def test_what_one_rank_cannot_use_is_refused_on_all():
    comm = Rank(0, 2, answers=[[["one", None], ["two", "'inputs' is ndarray"]]])
    assert refused(lambda: job_of(comm=comm)) == "rank 1 on two: 'inputs' is ndarray"


def test_the_sums_of_a_function():
    batch = {"inputs": SAMPLES[:4]}
    sums = FunctionTask(losses).loss(nn.Identity(), batch, training=True)
    assert (sums.loss.item(), sums.count.item()) == (0.0, 4.0)
    empty = FunctionTask(losses).loss(nn.Linear(3, 3), {"inputs": SAMPLES[:0]}, training=True)
    assert (empty.loss.item(), empty.count.item()) == (0.0, 0.0)
    empty.loss.backward()


class Whole(hvdtrain.Task):
    """The losses of the function, as a Task; `changes` replace fields of its sums."""

    def __init__(self, *, means=(), best="loss", **changes):
        self.means, self.best, self.changes = means, best, changes

    def loss(self, model, batch, *, training):
        each = losses(model, batch)
        fields = {"loss": each.sum(), "count": each.new_full((), len(each))}
        return hvdtrain.Sums(**fields | {name: change(each) for name, change in self.changes.items()})


class Bare(hvdtrain.Task):
    def loss(self, model, batch, *, training):
        return losses(model, batch).sum()


class WithoutTraining(hvdtrain.Task):
    def loss(self, model, batch):
        return Whole().loss(model, batch, training=True)


class OwnMetrics(Whole):
    def metrics(self, totals):
        return {"loss": totals["loss"] / totals["samples"]}


@pytest.mark.parametrize(
    ("task", "facts"),
    [
        (Whole(loss=lambda each: each.sum().long()), "Whole: Sums.loss is torch.int64. Convert it"),
        (Whole(count=len), "Whole: Sums.count is an int (2), not a tensor. Use loss.new_full((), 2)"),
        (Whole(loss=lambda each: each), "Whole: Sums.loss has shape (2,), not one sum. Add .sum()"),
        (Whole(more=lambda each: {"right": each > 0}), "Sums.more['right'] has shape (2,)"),
        (Whole(more=lambda each: {"count": each.sum()}), "Sums.more has the name 'count'"),
        (Whole(count=lambda each: -each.new_ones(())), "Sums.count is -1"),
        (Whole(means=("acc",)), "Whole: means has 'acc', but Sums.more has no names"),
        (Whole(best="accuracy"), "Whole: 'accuracy' is not one of its metrics, which are loss."),
        (
            OwnMetrics(),
            "OwnMetrics: failed on two samples in test_job.py: ... KeyError: 'samples'. The totals have 'loss'",
        ),
        (WithoutTraining(), "WithoutTraining: failed ... unexpected keyword argument 'training' ... training)."),
        (Bare(), "Bare: `loss` returned a Tensor of shape () ... here 2."),
        (
            lambda _, batch: batch[0],
            "the loss function: failed ... test_job.py: ... KeyError: 0 ... 'inputs' (2, 3)",
        ),
        (lambda model, batch: model(batch["inputs"].T), "failed ... shapes cannot be multiplied (3x2 and 3x3)"),
        (Whole, "Whole: a class, not a task. Pass Whole()."),
        ("accuracy", "the task is a str."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_task_that_cannot_train_is_refused_in_one_line(task, facts):
    require_facts(refused(lambda: job_of(task)), facts)


def contrasted(each):
    return each.sum() * (len(each) - 1)


@pytest.mark.parametrize(
    ("task", "facts"),
    [
        (Whole(loss=torch.mean), ["Whole: Sums.loss of two samples is ... of each alone: probably a mean"]),
        (Whole(loss=contrasted), ["Sums.loss ... they do not add up ... contrastive"]),
        (
            Whole(count=lambda each: each.new_full((), 5 * len(each))),
            ["Sums.count of 2 samples is 10 ... `counts` ... 2"],
        ),
        (Whole(loss=lambda each: each.sum() * torch.rand(())), []),  # random
        (Whole(loss=lambda each: each.sum() * torch.nan), []),
        (Whole(), []),
    ],
)
def test_sums_that_do_not_add_up_are_a_warning(capsys, task, facts):
    job_of(task)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(facts)
    for line, fact in zip(lines, facts, strict=True):
        require_facts(line, f"hvdtrain: warning: ... {fact}")


def test_what_a_task_holds_is_not_trained_and_a_line_says_so(capsys):
    task = Whole()
    task.centres = nn.Linear(3, 3)
    job_of(task)
    assert "warning: centres of Whole is not trained: only the model is." in capsys.readouterr().err
    task.centres.requires_grad_(False)  # a teacher
    job_of(task)
    assert "centres" not in capsys.readouterr().err


class Counting(Whole):
    """Changes its own state, the model's parameters and all generators."""

    def __init__(self):
        super().__init__()
        self.calls, self.teacher = 0, nn.BatchNorm1d(3)

    def loss(self, model, batch, *, training):
        self.calls += 1
        self.teacher(batch["inputs"].repeat(2, 1))
        for parameter in model.parameters():
            parameter.data.add_(torch.rand(()) + np.random.rand() + random.random())  # noqa: NPY002, S311
        return super().loss(model, batch, training=training)


def test_a_trial_restores_task_model_and_generators():
    def state():
        values = [*model.parameters(), *task.teacher.buffers(), torch.get_rng_state()]
        return [task.calls, *(value.tolist() for value in values), *np.random.get_state()[2:], random.getstate()]  # noqa: NPY002

    model, task = nn.Linear(3, 3), Counting()
    before = state()
    job_of(task, model=model)
    assert state() == before


# --- settings


class NotADataclass(hvdtrain.Settings):
    width: int = 64


@dataclass(frozen=True, kw_only=True)
class WithAMethodsName(hvdtrain.Settings):
    missing: float = 0.1


@pytest.mark.parametrize(
    ("file", "name"),
    [("/a/b/own_model.py", "own_model"), ("/a/package/__main__.py", "package"), ("-c", "run")],
)
def test_an_experiment_has_the_name_of_its_program(monkeypatch, file, name):
    monkeypatch.setattr("sys.argv", [file])
    settings = hvdtrain.Settings()
    command_line.require_rules(settings)
    assert settings.experiment == name


@pytest.mark.parametrize(
    ("recipes", "facts"),
    [
        ((), "hvdtrain.start(main) ... hvdtrain.start(main, hvdtrain.Settings)"),
        ((hvdtrain.Settings(),), "hvdtrain.start(main) ... hvdtrain.start(main, hvdtrain.Settings)"),
        ((NotADataclass,), "class NotADataclass: ... @dataclass(frozen=True, kw_only=True)"),
        ((WithAMethodsName,), "class WithAMethodsName: ... 'missing'"),
    ],
)
def test_what_is_no_class_of_settings_is_refused(recipes, facts):
    require_facts(refused(lambda: parse([], recipes)), facts)


def test_a_program_begins_with_generators_seeded_by_its_settings(monkeypatch):
    draws = []
    monkeypatch.setattr(exits, "run", lambda program: program())
    for seed in (2**40, 2**40, 8):
        settings = hvdtrain.Settings(seed=seed)
        monkeypatch.setattr(start, "join_ranks", lambda *_, settings=settings: (SerialComm(), settings))
        start.start(
            lambda _: draws.append((torch.rand(1).item(), np.random.rand(), random.random())),  # noqa: NPY002, S311
            hvdtrain.Settings,
        )
    assert draws[0] == draws[1]
    assert all(one != other for one, other in zip(draws[0], draws[2], strict=True))


# --- how long a step may take


@pytest.mark.parametrize(
    ("ranks", "is_typed", "changes", "limits"),
    [
        (1, True, {}, (0.0, 60.0)),  # no watchdog: who has started it may debug it
        (1, True, {"hang_timeout_s": 7.0}, (7.0, 60.0)),
        (1, False, {}, (None, 60.0)),
        (2, False, {"compile": True}, (None, 600.0)),
    ],
)
def test_the_limit_of_a_step(monkeypatch, ranks, is_typed, changes, limits):
    training, folder = Training.__new__(Training), SimpleNamespace(path="here")
    training._settings, training._comm = hvdtrain.Settings(**changes), Rank(0, ranks)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: is_typed))
    monkeypatch.setattr("hvdtrain.program.training.open_run", lambda *_, **given: given)
    given = training._opened(folder)
    assert (given["hang_timeout_s"], given["min_limit_s"]) == limits


def test_a_program_has_one_training():
    with ExitStack() as stack:
        run = hvdtrain.Run(SerialComm(), SETTINGS, stack)
        run.started = object()
        message = "run.training: called before in this program. Start the program again for another training."
        assert refused(lambda: run.training(None, None, None, None)) == message


# --- models that cannot be trained, saved or copied


class Extra(nn.Linear):
    """Saves the given value."""

    def __init__(self, value):
        super().__init__(3, 3)
        self.value = value

    def get_extra_state(self):
        return self.value


def with_parameter(parameter):
    model = nn.Linear(3, 3)
    model.more = nn.Parameter(parameter)
    return model


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        (nn.Linear(3, 3).requires_grad_(False), "no trainable parameters ... requires_grad_(True)"),
        (nn.Identity(), "no trainable parameters"),
        (with_parameter(torch.ones(2, dtype=torch.complex64)), "parameter more is complex ... view_as_real"),
        (with_parameter(torch.eye(3).to_sparse()), "parameter more is sparse"),
        (nn.Embedding(5, 3, sparse=True), "parameter weight gets sparse gradients ... sparse=False"),
        (nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True)), "parameter 0.weight gets sparse gradients"),
        (Extra({"history": np.zeros(3)}), "_extra_state ... cannot be saved ... numpy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_cannot_be_trained_or_saved_is_refused(model, facts):
    require_facts(refused(lambda: job_of(Whole(), model=model)), facts)


def test_sparse_gradients_of_a_function_are_refused_after_a_trial():
    layer = nn.Linear(3, 3)
    outputs = nn.functional.embedding(torch.tensor([1]), layer.weight, sparse=True)
    [gradient] = torch.autograd.grad(outputs.sum(), layer.weight)
    line = refused(lambda: require_dense(layer, {layer.weight: gradient, layer.bias: None}))
    require_facts(line, "parameter weight ... sparse=False")


@pytest.mark.parametrize("task", [losses, Whole()], ids=["function", "task"])
def test_lazy_modules_get_their_parameters_before_there_is_a_run(task):
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    job, _ = job_of(task, model=model)
    assert [tuple(one.shape) for one in job.model.parameters()] == [(4, 3), (4,), (4,), (4,), (3, 4), (3,)]
    assert job.model[1].running_mean.tolist() == [0.0] * 4
    assert all(module.training for module in model.modules())
