"""Studies: a program at many sizes (sweep), and the check of hosts."""
