"""Ranks that outlive others: how they go on in place, as fewer."""
