"""The gated MLP of today's transformers, with a choice of what it keeps for backward."""
