"""Programs of other libraries, unchanged, under hvdlaunch and under their own launcher; make test-peers."""
