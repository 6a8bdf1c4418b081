"""Predictions before you rent: speed, cost and failures at other numbers of GPUs; pure functions."""
