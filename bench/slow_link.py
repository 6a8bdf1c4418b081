"""What may cross a slow link between hosts, so that it costs least: prototypes against the flat sum.

    python bench/slow_link.py                  as root with iproute2; skips with the reason elsewhere

Two hosts are network namespaces, the link between them is as slow as tc makes it. What has been measured stays in
build/bench/slow_link/ and is not measured again, as long as neither the words nor the code of what ran has changed.
"""

import argparse
import ast
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import two_hosts
from pairs import HERE, RESULTS, Table, middle, ratio
from slow_link_tables import Learned, accuracy_table, draw, time_table
from sync import FLAT

KEPT = RESULTS / "slow_link"
# Rate, ranks per host, model.
SHAPES = [*product(("100mbit", "1gbit"), (1, 2), ("efficientnet_b0",)), ("10mbit", 1, "efficientnet_tiny")]
# What the step times leave, and settings of local that were tried with the first seed alone.
LEFT = (FLAT, "local 16", "local 16, overlapped", "PowerSGD 2", "top-k 1 %")
TRIED = ("local 4", "local 16 after epoch 5", "local 16, outer momentum 0.3")
GOAL = 0.97
RANKS, SPEED_UP, SHARE = "hosts x ranks", "speed-up over flat", "share of the ceiling"

Round = dict[str, dict[str, float]]  # by variant: batch_s, sent_bytes, alone_s


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--seeds", type=int, default=2)
    words.add_argument("--batch", type=int, default=16, help="images per rank")
    chosen = words.parse_args()
    if (reason := two_hosts.why_not()) is not None:
        print(f"skipped: {reason}")
        return
    KEPT.mkdir(parents=True, exist_ok=True)
    table = Table(
        name="slow_link",
        question="Time of a batch and bytes that a host sends, by what crosses the link:",
        columns=["link", RANKS, "variant", "ms per batch", "MB per batch", SPEED_UP, SHARE],
        about={"batch per rank": chosen.batch, "rounds": chosen.rounds},
    )
    for rate, ranks, model in SHAPES:
        rounds = [one_round(rate, ranks, model, chosen.batch, number) for number in range(chosen.rounds)]
        add_rows(table, rounds, link=f"{rate}, {model}", ranks=ranks)
    table.write()
    sent_table().write()
    learned = {name: digits(name, seeds=range(chosen.seeds)) for name in LEFT}
    learned |= {name: digits(name, seeds=range(1)) for name in TRIED}
    accuracies = accuracy_table(learned, FLAT)
    accuracies.write()
    timed = {name: timed_digits(name) for name in LEFT}
    time_table(timed, FLAT, GOAL).write()
    draw(table.rows, {name: timed[name] for name in LEFT}, GOAL, KEPT / "slow_links.png")


def one_round(rate: str, ranks: int, model: str, batch: int, number: int) -> Round:
    """All variants one after the other; every other round backwards."""
    words = ["--model", model, "--batch", str(batch), *(["--backwards"] if number % 2 else [])]
    name = f"steps-{rate}-2x{ranks}-{number}"
    found: Round = kept(name, "slow_link_steps.py", words, rate=rate, ranks=ranks)
    return found


def sent_table() -> Table:
    """What a host sends for one sum, by ranks per host; bytes need no shaped link."""
    table = Table(name="slow_link_bytes", question="MB that a host sends for the sum of 16 MB:", columns=[RANKS])
    for ranks in (1, 2, 3, 4, 6, 8):
        sent = kept(f"bytes-2x{ranks}", "slow_link_bytes.py", [], rate="none", ranks=ranks)
        table.columns = [RANKS, *sent]
        table.add(**{RANKS: f"2 x {ranks}", **{way: f"{mb:.1f}" for way, mb in sent.items()}})
    return table


def digits(name: str, *, seeds: Iterable[int]) -> dict[str, Learned]:
    """By seed and fold; without a shaped link, since the accuracy does not know it."""
    found: dict[str, Learned] = {}
    for seed in seeds:
        words = ["--sync", name, "--seed", str(seed)]
        of_seed = kept(f"digits-{file_name(name)}-{seed}", "slow_link_digits.py", words, rate="none", ranks=1)
        found |= {f"{seed} {fold}": one for fold, one in of_seed.items()}
    return found


def timed_digits(name: str) -> dict[str, Learned]:
    """By fold, at 10 Mbit/s until the accuracy is reached."""
    words = ["--sync", name, "--folds", "0", "1", "2", "--until", str(GOAL)]
    found: dict[str, Learned] = kept(f"timed-{file_name(name)}", "slow_link_digits.py", words, rate="10mbit", ranks=1)
    return found


def file_name(words: str) -> str:
    return re.sub(r"\W+", "-", words).strip("-")


def kept(name: str, program: str, words: Sequence[str], *, rate: str, ranks: int) -> Any:
    """What the program has answered with these words, now or at an earlier time."""
    code = "".join(meaning(file) for file in (HERE / program, HERE / "two_hosts.py", *sorted(HERE.glob("sync/*.py"))))
    key = hashlib.sha256(" ".join([code, rate, str(ranks), *words]).encode()).hexdigest()[:12]
    file = KEPT / f"{name}-{key}.json"
    if not file.exists():
        part = file.with_suffix(".part").resolve()
        two_hosts.run(rate, ranks, [str(HERE / program), str(part), *words])
        part.rename(file)
    return json.loads(file.read_text())


def meaning(file: Path) -> str:
    """A program without its comments and docstrings."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)


def add_rows(table: Table, rounds: Sequence[Round], *, link: str, ranks: int) -> None:
    """The ceiling first: (compute + communication) / compute; of flat's time and of the computation alone beside it."""
    times = {name: [one[name]["batch_s"] for one in rounds] for name in rounds[0]}
    alone = {name: [one[name]["alone_s"] for one in rounds] for name in rounds[0]}
    print(f"{link}, 2 x {ranks}: ceiling {ratio(times[FLAT], alone[FLAT])}")
    for name, seconds in times.items():
        table.add(
            link=link,
            variant=name,
            **{
                RANKS: f"2 x {ranks}",
                "ms per batch": round(1000 * middle(seconds).median),
                "MB per batch": round(rounds[0][name]["sent_bytes"] / 1e6, 2),
                SPEED_UP: ratio(times[FLAT], seconds),
                SHARE: ratio(alone[name], seconds),
            },
        )


if __name__ == "__main__":
    main()
