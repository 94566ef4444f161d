"""Checks of one machine, all hosts and all ranks, each with a remedy."""
