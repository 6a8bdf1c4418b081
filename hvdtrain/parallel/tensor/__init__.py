"""Tensor parallelism: each rank of a replica holds a slice of each layer."""
