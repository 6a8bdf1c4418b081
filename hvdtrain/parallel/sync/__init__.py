"""Saves traffic on slow links: groups of ranks, two-level sums, local rounds, and low-rank gradients."""
