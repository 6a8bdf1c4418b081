"""Assembles a program: its settings, its ranks, and a training that is ready to run."""
