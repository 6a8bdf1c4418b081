"""What one host has: its topology and who reads it."""
