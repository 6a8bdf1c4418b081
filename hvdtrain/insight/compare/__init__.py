"""Comparisons of run folders: tables, pictures, a page; reads files only."""
