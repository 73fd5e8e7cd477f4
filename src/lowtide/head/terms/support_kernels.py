"""Sets of classes by kernels: a chunk's values, and its gradients, in one launch for each thing that is computed.

n tokens of the chunk, P pairs, T targets a token, D hidden size, V vocabulary. `terms/support` has the same in plain
PyTorch. Pairs and places count among the chunk's.
"""

import torch
from torch import Tensor

from lowtide.head.call import Head, SupportArgs, Wanted
from lowtide.head.gradients import Gradients
from lowtide.head.kernels import support_rows as rows
from lowtide.head.kernels import support_sets as sets
from lowtide.head.kernels.gemm import LogitTransform
from lowtide.head.plan import support_slices
from lowtide.head.rows import take_rows


def values(
    head: Head, args: SupportArgs, tokens: slice, ids: Tensor, counts: Tensor | None, keep: bool
) -> dict[str, Tensor]:
    """Return the statistics of a chunk's tokens; "outside" is a number of each of them."""
    y_nT, V = args.target[tokens].contiguous(), head.ranks.vocab
    pairs = sets.sets_of(ids, args.offsets, len(y_nT), args.K, V, None if counts is None else counts[tokens])
    parts = rows.score(
        _hidden(head, tokens), head.weight_VD, pairs.ids, args.offsets, args.K, first=head.ranks.first,
        most=support_slices(head, len(ids)),
    )  # fmt: skip
    transform = LogitTransform(head.bias_V, head.scale, head.softcap)
    if not head.ranks.alone:
        z = parts.sum(0)
        if head.bias_V is not None and len(head.bias_V):
            row, here = head.ranks.here(pairs.ids)
            assert here is not None
            z += head.bias_V.take(row.clamp(max=len(head.bias_V) - 1).long()).where(here, 0)
        parts, transform = head.ranks.sum_of(z)[None], transform._replace(bias_V=None)
    found = sets.set_stats(
        parts, pairs.ids, args.offsets, args.K, V, y_nT, args.ignore_index, args.wanted, transform
    )._asdict()
    found = {name: x for name, x in found.items() if x is not None}
    z, place = found.pop("z"), found.pop("place")
    if keep:
        found |= {"pair_z": z, "pair_id": pairs.ids, "target_at": place}
        found |= {"sorted_id": pairs.sorted_ids, "pair_token": pairs.token, "pair_place": pairs.place}
    return found


def add_gradients(
    head: Head, args: SupportArgs, tokens: slice, upstream: sets.SetUpstream, known: dict[str, Tensor], wanted: Wanted,
    into: Gradients, slot_V: Tensor | None,
) -> None:  # fmt: skip
    """Add a chunk's gradients; ``known`` is what `values` returned."""
    y_nT, ids, V, first = args.target[tokens].contiguous(), known["pair_id"], len(head.weight_VD), head.ranks.first
    c = sets.set_gradient(
        known["pair_z"], known["target_at"], ids, args.offsets, args.K, head.ranks.vocab, y_nT, args.ignore_index,
        upstream, LogitTransform(None, head.scale, head.softcap),
    )  # fmt: skip
    if wanted.input:
        assert into.input_ND is not None
        alone = head.ranks.alone
        out = (
            into.input_ND[tokens] if alone else into.input_ND.new_empty(len(y_nT), head.input.shape[-1], dtype=c.dtype)
        )
        rows.input_grad(c, head.weight_VD, ids, args.offsets, args.K, out, head.dtype, first=first)
        if not alone:
            head.ranks.begin_sum(out, tokens)(into)
    if into.weight_VD is not None or into.bias_V is not None:
        weight = head.input.new_empty(V, 0) if into.weight_VD is None else into.weight_VD
        pairs = rows.Sorted(known["sorted_id"], known["pair_token"], known["pair_place"], c, first)
        starts = sets.class_starts(pairs.ids, first, V)
        slots = slot_V if into.weight_VD is not None else None
        rows.weight_grad(_hidden(head, tokens), pairs, starts, slots, weight, into.bias_V, add=tokens.start > 0)


def _hidden(head: Head, tokens: slice) -> Tensor:
    x = take_rows(head.input, None, tokens, head.dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def upstream_of(given: dict[str, Tensor]) -> sets.SetUpstream:
    """Return the upstream gradients as kernels read them."""
    wide = {name: g.to(torch.float32).contiguous() for name, g in given.items()}
    return sets.SetUpstream(*(wide.get(name) for name in sets.SetUpstream._fields))
