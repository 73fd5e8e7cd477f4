"""What fits in a budget of memory, and the fastest way to spend it, by arithmetic alone."""
