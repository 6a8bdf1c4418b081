"""All that crosses ranks: communicators, agreement, devices."""
