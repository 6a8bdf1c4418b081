"""Host lists in all notations."""
