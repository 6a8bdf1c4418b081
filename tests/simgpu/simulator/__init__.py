"""A CUDA device that is not there, and Horovod on it: values, waits, races, devices; for tests."""
