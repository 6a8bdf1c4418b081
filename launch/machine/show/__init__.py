"""Shows a topology as a table of text, and as a picture."""
