"""Memory and time: what a run really allocated, its peak, and how long it took."""
