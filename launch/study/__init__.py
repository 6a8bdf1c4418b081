"""Many runs of one program, the scaling study; or none, the check of hosts."""
