"""Questions to hosts, and their answers."""
