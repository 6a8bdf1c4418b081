"""Prototypes of what ranks may send each other over a slow link; bench/slow_link.py compares them."""

FLAT = "flat"  # what the others are compared with
