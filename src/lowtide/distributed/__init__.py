"""Glue for the engines that shard, gather and schedule: PyTorch's own, never ours."""

from lowtide.distributed.tokens import count_items, shift_labels

__all__ = ["count_items", "shift_labels"]
