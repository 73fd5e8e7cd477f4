"""The ranks that share a vocabulary: each one's shard, their tokens, and what they exchange."""
