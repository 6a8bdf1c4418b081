"""Probes of hosts, and their results."""
