"""The cost of a step on an absent GPU: operators, bytes, memory and time, computed from shapes only."""
