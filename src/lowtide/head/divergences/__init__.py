"""What `lowtide.head.divergence` is made of: the graph, the plan for two heads, the loops and the arithmetic."""
