"""Pure decisions: which GPUs, which ring, which network, which rank where; and what is wrong with hosts."""
