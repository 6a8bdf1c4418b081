"""A replica cut into stages: blocks, where to cut, and micro-batches on their way through."""
