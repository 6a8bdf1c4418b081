"""Replaces this process by the program in a file, with its environment; run by its path on a newcomer's host.

It uses the standard library only, because the project cannot be imported before the environment is set. The file is
readable only for its owner, unlike a command line; after reading, the process id is written to it.
"""

import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    file = Path(sys.argv[1])
    start = json.loads(file.read_text())
    file.write_text(str(os.getpid()))
    os.chdir(start["folder"])
    os.environ.update(start["environment"])
    os.execvp(start["program"][0], start["program"])  # noqa: S606 (that is what this file is for)
