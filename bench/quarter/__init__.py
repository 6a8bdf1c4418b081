"""A quarter of an hour on one GPU: the most that a short loan of a machine without a network can answer."""
