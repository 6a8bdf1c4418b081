"""The path of samples to a step: which samples each rank sees, and how they reach its device."""
