"""What `lowtide.head.token_stats` is made of: the graph, the loops, and what one token's logits amount to."""
