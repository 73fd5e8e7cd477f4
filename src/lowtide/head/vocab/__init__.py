"""The vocabulary in parts, one a rank: what the ranks tell each other, and the loops on a rank's part."""
