"""A program put together: its settings, its ranks, and a training that is ready to run."""
