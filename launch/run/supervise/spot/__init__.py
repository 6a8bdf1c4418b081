"""Spot instances: the notices of clouds that end a host, read on every host of a run."""
