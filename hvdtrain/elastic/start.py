"""Become the program that a file names, in its environment; run by its path, on the host of a newcomer.

Standard library only: nothing of this project can be imported before the environment is there. The file is for its
owner alone, unlike a command line; once it is read it has the process's id.
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
