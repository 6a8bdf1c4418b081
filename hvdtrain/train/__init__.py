"""One training loop for any model: order, step, optimizer, reports."""
