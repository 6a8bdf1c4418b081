"""Profiling: where a step's time goes, with a verdict."""
