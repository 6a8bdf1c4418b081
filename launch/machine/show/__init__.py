"""A topology as a table in words, and as a picture."""
