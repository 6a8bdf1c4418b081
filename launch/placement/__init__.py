"""Pure decisions: GPUs, rings, networks and the placement of ranks; and problems found on hosts."""
