"""Memory and time: what a run allocated, its peak, and how long it took."""
