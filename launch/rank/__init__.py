"""What runs on each rank before the program: standard library alone."""
