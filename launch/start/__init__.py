"""From options to the very command: ask, decide, render."""
