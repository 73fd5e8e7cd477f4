"""What `lowtide.head.apply` is made of: the user's function, its graph, its checks, and the loops over chunks."""
