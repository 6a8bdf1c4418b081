"""Tasks: images and texts, which never import each other."""
