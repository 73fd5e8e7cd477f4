"""Adapters for training stacks that have a head of their own: each a module, which replaces it when it is imported."""
