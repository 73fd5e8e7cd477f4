"""The gated MLP of transformers, with a choice of what it saves for backward."""
