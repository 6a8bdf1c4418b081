"""The command line of hvdlaunch: from its arguments to its exit status."""
