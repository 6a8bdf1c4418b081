"""A run's state on disk: atomic checkpoints and exact resume."""
