"""The files that ranks leave: their places, errors, last collectives and NCCL's logs."""
