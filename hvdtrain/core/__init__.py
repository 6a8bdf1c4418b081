"""One training step, and what the loop around it needs; independent of the task and of the number of ranks."""
