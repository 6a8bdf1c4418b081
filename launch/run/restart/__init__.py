"""Starts a failed run again, with the hosts that are left, back or new."""
