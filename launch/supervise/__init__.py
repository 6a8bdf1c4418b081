"""One run from its start to its end: supervised, explained, cleaned up."""
