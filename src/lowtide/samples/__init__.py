"""Whether weights were written to between forward and backward."""

from lowtide.samples.weights import INTEGERS, Samples

__all__ = ["INTEGERS", "Samples"]
