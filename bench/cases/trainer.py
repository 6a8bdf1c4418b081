"""transformers' Trainer on 2 ranks: its gain by the usual advice, and its speed and accuracy next to hvdtrain.bert's.

Rounds are kept in --out, and the same command resumes after an interruption.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cases.tune import hosts
from bench.jobs import HERE, job, mpirun, run, torchrun
from bench.pairs import Case, Table, middle, ratio
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.tasks.text import data
from hvdtrain.tasks.text import settings as text_settings

RANKS = 2
WARMUP_STEPS, LARGE_STEPS = 2, 3
BF16, ACCUMULATE, BATCH = {"bf16": True}, {"gradient_accumulation_steps": 8}, {"per_device_train_batch_size": 32}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "bf16": BF16,
    "accumulate 4": {"gradient_accumulation_steps": 4},
    "accumulate 8": ACCUMULATE,
    "batch 32": BATCH,
    "bf16, accumulate 8, batch 32": {**BF16, **ACCUMULATE, **BATCH},
    "accumulate 8, batch 32": {**ACCUMULATE, **BATCH},
}
PLAIN = "plain"  # Trainer's own defaults: fp32, batches of 8, no accumulation
GLOBAL_BATCH, LR, WARMUP = 192, 2.1e-3, 0.1  # of the recipe tiny: its rate for this batch, its share of the steps


def write_texts(folder: Path) -> None:
    """Write the texts of hvdtrain.bert for bench/peers/bert_of_trainer.py."""
    found = data.load_on_all(SerialComm(), text_settings.tiny(), None)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in found.vocabulary.tokens))
    for name, split in (("train", found.train), ("test", found.test)):
        rows = zip(split._starts.tolist(), split.lengths.tolist(), split._labels.tolist(), strict=True)
        made = [{"input_ids": split._tokens[at : at + length].tolist(), "labels": label} for at, length, label in rows]
        (folder / f"{name}.json").write_text(json.dumps(made))


def variants(
    out: Path, *, kept: str, folder: str, names: Sequence[str], rounds: int, steps: int, layers: int, width: int
) -> None:
    """On one rank: train the variants in turn; rank 0 adds the samples per second of each round to a file."""
    from transformers import TrainerCallback, TrainingArguments

    from bench.peers.bert_of_trainer import Texts, trainer_of

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begins_s: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begins_s.append(time.perf_counter())

    def samples_per_s(name: str) -> float:
        change = VARIANTS.get(name, {})
        count = steps if len(change) < 2 else LARGE_STEPS
        arguments = TrainingArguments(
            output_dir=str(Path(folder) / "out"),
            max_steps=WARMUP_STEPS + count + 1,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **change,
        )
        trainer = trainer_of(Texts(folder=folder, layers=layers, width=width), arguments)
        trainer.add_callback(clock := Clock())
        trainer.train()
        samples = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
        return float(count * samples / (clock.begins_s[-1] - clock.begins_s[WARMUP_STEPS]))

    for number in range(rounds):
        rates = {name: samples_per_s(name) for name in (names if number % 2 == 0 else names[::-1])}
        if os.environ["RANK"] == "0":
            with Path(kept).open("a") as file:
                file.write(json.dumps(rates) + "\n")
            out.write_text("{}")


def steps(chosen: argparse.Namespace) -> Table:
    """Samples/s of a BERT by Trainer with each piece of the usual advice, over its plain settings; as root."""
    table = Table(
        name="trainer-steps",
        question=f"transformers' Trainer, a BERT of {chosen.layers} layers of {chosen.width}, 2 hosts of one rank:",
        columns=["link", "change", "times as fast", "samples/s"],
        conditions={"steps": chosen.steps},
    )
    names = [PLAIN, *VARIANTS]
    given = {"steps": chosen.steps, "layers": chosen.layers, "width": chosen.width, "names": names}
    for rate in chosen.rates:
        kept = chosen.out.resolve() / f"{chosen.layers}x{chosen.width}-{rate}.jsonl"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()
        if (left := chosen.rounds - len(kept.read_text().splitlines())) > 0:
            with hosts(rate) as (start, env, options), tempfile.TemporaryDirectory() as folder:
                write_texts(Path(folder))
                launch = [*start, sys.executable, "-m", "launch", "run", *options, "-x", "OMP_NUM_THREADS", "--"]
                files = {"kept": str(kept), "folder": folder}
                job(launch, "cases.trainer:variants", env=env, rounds=left, **files, **given)
        found = [json.loads(line) for line in kept.read_text().splitlines()]
        by_name = {name: [rates[name] for rates in found] for name in names}
        for name in names:
            table.add(rate, name, ratio(by_name[name], by_name[PLAIN]), round(statistics.median(by_name[name])))
    return table


def ours(folder: Path, task: str, steps: int, seed: int) -> dict[str, float]:
    """Train by hvdtrain.bert."""
    words = f"--task {task} --max-steps {steps} --seed {seed} --runs-dir {folder} --run r --checkpoint-every 0s"
    run([*mpirun(RANKS), sys.executable, "-m", "hvdtrain.bert", *words.split()])
    result = json.loads((folder / "bert/r/result.json").read_text())
    return {"accuracy": result["eval_accuracy"], "samples_per_s": result["train_samples_per_s"]}


def trainers(folder: Path, task: str, steps: int, seed: int) -> dict[str, float]:
    """Train by Trainer, with the recipe of hvdtrain.bert."""
    write_texts(folder)
    words = f"--folder {folder} --task {task} --output_dir {folder}/out --max_steps {steps} --seed {seed}"
    words += f" --per_device_train_batch_size {GLOBAL_BATCH // RANKS} --per_device_eval_batch_size {GLOBAL_BATCH}"
    words += f" --learning_rate {LR} --warmup_steps {WARMUP} --weight_decay 0.01"
    words += " --use_cpu true --save_strategy no --report_to none --disable_tqdm true"
    program = str(HERE / "peers/bert_of_trainer.py")
    run([*torchrun(RANKS), sys.executable, program, *words.split()])
    result = json.loads((folder / "out/result.json").read_text())
    return {"accuracy": result["eval_accuracy"], "samples_per_s": result["samples_per_s"]}


def bert(chosen: argparse.Namespace) -> Table:
    """Accuracy and samples/s of hvdtrain.bert and of a short script for Trainer, on the same texts with one recipe."""
    table = Table(
        name="trainer-bert",
        question=f"hvdtrain.bert and Trainer on ICD-10, bert_tiny, {chosen.steps} steps, 2 ranks:",
        columns=["task", "hvdtrain, %", "Trainer, %", "difference, points", "hvdtrain / Trainer, samples/s"],
    )
    for task in chosen.tasks:
        found: dict[str, list[dict[str, float]]] = {"ours": [], "trainers": []}
        for seed in range(chosen.seeds):
            for side in ("ours", "trainers") if seed % 2 == 0 else ("trainers", "ours"):
                kept = chosen.out.resolve() / f"{task}-{chosen.steps}-{side}-{seed}.json"
                if not kept.exists():
                    with tempfile.TemporaryDirectory() as folder:
                        train = ours if side == "ours" else trainers
                        answer = train(Path(folder), task, chosen.steps, seed)
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_text(json.dumps(answer))
                    print(kept.name, answer, flush=True)
                found[side].append(json.loads(kept.read_text()))
        right = {side: [100 * one["accuracy"] for one in answers] for side, answers in found.items()}
        speeds = {side: [one["samples_per_s"] for one in answers] for side, answers in found.items()}
        points = middle([one - other for one, other in zip(right["ours"], right["trainers"], strict=True)])
        both = middle(right["ours"]), middle(right["trainers"])
        table.add(task, *both, points, ratio(speeds["ours"], speeds["trainers"]))
    return table


CASES = {
    "trainer-steps": Case(
        measure=steps,
        options={
            "rates": ["none", "100mbit"],
            "rounds": 5,
            "steps": 8,
            "layers": 2,
            "width": 128,
            "out": Path("build/bench/trainer-steps"),
        },
    ),
    "trainer-bert": Case(
        measure=bert,
        options={
            "tasks": ["classify", "mlm"],
            "seeds": 5,
            "steps": 100,
            "out": Path("build/bench/trainer-bert"),
        },
    ),
}
