"""Gradients that leave small tiles of the softmax out, as `HeadOptions(skip=...)` requests: docs/skipping.md.

The head imports `lowtide.skip.seam` in a call that requests it, and nothing of this room before.
"""
