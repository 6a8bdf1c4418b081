"""Plan before you rent: what other numbers of GPUs would give, cost and lose to failures; pure functions."""
