"""The files that ranks leave: their places, errors and last collectives."""
