"""Print the versions of hvdtrain and torch, and the programs of this package.

python -m hvdtrain
"""

import ast
from importlib.metadata import version
from pathlib import Path

from hvdtrain.safety import exits, output
from hvdtrain.safety.torch_version import require_tested

PROGRAMS = ("effnet", "bert", "bandwidth", "trainer", "compare")


def main() -> None:
    """Print them, after a note or an error about an untested torch."""
    if note := require_tested():
        exits.print_message("note", note)
    output.print_line(f"hvdtrain {version('hvdtrain')}, torch {version('torch')}")
    for name in PROGRAMS:
        program = Path(__file__).with_name(name)
        file = program / "__main__.py" if program.is_dir() else program.with_suffix(".py")
        about = ast.get_docstring(ast.parse(file.read_text())) or ""
        output.print_line(f"  python -m hvdtrain.{name:<10} {about.splitlines()[0]}")


if __name__ == "__main__":
    exits.run(main)
