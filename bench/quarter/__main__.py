"""The command of the quarter: python -m bench.quarter --work FOLDER --output FOLDER [--only NAMES] [--rehearse]."""

import argparse
import os
import signal
from pathlib import Path
from typing import NoReturn

from bench.quarter.driver import Quarter
from bench.quarter.steps import schedule

HERE = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--only", default="", help="beginnings of names of steps, with commas")
    parser.add_argument("--rehearse", action="store_true", help="run small, on CPUs")
    chosen = parser.parse_args()
    work, output = chosen.work.resolve(), chosen.output.resolve()
    quarter = Quarter(
        work=work,
        output=output,
        minutes=chosen.minutes,
        on_cpus=chosen.rehearse,
        only=chosen.only.split(",") if chosen.only else (),
    )

    def stop(*_: object) -> NoReturn:
        quarter.stop()
        os._exit(143)

    signal.signal(signal.SIGTERM, stop)
    for lanes in schedule(HERE, work, output, small=chosen.rehearse):
        quarter.run(lanes)
    states = [row["state"] for row in quarter.rows]
    others = [f"{row['step']} {row['state']}" for row in quarter.rows if row["state"] != "OK"]
    print(f"{states.count('OK')} of {len(states)} steps are OK; others: {', '.join(others) or 'none'}")
    return 1 if {"FAILED", "WRONG"} & set(states) or (chosen.rehearse and "LIMIT" in states) else 0


if __name__ == "__main__":
    raise SystemExit(main())
