"""The ranks that share a vocabulary: what each holds, how tokens lie on them, and what they exchange."""
