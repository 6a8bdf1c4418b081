"""A run's state on disk: whole or not at all, and exact resume."""
