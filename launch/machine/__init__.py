"""What one host has, its topology and its MPI, and who reads them."""
