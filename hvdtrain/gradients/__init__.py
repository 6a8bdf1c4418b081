"""How gradients become sums over ranks: buckets, wire formats, two levels."""
