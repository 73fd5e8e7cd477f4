"""What is computed of a chunk of logits: numbers of each row, and the gradient of a loss over these."""
