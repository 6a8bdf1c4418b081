"""Prototypes of what ranks may send each other over a slow link; bench/slow_link.py compares them."""

ALONE, FLAT = "no sync", "flat"  # what a ceiling is made of
