"""Groups of ranks that a slow link joins: who is in them, sums in two levels, and rounds of their own."""
