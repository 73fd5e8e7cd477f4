"""What `lowtide.head.apply` is made of: the user's function inside the engine's chunks, its graph and its checks."""
