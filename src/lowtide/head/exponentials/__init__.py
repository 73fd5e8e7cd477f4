"""The exponential path: chunks of unnormalised exponentials in the place of logits."""
