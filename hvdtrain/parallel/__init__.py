"""A training shared by ranks: sums of gradients, stages, slices, and the loss of ranks."""
