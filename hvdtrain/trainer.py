"""Run a script with transformers' Trainer as it is, so that `hvdlaunch tune` can make it faster.

    hvdlaunch tune -np 2 -- python -m hvdtrain.trainer run.py ARGUMENTS
    hvdlaunch run -np 2 -- python -m hvdtrain.trainer run.py ARGUMENTS --trainer.bf16 true

`--trainer.FIELD VALUE` sets a field of the script's TrainingArguments; the script never sees it. Tested with
transformers 5.23.0. See docs/how-to/speed-up-trainer.md.
"""

import dataclasses
import json
import math
import os
import runpy
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.settings.safety import exits
from hvdtrain.settings.safety.exits import BadInput

OPTION = "--trainer."
COMPUTATION, COMMUNICATION, INPUT, ALL = "computation", "communication", "input", "the whole step"
LEAST_S, LEAST_STEPS = 0.5, 4  # of a window: texts of unequal length make unequal steps
GROUPED_STEPS = 50  # of a window with batches of similar length, which the sampler sorts 50 at a time
NEVER = 10**9  # steps
MOST_LOSS = 1e15  # written for a loss that is infinite or not a number


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """The command line: a script, its arguments, and the fields that it shall have."""

    script: Path
    arguments: Sequence[str]
    fields: Mapping[str, Any]
    lists_remedies: bool


def parse(words: Sequence[str]) -> ScriptCommand:
    """Parse the words after the program's name; BadInput names the wrong one."""
    lists_remedies = words[-1:] == ["--remedies"]
    left, own, fields = iter(words[: len(words) - lists_remedies]), list[str](), dict[str, Any]()
    for word in left:
        if not word.startswith(OPTION):
            own.append(word)
        elif (value := next(left, None)) is None:
            raise BadInput(f"{word}: its value is missing. Pass {word} VALUE.")
        else:
            try:
                fields[word.removeprefix(OPTION)] = json.loads(value)
            except ValueError:
                fields[word.removeprefix(OPTION)] = value
    if not own or not Path(own[0]).is_file():
        named = f"{own[0]}: not a file" if own else "the script is missing"
        raise BadInput(f"{named}. Run: python -m hvdtrain.trainer SCRIPT.py ARGUMENTS")
    return ScriptCommand(script=Path(own[0]), arguments=own[1:], fields=fields, lists_remedies=lists_remedies)


def remedies_of(args: Any, *, gpu: str | None, is_indexed: bool) -> Iterator[dict[str, Any]]:
    """Yield what these TrainingArguments leave to try, in this order, as JSON for hvdlaunch.

    `gpu` is None without one, else its 16-bit type: bf16, or fp16 if it is older. `is_indexed`: samples have numbers.
    """
    batch, passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    is_fp32 = not (args.bf16 or args.fp16)
    on_cpu = {} if gpu or args.use_cpu else {"use_cpu": True}  # or Trainer rejects bf16
    same: tuple[tuple[str, bool, Mapping[str, Any]], ...] = (
        (COMPUTATION, is_fp32 and gpu != "fp16", {"bf16": True, **on_cpu}),
        (COMPUTATION, is_fp32 and gpu == "fp16", {"fp16": True}),
        (COMPUTATION, gpu == "bf16" and not args.tf32, {"tf32": True}),
        (ALL, passes > 1, {"per_device_train_batch_size": batch * passes, "gradient_accumulation_steps": 1}),
        (COMPUTATION, args.optim == "adamw_torch", {"optim": "adamw_torch_fused"}),
        (COMPUTATION, not args.torch_compile, {"torch_compile": True}),
        (COMPUTATION, bool(args.activation_checkpointing), {"activation_checkpointing": False}),
        (COMMUNICATION, args.ddp_find_unused_parameters is not False, {"ddp_find_unused_parameters": False}),
        (COMMUNICATION, not args.ddp_static_graph, {"ddp_static_graph": True}),
        *((COMMUNICATION, args.ddp_bucket_cap_mb != size, {"ddp_bucket_cap_mb": size}) for size in (5, 100)),
        (INPUT, not args.dataloader_num_workers, {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}),
        (INPUT, gpu is not None and not args.dataloader_pin_memory, {"dataloader_pin_memory": True}),
    )
    another: tuple[tuple[bool, Mapping[str, Any]], ...] = (
        *((True, {"gradient_accumulation_steps": times * passes}) for times in (4, 8)),
        *((True, {"per_device_train_batch_size": times * batch}) for times in (2, 4)),
        (args.train_sampling_strategy == "random" and is_indexed, {"train_sampling_strategy": "group_by_length"}),
    )
    rows = [(True, *row) for row in same] + [(False, ALL, *row) for row in another]
    for is_same, what_for, applies, fields in rows:
        if applies:
            texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
            options = [word for name, text in texts.items() for word in (OPTION + name, text)]
            remedy = {"name": " ".join(options), "what_for": what_for, "same_training": is_same}
            yield {**remedy, "options": options}


