"""Does a BERT keep its accuracy with a larger batch? Recipe `tiny` on icd10 at a global batch of 32 and of 256.

    python bench/batch_of_texts.py --out runs/batch_of_texts

The same epochs and seeds at both, differences by seed, 95 % by Student's t. One process a run, two runs at a time: the
number of ranks does not matter. A run that the same program has made in OUT already is not made again. Beside them
stands a linear model of words on the same split.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pairs import HERE, Table, environment
from scipy import stats
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from hvdtrain.text import icd10

BATCHES = {32: 1, 256: 4}  # micro-batches each: 8 texts are too few to keep a core busy


def accuracy(out: Path, batch: int, seed: int, *, words: list[str]) -> float:
    """In percent, of one run."""
    made_by, name = program(words), f"{batch}-{seed}"
    result = out / made_by / name / "result.json"
    if not result.exists() or json.loads(result.read_text())["exit_reason"] != "finished":
        run = ["--runs-dir", str(out), "--experiment", made_by, "--run", name]
        options = ["--global-batch-size", str(batch), "--accumulate-steps", str(BATCHES[batch]), "--seed", str(seed)]
        options += ["--checkpoint-every-s", "0", *words]
        command = [sys.executable, "-m", "hvdtrain.bert", *run, *options]
        subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=True)
    return 100 * float(json.loads(result.read_text())["eval_accuracy"])


def program(words: list[str]) -> str:
    """A name for the program with these options: another when either has changed."""
    files = sorted((HERE.parent / "hvdtrain").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files) + repr(words).encode()).hexdigest()[:12]


def linear() -> float:
    """In percent, of words and pairs of words with logistic regression."""
    train, test = list(icd10.train()), list(icd10.test())
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = LogisticRegression(C=10, max_iter=300)
    model.fit(vectors.fit_transform([row.text for row in train]), [row.label for row in train])
    return 100 * float(model.score(vectors.transform([row.text for row in test]), [row.label for row in test]))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("runs/batch_of_texts"))
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("words", nargs="*", help="other options of hvdtrain.bert, after --")
    chosen = arguments.parse_args()
    runs = [(batch, seed) for seed in range(chosen.seeds) for batch in BATCHES]
    with ThreadPoolExecutor(2) as two:
        ended = two.map(lambda run: accuracy(chosen.out, *run, words=chosen.words), runs)
        found = dict(zip(runs, ended, strict=True))
    table = Table(
        name="batch_of_texts",
        question="Accuracy in percent on icd10's test, from scratch:",
        columns=["what", "mean", "by seed", "95 %"],
    )
    for batch in BATCHES:
        values = [found[batch, seed] for seed in range(chosen.seeds)]
        row(table, f"global batch {batch}", values)
    row(table, "256 less 32", [found[256, seed] - found[32, seed] for seed in range(chosen.seeds)])
    table.add(what="words, linear", mean=f"{linear():.2f}")
    table.write()


def row(table: Table, what: str, values: list[float]) -> None:
    mean, half = statistics.fmean(values), 0.0
    if len(values) > 1:
        half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    by_seed = " ".join(f"{value:.2f}" for value in values)
    table.add(
        **{"what": what, "mean": f"{mean:.2f}", "by seed": by_seed, "95 %": f"{mean - half:.2f} to {mean + half:.2f}"}
    )


if __name__ == "__main__":
    main()
