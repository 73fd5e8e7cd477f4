"""Differences that are known and not mended yet: what the smallest failing program of each looks like.

A program that fails and shrinks to one of these is counted and does not fail the test; everything else does. Empty is
what this should be.
"""

import re

OPEN = {
    name: re.compile(pattern)
    for name, pattern in {
        "a helper that a replaced function calls by a global name": r"rotate_half",
        "F.linear replaced": r"replace\(F, 'linear'",
        "accelerate hooks on the head": r"get_output_embeddings\(\), Scaled",
        "a denominator of 0": r"num_items_in_batch=(0|torch.tensor\(0\))|\(yz?.* != -100\).sum\(\)",
        "losses replaced by assignment": r"replace\((F|torch.nn.functional|torch.Tensor), '(cross|softmax|log_|nll)",
        "caches under policies": r"apply_policy[\s\S]*past",
        "freezing under policies": r"apply_policy[\s\S]*requires_grad",
        "hooks on the head between a checkpointed forward and backward": r"checkpoint[\s\S]*register_full_backward",
        "gradient='forward' and a loss of each token": r"gradient='forward'[\s\S]*none",
        "numbers compared with logits": r"gather\(-1.*(>|<)|(>|<).*gather\(-1|topk.*<|<.*topk|== .*max\(|eq\(.*max",
        "hooks on the graph of logits": r"grad_fn.register|multi_grad_hook\(?\(?\[?z",
        "dlpack": r"dlpack",
        "classes' forwards replaced": r"for m in \{stock_class",
        "weights changed past their versions": r"weight.*(data|detach\(\))|p\.data",
    }.items()
}


def which(text: str) -> str | None:
    """Return the name of the open defect that a shrunk program shows, None if it shows a new one."""
    return next((name for name, pattern in OPEN.items() if pattern.search(text)), None)
