"""The exponential path: the logits' GEMM writes exponentials, or sums of tiles. On one rank, or on one of several."""
