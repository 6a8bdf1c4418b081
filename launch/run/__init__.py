"""A run: its command, its supervision, and what stands before each rank."""
