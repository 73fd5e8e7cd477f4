"""Cross entropy and token statistics where a GEMM finishes the rows of logits, which never exist. Needs Triton."""
