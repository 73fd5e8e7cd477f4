"""The parts of `lowtide.head.apply`: the user's function inside the engine's chunks, its graph and its checks."""
