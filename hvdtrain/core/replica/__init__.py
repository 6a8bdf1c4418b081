"""Replicas split over several ranks: the ranks, and communication between them."""
