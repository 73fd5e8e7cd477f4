"""Benchmarks: lowtide beside its peers and beside what the hardware allows, on the same work, in one process."""
