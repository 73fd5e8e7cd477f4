"""Triton kernels over rows and heads: tensors in, tensors out."""
