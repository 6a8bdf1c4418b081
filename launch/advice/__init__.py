"""Advice: predictions before you rent, measured remedies, studies and checks."""
