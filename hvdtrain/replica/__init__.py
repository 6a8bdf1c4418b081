"""Replicas that lie on several ranks each: their ranks, and what these send each other."""
