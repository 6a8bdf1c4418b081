"""The options of hvdlaunch run for writing a job file instead of starting ranks."""

import argparse
from pathlib import Path

from launch.start.mpijob import MEMORY
from launch.start.request import CORES_ON_CPUS, CORES_WITH_GPU


def add_job_options(run: argparse.ArgumentParser) -> None:
    """Add --sbatch and --mpijob, and the options that each passes on."""
    cores = f"{CORES_WITH_GPU} cores for each rank with a GPU, {CORES_ON_CPUS} for each rank on CPUs"
    run.add_argument("--sbatch", type=Path, metavar="FILE", help="write a Slurm batch script; default: run now")
    run.add_argument(
        "--sbatch-option",
        dest="sbatch_options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for that script: time=4:00:00, partition=gpu, exclusive; default: our own, which it may replace; "
        f"cpus-per-task by --topology, or else {cores}",
    )
    run.add_argument("--mpijob", type=Path, metavar="FILE", help="write a Kubeflow MPIJob; default: run now")
    run.add_argument(
        "--mpijob-option",
        dest="mpijob_options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for that job: image=IMAGE, and claim=NAME of a volume for all pods, both needed; cpu=N and memory=SIZE "
        f"to request for each rank, default: {cores}, and {MEMORY}",
    )
