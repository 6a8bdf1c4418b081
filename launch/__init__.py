"""hvdlaunch: from a machine's topology to running ranks. No torch here: it runs on a login node."""
