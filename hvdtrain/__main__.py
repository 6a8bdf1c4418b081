"""Print the versions of hvdtrain and torch, and the programs of this package.

python -m hvdtrain
"""

import ast
from importlib.metadata import version
from pathlib import Path

from hvdtrain.settings.safety import exits, output
from hvdtrain.settings.safety.torch_version import require_tested

PROGRAMS = ("effnet", "bert", "bandwidth", "trainer", "compare")


def main() -> None:
    """Print them, after a note or an error about an untested torch."""
    if note := require_tested():
        exits.print_message("note", note)
    output.print_line(f"hvdtrain {version('hvdtrain')}, torch {version('torch')}")
    for name in PROGRAMS:
        summary = ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text())) or ""
        output.print_line(f"  python -m hvdtrain.{name:<10} {summary.splitlines()[0]}")


if __name__ == "__main__":
    exits.run(main)
