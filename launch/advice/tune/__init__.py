"""Tunes a slow training: measures the remedies that its program proposes, one by one."""
