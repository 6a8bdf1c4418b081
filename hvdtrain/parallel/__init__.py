"""A training shared by ranks: sums of gradients, stages and slices."""
