"""Whether weights were written to between forward and backward: see `weights.Samples`."""
