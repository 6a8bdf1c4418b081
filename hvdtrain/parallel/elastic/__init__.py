"""Elastic runs: ranks survive the loss of others, and replacement ranks join."""
