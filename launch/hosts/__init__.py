"""Hosts: their lists in all notations, and probes of them."""
