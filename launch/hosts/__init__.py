"""Lists of hosts in every spelling."""