@dataclass(kw_only=True)
class TunerWindows:
    """Writes the windows of rank 0 for hvdlaunch into a file: samples of all ranks, seconds, and losses of this one."""

    file: Path
    least_steps: int
    epoch_samples: int | None
    ranks: int
    samples: int = 0  # of this rank, in the window
    losses: list[list[Any]] = field(default_factory=list)  # of the window, by step and micro-batch
    began_s: float | None = None
    trainings: int = 0

    def begin_train(self) -> None:
        """Drop the window: the time before the first step of a training is not a step's."""
        self.began_s = None
        self.trainings += 1

    def begin_step(self) -> None:
        """End the window if it is long enough."""
        now_s = time.perf_counter()
        if self.began_s is not None and len(self.losses) >= self.least_steps and now_s - self.began_s >= LEAST_S:
            losses = [float(sum(step)) for step in self.losses]  # waits for a GPU
            now_s = time.perf_counter()
            self._write(losses, now_s - self.began_s)
            self.began_s = None
        if self.began_s is None:
            self.began_s, self.samples, self.losses = now_s, 0, []
        self.losses.append([])

    def add(self, samples: int, loss: Any) -> None:
        """Count a micro-batch of the step."""
        self.samples += samples
        self.losses[-1].append(loss)

    def _write(self, losses: Sequence[float], seconds: float) -> None:
        from hvdtrain.insight.tracking.windows import write_window

        line: dict[str, Any] = {"samples": self.samples * self.ranks, "seconds": seconds}
        if self.trainings == 1:  # a later one starts from the weights of the first
            line["losses"] = [loss if math.isfinite(loss) else MOST_LOSS for loss in losses]
        write_window(self.file, {**line, "epoch_samples": self.epoch_samples})


def patch(call: ScriptCommand, answer_file: int | None) -> None:
    """Let TrainingArguments have the fields of the call, and Trainer.train measure itself for hvdlaunch.

    With a file descriptor for the answer, Trainer.train lists the remedies instead. BadInput for an unknown field.
    """
    try:
        from transformers import Trainer, TrainingArguments
    except ImportError as error:
        raise BadInput(
            f"transformers cannot be imported ({error}). Run: pip install transformers accelerate"
        ) from error
    known = {one.name for one in dataclasses.fields(TrainingArguments)}
    if unknown := [name for name in call.fields if name not in known]:
        raise BadInput(f"{OPTION}{unknown[0]}: TrainingArguments has no such field. Check its spelling.")
    check, train = TrainingArguments.__post_init__, Trainer.train
    seed, windows_file = os.environ.get("HVDLAUNCH_SEED"), os.environ.get("HVDLAUNCH_WINDOWS")

    def post_init(args: Any) -> None:
        measured = {} if windows_file is None else fields_of_a_measured_start(args)
        seeds = {} if seed is None else {"seed": int(seed)}
        for name, value in {**measured, **seeds, **call.fields}.items():
            setattr(args, name, value)
        check(args)

    def new_train(trainer: Any, *arguments: Any, **options: Any) -> Any:
        if answer_file is not None:
            list_remedies(trainer, answer_file)
        if windows_file is None:
            return train(trainer, *arguments, **options)
        if trainer.args.process_index == 0:
            follow(trainer, Path(windows_file))
        while True:  # hvdlaunch ends it after its windows
            train(trainer, *arguments, **options)

    TrainingArguments.__post_init__, Trainer.train = post_init, new_train


def fields_of_a_measured_start(args: Any) -> dict[str, Any]:
    """Return fields of steps only: evaluations and saves never come, but callbacks may require them."""
    fields = {"eval_on_start": False, "push_to_hub": False, "report_to": "none"}
    for what in ("eval", "save"):
        if getattr(args, f"{what}_strategy") != "no":
            fields |= {f"{what}_strategy": "steps", f"{what}_steps": NEVER}
    return fields


def list_remedies(trainer: Any, file: int) -> NoReturn:
    """Print the remedies for this Trainer into a file descriptor, and end the process."""
    from torch import cuda
    from torch.utils.data import IterableDataset

    gpu = None
    if cuda.is_available() and not trainer.args.use_cpu:
        gpu = "bf16" if cuda.is_bf16_supported(including_emulation=False) else "fp16"
    remedies = remedies_of(trainer.args, gpu=gpu, is_indexed=not isinstance(trainer.train_dataset, IterableDataset))
    os.dup2(file, sys.stdout.fileno())
    exits.print_answer(json.dumps({"remedies": [*remedies], "epochs": trainer.args.num_train_epochs}, indent=1))
    os._exit(0)


def follow(trainer: Any, file: Path) -> None:
    """Write the windows of the trainings of this Trainer into the file."""
    from transformers import TrainerCallback

    args, data = trainer.args, trainer.train_dataset
    windows = TunerWindows(
        file=file,
        least_steps=LEAST_STEPS if args.train_sampling_strategy == "random" else GROUPED_STEPS,
        epoch_samples=len(data) if hasattr(data, "__len__") else None,
        ranks=args.world_size,
    )
    original_step = trainer.training_step

    def training_step(model: Any, inputs: Any, *more: Any) -> Any:
        samples = len(next(iter(inputs.values())))
        loss = original_step(model, inputs, *more)
        windows.add(samples, loss)
        return loss

    class Follow(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            windows.begin_train()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            windows.begin_step()

        def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            control.should_save = False  # Trainer saves at the last step, whatever the strategy

    trainer.training_step = training_step
    trainer.add_callback(Follow())


def main() -> None:
    """Run the script; BadInput if there is none, or if it does not train when it shall list remedies."""
    call = parse(sys.argv[1:])
    answer_file = None
    if call.lists_remedies:  # what the script prints does not belong to the list
        answer_file = os.dup(1)
        os.dup2(2, 1)
    patch(call, answer_file)
    sys.argv = [str(call.script), *call.arguments]
    sys.path[0] = str(call.script.resolve().parent)
    runpy.run_path(str(call.script), run_name="__main__")
    if call.lists_remedies:
        raise BadInput(f"{call.script} ended without Trainer.train(). Pass the arguments with which it trains.")


if __name__ == "__main__":
    exits.run(main)
