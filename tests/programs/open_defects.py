"""Differences that are known and not mended yet: what the smallest failing program of each looks like.

A program that fails and shrinks to one of these is counted and does not fail the test; everything else does. Empty is
what this should be.
"""

import re

OPEN = {
    name: re.compile(pattern, re.MULTILINE)
    for name, pattern in {
        # Stock's linear layer multiplies its gradient by the weight as it is in backward; what lowtide computed in
        # forward, or computes again in backward, is of the one or the other. So with logits that NumPy writes to.
        "numbers changed past their version counter between forward and backward": (
            r"out = [\s\S]*(weight.*detach\(\)|np\.asarray\(z"
            r"|(model|embeddings\(\))\.(double|float|bfloat16)\()[\s\S]*(backward|grad)\("
            r"|save_on_cpu[\s\S]*(load_state_dict|renorm_|step\(|weight)|merge_adapter"
            r"|out = [\s\S]*resize_token_embeddings[\s\S]*(backward|grad)\("
        ),
        # Infinity times 0 is NaN, and which products there are depends on their order: a hook that clamps makes a
        # number of infinity and none of NaN, and one that logs a norm shows which it was.
        "an infinite upstream factor, and a hook that sees which entries are NaN": (
            r"(?=[\s\S]*(loss / 0\.0|num_items_in_batch=(torch\.tensor\()?0))"
            r"[\s\S]*(\.clamp\(-|log\.append|clip_grad_norm_)"
        ),
        # The second forward of a checkpoint of the user's ends with the last tensor that backward needs. That is
        # earlier without logits: what stands behind it, and changes what stock's recomputes, does not run again.
        "what runs in the second forward of the user's own checkpoint": (
            r"\Ahooks and wrappers ran[\s\S]*checkpoint\("
        ),
        "what has changed before the second forward of the user's own checkpoint": (
            r"gradient_checkpointing_enable[\s\S]*requires_grad = |"
            r"checkpoint\(lambda[\s\S]*use_reentrant=False\)\)?\n[\s\S]*^(?!(    )?(z|yz|loss|out|held|see|with)\b).+\n"
            r"[\s\S]*(backward|grad)\("
        ),
        "views of logits out of a reentrant checkpoint, without gradients or changed in place": (
            r"use_reentrant=True[\s\S]*(no_grad|inference_mode|\bz.*\w+_\(|\bz\[.*\] =|\bz\.data| [-+*/]= )"
        ),
        "float64 logits under autocast, where stock's own operands differ in dtype": (
            r"\A.*to have the same dtype[\s\S]*embeddings\(\)\.(double|to)\([\s\S]*autocast"
        ),
        # A token that attends to nothing is NaN; where it is ignored, it does not reach the weight as it does in stock.
        "an ignored token that is NaN": r"attention_mask=torch\.arange|loss / 0\.0[\s\S]*step\(\)[\s\S]*labels=y",
    }.items()
}


def which(why: str, text: str) -> str | None:
    """Return the name of the open defect that a shrunk program shows, by how it fails; None if it shows a new one."""
    return next((name for name, pattern in OPEN.items() if pattern.search(f"{why}\n{text}")), None)
