"""The ways to start ranks, one file each."""
