"""From options to the exact command: probe, decide, render."""
