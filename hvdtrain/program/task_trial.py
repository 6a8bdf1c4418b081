"""Tries a task on two samples before the first step: whether it runs, what it returns, and whether its sums add up.

N samples of a batch.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite
from pathlib import Path
from sysconfig import get_path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvdtrain.core.model.modes import evaluating
from hvdtrain.core.model.state import first_line, unchanged
from hvdtrain.core.phases import READS_HERE
from hvdtrain.core.random_state import unchanged_generators
from hvdtrain.core.step import precision_context
from hvdtrain.core.task import UNREADABLE, Batch, Sums, Task
from hvdtrain.loop.feed.feed import Split, moved, raw_batches
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.guard import is_out_of_memory

_SAME = 0.02  # relative difference of sums that differ by rounding only, also in bf16


def try_task(
    task: Task,
    model: nn.Module,
    split: Split,
    tests: tuple[Split, Mapping[str, range]],
    *,
    title: str,
    device: torch.device,
    precision: str,
) -> list[str]:
    """Evaluate one sample, another and both, and two of each test set; return warnings about sums that do not add up.

    `tests` are the test split and the numbers of each set's samples in it.

    Raise BadInput, with `title` as the name of the task, if the task fails or its result cannot be used. Model, task
    and generators are as before afterwards.
    """

    def values_of(*samples: int, of: Split = split, title: str = title) -> dict[str, float]:
        [(wanted, batch)] = raw_batches(of, [torch.tensor(samples)], device, None, phases=READS_HERE)
        with _in_one_line(title, lambda: f"The batch has {_listed(batch)}."):
            batch = task.prepare(batch, wanted, None)
            with precision_context(device, precision):
                sums = task.loss(model, batch, training=False)
        _require_sums(title, sums, batch)
        return {"loss": sums.loss.item(), "count": sums.count.item()} | {
            name: value.item() for name, value in sums.more.items()
        }

    with _undone(task, model, device):
        both = values_of(*range(min(2, len(split))))
        _require_metrics(title, task, both)
        for name, samples in tests[1].items():
            values_of(*samples[:2], of=tests[0], title=f"{title} with the test data{name and f' {name!r}'}")
        warnings = [*_untrained(task, model), *_judge_count(title, task, both, samples=min(2, len(split)))]
        try:
            alone = [values_of(sample) for sample in range(min(2, len(split)))]
        except BadInput as error:
            if error.__cause__ is None:
                raise
            return warnings  # the model needs several samples, as batch statistics do
        return warnings + _judge_sums(title, alone, both, lambda: values_of(0, 1))


def try_on_meta(task: Task, model: nn.Module, split: Split) -> None:
    """Evaluate two samples with a model on meta, as far as it runs without values; BadInput of the task is raised."""
    with _undone(task, model, torch.device("meta")):
        samples = torch.arange(min(2, len(split)))
        [(_, raw)] = raw_batches(split, [samples], torch.device("cpu"), None, phases=READS_HERE)
        try:
            batch = moved(task.prepare(raw, samples, None), torch.device("meta"))
            task.loss(model, batch, training=False)
        except BadInput:
            raise
        except Exception:  # noqa: BLE001 (it may need values)
            return


@contextmanager
def _undone(task: Task, model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluate the model on the device; undo what that changes."""
    attributes, parameters = dict(vars(task)), [one for one in model.parameters() if not (is_lazy(one) or one.is_meta)]
    values, home = [one.detach().clone() for one in parameters], next(model.parameters()).device
    others = [value for value in attributes.values() if isinstance(value, nn.Module)]  # such as a teacher
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(unchanged_generators())
        stack.enter_context(evaluating(model))
        stack.enter_context(unchanged(dict.fromkeys(module for one in (model, *others) for module in one.modules())))
        stack.callback(lambda: model.to(home))
        model.to(device)
        try:
            yield
        finally:
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
            vars(task).clear()
            vars(task).update(attributes)


