"""A model on one rank and on several: its state, the modes of its modules, running statistics."""
