"""Remedies for a slow training, which its program names, measured one after the other."""
