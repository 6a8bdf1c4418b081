"""Layers of which each rank of a replica holds a slice."""
