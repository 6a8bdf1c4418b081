"""Runs on each rank before the program; standard library only."""
