"""The command estimate: predicts speed, cost and failures at other numbers of GPUs, without contacting any host."""

import argparse
import json
from dataclasses import replace

from launch.advice.estimate import inputs, report, sizes
from launch.advice.estimate.advice import advice
from launch.advice.estimate.hardware import CPU_INSIDE_GB_PER_S, INSIDE_UNKNOWN_GB_PER_S, MACHINES, Hardware
from launch.advice.estimate.inputs import Known
from launch.advice.estimate.step import Workload
from launch.cli.estimate_options import faults_of
from launch.cli.files import read, write
from launch.errors import CommandError

BYTES_EACH = 4  # DistributedDataParallel and Horovod sum fp32 gradients of fp32 weights, also with mixed precision


def estimate(options: argparse.Namespace) -> int:
    """Print the prediction for each size."""
    known = _known(options)
    machine = _hardware(options, known)
    if options.allreduce:
        from launch.advice.estimate.allreduce import calibrated

        try:  # bandwidth and latency as at the largest measured size
            machine = calibrated(machine, max(one.gpus for one in known.measured), options.allreduce)
        except ValueError as error:
            raise CommandError(f"--allreduce: {error}") from None
    if options.overlap is not None:
        known = replace(known, job=replace(known.job, overlap=options.overlap))
    question = _question(options, known)
    found = sizes.sizes(known, machine, question)
    lines = advice(found, known, machine, question)
    assumed = report.assumptions(known, machine, question)
    if options.csv is not None:
        write(options.csv, report.to_csv(found))
    if options.picture is not None:
        from launch.advice.estimate.picture import draw

        draw(found, known, options.picture)
    if options.json:
        print(json.dumps(report.to_json(found, lines, assumed, known), indent=1))
    else:
        print(report.to_markdown(found, lines, assumed, known))
    return 0


def _known(options: argparse.Namespace) -> Known:
    """Read the given source."""
    given = [
        name
        for name, value in (("RUN", options.runs), ("--dry-run", options.dry_run), ("--measured", options.measured))
        if value
    ]
    if len(given) != 1:
        wrong = f"{' and '.join(given)} do not go together" if given else "nothing was measured"
        raise CommandError(f"{wrong}. Pass either folders of runs, or --dry-run FILE, or --measured 8=1223.")
    of_measured = {"--model": options.model, "--batch": options.batch, "--precision": options.precision}
    if options.measured:
        if missing := [name for name, value in of_measured.items() if value is None]:
            raise CommandError(f"--measured requires {', '.join(missing)}")
        job = Workload(
            model=options.model,
            unit=options.unit or "images",
            precision=options.precision,
            batch_per_gpu=options.batch,
            gradient_bytes=BYTES_EACH * inputs.parameters_of(options.model),
        )
        return inputs.from_speeds(options.measured, job, _hardware(options, None))
    if extra := [name for name, value in {**of_measured, "--unit": options.unit}.items() if value is not None]:
        raise CommandError(f"{', '.join(extra)} requires --measured. Runs and dry runs have their own.")
    if options.runs:
        return inputs.read_runs(options.runs)
    if options.machine is None:
        raise CommandError("--dry-run requires --machine, for example dgx-a100.")
    text, name = read(options.dry_run)
    return inputs.read_dry_run(text, name=name, device=MACHINES[options.machine].device)


def _hardware(options: argparse.Namespace, known: Known | None) -> Hardware:
    """Return the machine, with values replaced by options; the default is hosts like those of the runs."""
    if options.machine is not None:
        if known is not None and known.is_cpu:
            raise CommandError(
                f"--machine {options.machine}: these runs were on CPUs, which say nothing of the speed of GPUs. Leave "
                "it out, or pass --dry-run FILE, which the program's `--dry-run json` prints."
            )
        machine = MACHINES[options.machine]
        if known is not None and known.device and (machine.device or "") not in known.device.lower():
            raise CommandError(f"--machine {options.machine}: these runs were on {known.device}. Pass --link instead.")
    else:
        is_cpu = known is not None and known.is_cpu
        measured = [one.per_host for one in known.measured] if known else [*(options.measured or {1: 0.0})]
        machine = Hardware(
            name="hosts as measured",
            gpus_per_host=max(measured),
            inside_gb_per_s=CPU_INSIDE_GB_PER_S if is_cpu else INSIDE_UNKNOWN_GB_PER_S,
            link_gb_per_s=None,
            is_cpu=is_cpu,
        )
    return replace(
        machine,
        gpus_per_host=options.gpus_per_host or machine.gpus_per_host,
        link_gb_per_s=options.link or machine.link_gb_per_s,
        name=machine.name if options.link is None else f"{machine.name}, --link",
    )


def _question(options: argparse.Namespace, known: Known) -> sizes.Question:
    samples = options.samples_per_epoch or known.samples_per_epoch
    for name, value in (("--epochs", options.epochs), ("--deadline", options.deadline)):
        if value is not None and samples is None:
            raise CommandError(f"{name} requires --samples-per-epoch: only a run folder has it")
    epochs = options.epochs or known.epochs
    for name, value in (("--deadline", options.deadline), ("--price-per-gpu-hour", options.price_per_gpu_hour)):
        if value is not None and epochs is None:
            raise CommandError(f"{name} requires --epochs")
    return sizes.Question(
        gpus=options.gpus,
        price_per_gpu_hour=options.price_per_gpu_hour,
        epochs=epochs,
        samples_per_epoch=samples,
        hours=options.hours,
        deadline_h=options.deadline,
        critical=options.critical_batch or sizes.CRITICAL.get(known.data or ""),
        save_s=options.save_s,
        faults=faults_of(options),
    )
