"""One run from start to end: supervised, diagnosed, cleaned up."""
