"""The head's benchmark along three lines: N tokens, hidden size D and vocabulary V, each with the others held.

The axes are those requested for PyTorch's own function (pytorch/pytorch issue 124480).
"""

from lowtide.bench import head

PEERS, measure = head.PEERS, head.measure
