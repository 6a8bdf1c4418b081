"""A random rank is killed every 15 seconds, and the run still ends with the weights of an undisturbed run.

    python bench/soak.py                        5 minutes of kills at 3 ranks; `make soak`
    python bench/soak.py --minutes 30 --seed 7

Prints the kills and restarts, the goodput (the share of the time from start to end that went into steps that count:
train_time_s of the result), and the mean time from a kill to the next step that is done. Ends with status 1 if the
weights differ in a single bit.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from watched import At, Watched

RANKS = 3
EVERY_S = 15.0  # between kills
CHECKPOINT_STEPS = 10
TRIAL_EPOCHS = 10
MOST_GOODPUT = 0.6  # the run is so long that with less goodput it does not end before the last kill
SETTINGS = ["--deterministic", "--checkpoint-every-steps", str(CHECKPOINT_STEPS)]


def undisturbed(epochs: int) -> tuple[set[str], float]:
    """The hashes of the weights of an undisturbed run, and the seconds that its steps took."""
    words = [*SETTINGS, "--epochs", str(epochs)]
    with tempfile.TemporaryDirectory() as folder, Watched(Path(folder), ranks=RANKS, words=words) as job:
        assert job.process.wait() == 0, job.lines[-1].text
        return job.weights(), job.result()["train_time_s"]


def kill_now_and_then(job: Watched, *, seconds: float, draws: random.Random) -> tuple[int, list[float]]:
    """Kill ranks for so many seconds, then wait for the end; the number of kills, and the seconds of each recovery."""
    kills, recoveries, next_s = 0, list[float](), job.started_s + EVERY_S
    struck: tuple[float, At] | None = None  # a second kill before steps are done again belongs to the first
    while job.process.poll() is None:
        time.sleep(0.02)
        if struck is not None and (on_again_s := job.goes_on(0, after=struck[1])):
            recoveries.append(on_again_s - struck[0])
            struck = None
        if next_s < min(time.monotonic(), job.started_s + seconds):
            next_s += EVERY_S
            before = job.at(0) or At(attempt=0, step=0)
            if job.signal(signal.SIGKILL, rank=draws.randrange(RANKS)):
                kills += 1
                struck = struck or (time.monotonic(), before)
    return kills, recoveries


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=5.0, help="for how long ranks are killed")
    arguments.add_argument("--seed", type=int, default=0, help="draws the ranks")
    chosen = arguments.parse_args()
    seconds = 60 * chosen.minutes
    _, trial_s = undisturbed(TRIAL_EPOCHS)
    epochs = round(TRIAL_EPOCHS * MOST_GOODPUT * seconds / trial_s)
    expected, _ = undisturbed(epochs)
    words, options = [*SETTINGS, "--epochs", str(epochs)], ["--restarts", "1000"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Watched(Path(folder), ranks=RANKS, options=options, words=words) as job,
    ):
        kills, recoveries = kill_now_and_then(job, seconds=seconds, draws=random.Random(chosen.seed))  # noqa: S311
        took_s = time.monotonic() - job.started_s
        assert job.process.returncode == 0, job.lines[-1].text
        result, weights = job.result(), job.weights()
        restarts = sum(line.text.startswith("hvdlaunch: warning: restart ") for line in job.lines)
    same = len(expected) == 1 and weights == expected
    print(f"{result['steps']} steps on {RANKS} ranks in {took_s:.0f} s, {kills} kills, {restarts} restarts")
    print(f"goodput {result['train_time_s'] / took_s:.0%}")
    if recoveries:
        print(
            f"from a kill to the next step that is done: mean {statistics.mean(recoveries):.1f} s "
            f"({min(recoveries):.1f} to {max(recoveries):.1f}, n = {len(recoveries)})"
        )
    print("weights bit-equal to an undisturbed run" if same else f"weights differ: {weights}, undisturbed {expected}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
