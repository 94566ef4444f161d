"""Builds Horovod for the frameworks and the MPI of this environment, and proves that it works."""
