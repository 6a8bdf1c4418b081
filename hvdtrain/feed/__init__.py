"""The way of samples to a step: which ones each rank sees, and how they reach its device."""
