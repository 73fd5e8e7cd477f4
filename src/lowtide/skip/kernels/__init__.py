"""Triton kernels: tensors in and out, no autograd. Imported where they run, never by `import lowtide`."""
