"""The terms, computed from a chunk of logits: numbers of each row, and the gradient of a loss over these."""
