"""How fast the ranks of one host sum: our path beside its peers, and Open MPI's algorithms and transports below it.

    python bench/allreduce.py --rounds 7                         all tables, about half an hour
    python bench/allreduce.py --only algorithms --np 2,4

Each job is `python -m hvdtrain.bandwidth` with one kind of sum: beside the others' Horovod's thread would take
cores from them. The jobs take turns; a ratio is of the speeds of two jobs of one round, by their medians: how
many times as fast the one is. Aim: from 16 MB up ours at least 0.9 times as fast as mpi4py's Allreduce.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pairs

SIZES = "1KB,16KB,256KB,1MB,4MB,16MB,64MB,256MB"
BANDWIDTH = [sys.executable, "-m", "hvdtrain.bandwidth"]
Variants = dict[str, tuple[list[str], str]]  # the launcher's words by ranks, and what it sums over

# For all messages, whatever their size. `2` sends to the root of a tree and from there.
ALGORITHMS = {
    "tree: reduce, then broadcast": "2",
    "recursive doubling": "3",
    "ring": "4",
    "ring in segments of 1 MB": "5",
    "Rabenseifner": "6",
}
TRANSPORTS = {
    "ob1, shared memory": ["--mca", "pml", "ob1", "--mca", "btl", "vader,self"],
    "ob1, shared memory, copied twice": [
        "--mca",
        "pml",
        "ob1",
        "--mca",
        "btl",
        "vader,self",
        "--mca",
        "btl_vader_single_copy_mechanism",
        "none",
    ],
    "UCX": ["--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any"],
}


def peers(ranks: int) -> Variants:
    """Ours first; each as a user would start it."""
    mpirun = pairs.mpirun(ranks)
    return {
        "ours": (mpirun, "ours"),
        "mpi4py": (mpirun, "mpi4py"),
        "torch.distributed gloo": (mpirun, "gloo"),
        "Horovod's Gloo": (["horovodrun", "--gloo", "-np", str(ranks)], "ours"),
    }


def algorithms(ranks: int) -> Variants:
    """Open MPI's own choice by size first."""
    chosen = ["--mca", "coll_tuned_use_dynamic_rules", "1"]
    segments = ["--mca", "coll_tuned_allreduce_algorithm_segmentsize", str(2**20)]
    variants = {"Open MPI's choice": (pairs.mpirun(ranks), "mpi4py")}
    for name, number in ALGORITHMS.items():
        words = [*chosen, "--mca", "coll_tuned_allreduce_algorithm", number, *(segments if number == "5" else [])]
        variants[name] = (pairs.mpirun(ranks, *words), "mpi4py")
    return variants


def transports(ranks: int) -> Variants:
    """Open MPI's own choice first."""
    variants = {"Open MPI's choice": (pairs.mpirun(ranks), "mpi4py")}
    return {**variants, **{name: (pairs.mpirun(ranks, *words), "mpi4py") for name, words in TRANSPORTS.items()}}


def memory(ranks: int) -> Variants:
    """As it is first. Else the C library gives large blocks back and gets them anew, page by page, at every sum."""
    kept = {"MALLOC_ARENA_MAX": 1, "MALLOC_MMAP_THRESHOLD_": 2**30, "MALLOC_TRIM_THRESHOLD_": 2**32}
    words = [word for name, value in kept.items() for word in ("-x", f"{name}={value}")]
    return {"as it is": (pairs.mpirun(ranks), "ours"), "kept": (pairs.mpirun(ranks, *words), "ours")}


QUESTIONS = {
    "peers": (peers, "All-reduce in place of float32 on one host: our path against its peers"),
    "algorithms": (algorithms, "Open MPI's algorithms for an all-reduce, against its own choice"),
    "transports": (transports, "Open MPI's transports for an all-reduce, against its own choice"),
    "memory": (memory, "An all-reduce whose memory the process keeps, against as it is"),
}


def median_s(launch: Sequence[str], over: str, sizes: str, repeats: int) -> dict[int, float]:
    """By bytes, of one job; ends the bench where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        asked = ["--over", over, "--sizes", sizes, "--repeats", str(repeats), "--json", str(file)]
        words = [*launch, *BANDWIDTH, *asked]
        done = subprocess.run(words, env=pairs.environment(), stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(words)}: exit status {done.returncode}")
        return {line["bytes"]: line["median_s"] for line in json.loads(file.read_text())["measured"]}


def transport() -> str:
    """What Open MPI chooses on this host by itself, in its own words: ob1 (shared memory or TCP), or ucx."""
    words = pairs.mpirun(2, "--mca", "pml_base_verbose", "10", sys.executable, "-c", "import mpi4py.MPI")
    said = subprocess.run(words, env=pairs.environment(), capture_output=True, text=True, check=True).stderr
    return next(line.split()[2] for line in said.splitlines() if "] selected " in line)


def answer(question: str, ranks: int, sizes: str, rounds: int, repeats: int) -> None:
    """One table: a line for each size and variant."""
    variants_of, text = QUESTIONS[question]
    variants = variants_of(ranks)
    turns = {name: partial(median_s, *variant, sizes, repeats) for name, variant in variants.items()}
    about = {"transport": transport(), "sums per job": repeats, "jobs of each": rounds}
    measured = pairs.in_turns(turns, rounds)
    first = next(iter(variants))
    against = f"{first} against it" if question == "peers" else f"it against {first}"
    table = pairs.Table(
        name=f"allreduce-{question}-np{ranks}",
        question=f"{text}, {ranks} ranks",
        columns=["bytes", "variant", "ms", "bus GB/s", against],
        about=about,
    )
    for size in measured[first][0]:
        ours_s = [job[size] for job in measured[first]]
        for name, jobs in measured.items():
            theirs_s = [job[size] for job in jobs]
            above, below = (theirs_s, ours_s) if question == "peers" else (ours_s, theirs_s)
            middle = pairs.middle(theirs_s)
            table.add(
                **{
                    "bytes": size,
                    "variant": name,
                    "ms": f"{middle.median * 1e3:.3f}",
                    "bus GB/s": f"{size / middle.median * 2 * (ranks - 1) / ranks / 1e9:.3f}",
                    against: "-" if name == first else pairs.ratio(above, below),
                }
            )
    table.write()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", choices=QUESTIONS, help="one table; default: all")
    arguments.add_argument("--np", default="2", help="numbers of ranks, as 2,4")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--repeats", type=int, default=20)
    arguments.add_argument("--sizes", default=SIZES)
    chosen = arguments.parse_args()
    for question in [chosen.only] if chosen.only else QUESTIONS:
        for ranks in chosen.np.split(","):
            answer(question, int(ranks), chosen.sizes, chosen.rounds, chosen.repeats)


if __name__ == "__main__":
    main()
