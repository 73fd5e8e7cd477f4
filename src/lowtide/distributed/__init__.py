"""Glue for the engines that shard, gather and schedule: PyTorch's own, never ours."""
