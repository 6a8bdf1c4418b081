"""What spares a slow link: groups of ranks, sums in two levels, rounds of their own, and thin gradients."""
