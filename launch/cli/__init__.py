"""hvdlaunch's words in, its exit status out."""