@contextmanager
def _in_one_line(title: str, facts: Callable[[], str]) -> Iterator[None]:
    """Raise BadInput with the place of the error instead of an error of the task or the model."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BadInput) or is_out_of_memory(error):
            raise
        place = place_in_program(error)
        remedy = "Correct that line, the model or the data."
        if "does not require grad" in str(error):
            remedy = "Tests run without gradients: compute it under `with torch.enable_grad():`."
        if not place:
            remedy = "Define it as hvdtrain.Task does: loss(self, model, batch, *, training)."
        at = f" in {place}" if place else ""
        raise BadInput(
            f"{title}: failed on two samples{at}: {first_line(error).rstrip('.')}. {facts()} {remedy}"
        ) from error


def place_in_program(error: Exception) -> str | None:
    """Return the file and line of the program's innermost frame, else of a library's; None in hvdtrain itself."""
    torchs_and_ours = [Path(torch.__file__).parent, Path(__file__).parents[1]]
    libraries = [Path(get_path("purelib")), Path(get_path("stdlib"))]
    frames = traceback.extract_tb(error.__traceback__)
    outside = [one for one in frames if not any(map(Path(one.filename).is_relative_to, torchs_and_ours))]
    own = [one for one in outside if not any(map(Path(one.filename).is_relative_to, libraries))]
    return f"{Path((own or outside)[-1].filename).name}:{(own or outside)[-1].lineno}" if outside else None


def _listed(batch: Any) -> str:
    if not isinstance(batch, Mapping):
        return f"type {type(batch).__name__}, not dict"
    kinds = {name: tuple(one.shape) if isinstance(one, Tensor) else _kind(one) for name, one in batch.items()}
    return ", ".join(f"{name!r} {kind}" for name, kind in kinds.items())


def _untrained(task: Task, model: nn.Module) -> Iterator[str]:
    """Yield a warning for each parameter of the task that looks as if it were to be trained."""
    trained = set(map(id, model.parameters()))
    for name, value in vars(task).items():
        held = value.parameters() if isinstance(value, nn.Module) else [value]
        if any(isinstance(one, nn.Parameter) and one.requires_grad and id(one) not in trained for one in held):
            yield (
                f"{name} of {type(task).__name__} is not trained: only the model is. Put it into the model, or call "
                "requires_grad_(False)."
            )


def _require_sums(title: str, sums: Any, batch: Batch) -> None:
    if not isinstance(sums, Sums):
        raise BadInput(
            f"{title}: `loss` returned {_kind(sums)}, not sums. Return hvdtrain.Sums(loss=..., count=...), with the "
            "loss summed over the samples and count=loss.new_full((), N) for N samples, here "
            f"{len(next(iter(batch.values()), ()))}."
        )
    if not isinstance(sums.more, Mapping):
        raise BadInput(f"{title}: Sums.more is {_kind(sums.more)}. Make it a dict of sums by name.")
    for name, value in {"loss": sums.loss, "count": sums.count, **sums.more}.items():
        field = name if name in ("loss", "count") else f"more[{name!r}]"
        if not isinstance(value, Tensor):
            remedy = f"Use loss.new_full((), {value})" if isinstance(value, (int, float)) else "Make it a scalar tensor"
            raise BadInput(f"{title}: Sums.{field} is {_kind(value)}, not a tensor. {remedy}.")
        if value.dim():
            raise BadInput(
                f"{title}: Sums.{field} has shape {tuple(value.shape)}, not one sum. Add .sum(), or "
                'reduction="sum" in the loss.'
            )
        if value.is_complex() or (name == "loss" and not value.is_floating_point()):
            raise BadInput(f"{title}: Sums.{field} is {value.dtype}. Convert it with .float().")
    if taken := sums.more.keys() & {"loss", "count"}:
        raise BadInput(
            f"{title}: Sums.more has the name {min(taken)!r}, which is a field of Sums. Choose another name."
        )
    if not sums.count >= 0:
        raise BadInput(
            f"{title}: Sums.count is {sums.count.item():.4g}. Return the number that the loss is summed over."
        )


def _kind(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}{shape}" + (
        f" ({value})" if isinstance(value, (int, float, str)) else ""
    )


def _require_metrics(title: str, task: Task, values: Mapping[str, float]) -> None:
    if isinstance(task.means, str):
        raise BadInput(f"{title}: means = {task.means!r} is a text, not names. Write ({task.means!r},).")
    names = ", ".join(map(repr, values.keys() - {"loss", "count"})) or "no names"
    missing = [name for name in task.means if name not in {*values} - {"count"}]
    if missing and type(task).metrics is Task.metrics:
        raise BadInput(f"{title}: means has {missing[0]!r}, but Sums.more has {names}. Add the sum to Sums.more.")
    with _in_one_line(title, lambda: f"The totals have {', '.join(map(repr, values))}."):
        shown = {name: float(value) for name, value in task.metrics(dict(values)).items()}
    if missing := [name for name in ("loss", task.best) if name not in shown]:
        raise BadInput(
            f"{title}: {missing[0]!r} is not one of its metrics, which are {', '.join(shown) or 'none'}. Set `best` to "
            "one of them, and keep 'loss'."
        )
    with _in_one_line(title, lambda: f"The metrics are {', '.join(map(repr, shown))}."):
        task.format_metrics(shown)


def _judge_count(title: str, task: Task, both: Mapping[str, float], *, samples: int) -> list[str]:
    """Compare the count of a batch with the weights by which a step divides its loss."""
    with _in_one_line(title, lambda: "`counts` returns a tensor with the weight of each sample."):
        weight = float(task.counts(torch.arange(samples)).sum())
    if both.get(UNREADABLE) or _are_equal(both["count"], weight):
        return []
    found = f"{title}: Sums.count of {samples} samples is {both['count']:.4g}, but `counts` gives them {weight:.4g}"
    return [f"{found}: steps divide the loss by the second, metrics by the first. Return the same number from both."]


def _judge_sums(
    title: str,
    alone: Sequence[Mapping[str, float]],
    both: Mapping[str, float],
    again: Callable[[], Mapping[str, float]],
) -> list[str]:
    """Return a warning for each sum over two samples that is not the sum over each; random ones are not judged."""
    if len(alone) < 2:
        return []
    odd = {
        name: (one, other, value)
        for name, value in both.items()
        for one, other in [(alone[0].get(name, 0.0), alone[1].get(name, 0.0))]
        if isfinite(one + other + value) and not _are_equal(value, one + other, scale=abs(one) + abs(other))
    }
    repeated = again() if odd else {}
    return [
        f"{title}: Sums.{name if name in ('loss', 'count') else f'more[{name!r}]'} of two samples is {value:.4g}, and "
        f"{one:.4g} and {other:.4g} of each alone: " + _cause(one, other, value)
        for name, (one, other, value) in odd.items()
        if repeated.get(name) == value
    ]


def _cause(one: float, other: float, value: float) -> str:
    if _are_equal(value, (one + other) / 2, scale=abs(one) + abs(other)):
        return 'probably a mean, and a sum is needed. Use .sum(), or reduction="sum" in the loss.'
    return (
        "they do not add up. Sum over the samples, or ignore this if the loss compares the samples of a batch, as "
        "contrastive losses do."
    )


def _are_equal(value: float, expected: float, *, scale: float | None = None) -> bool:
    return abs(value - expected) <= _SAME * (abs(expected) if scale is None else scale) + 1e-9
