"""Settings: groups of options, their command line, and which of them work together."""
