"""The hardware and software of one host: its topology, its MPI, and the tools that read them."""
