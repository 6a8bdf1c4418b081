"""Commands of the set-up, run to their end."""

import subprocess


def run(words, **how):
    """Its status and what it printed, as text."""
    return subprocess.run(words, capture_output=True, text=True, check=False, **{"timeout": 60, **how})
