"""The examples in the docstrings of the public names, run by doctest.

They are one program in the order of the names: an example uses what those before it have defined. `run` is what `main`
receives in one process.
"""

import doctest
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hvdtrain

PROJECT = Path(__file__).resolve().parents[2]


def problems() -> list[str]:
    """Run all examples in a process and a folder of their own; return what is wrong with them."""
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "scripts.docs.examples"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    return [done.stdout or done.stderr] if done.returncode else []


def failures(named: Mapping[str, object], values: dict[str, Any]) -> Iterator[str]:
    """Yield a text for each name without an example, or with one that prints something else; they share `values`."""
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    for name, it in named.items():
        [test] = doctest.DocTestFinder(recurse=False).find(it, name)
        test.globs, report = values, list[str]()
        if not test.examples:
            yield f"docs: {name}: its docstring has no example"
        elif runner.run(test, out=report.append, clear_globs=False).failed:
            yield f"docs: {name}: an example of its docstring prints something else\n{''.join(report)}"


def main() -> int:
    """Print what is wrong with the examples; return the exit status."""
    import torch

    from hvdtrain.program.run import Run
    from hvdtrain.ranks.comm import SerialComm

    sys.argv = ["example.py"]
    settings = hvdtrain.Settings(epochs=1, batch_size_per_rank=2, run="a")
    with ExitStack() as stack:
        values = {"hvdtrain": hvdtrain, "torch": torch, "run": Run(SerialComm(), settings, stack)}
        found = list(failures({name: getattr(hvdtrain, name) for name in hvdtrain.__all__}, values))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
