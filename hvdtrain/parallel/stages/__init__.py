"""Pipeline parallelism: a replica cut into stages, their blocks, and micro-batches passing through them."""
