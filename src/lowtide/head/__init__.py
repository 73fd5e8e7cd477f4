"""Everything between hidden states and a loss: the final linear layer and the loss over its logits, without logits."""
