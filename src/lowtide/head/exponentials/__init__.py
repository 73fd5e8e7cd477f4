"""Cross entropy and token statistics in a GEMM's epilogue, without logits in memory. Needs Triton."""
