"""The loop around a step: reports, evaluations, save points, limits, and hooks."""
