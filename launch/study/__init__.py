"""Many runs of one program: the scaling study."""
