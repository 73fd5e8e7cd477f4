"""Cross entropy: a loss over a row's statistics, or by a kernel over rows of logits, or of exponentials.

N tokens, n rows computed, C rows of a chunk, K targets a row, V vocabulary, V_r classes of it on this rank. With target
y, class weights q (all 1 if None, Q their sum), a = label_smoothing and u = z_loss, the loss of a row is

    (1 - a) q_y (lse - z_y) + (a / V) (Q lse - sum_v q_v z_v) + u lse**2
"""

from dataclasses import replace

import torch
from torch import Tensor

from lowtide.errors import TargetIndexError, UnsupportedError, message
from lowtide.head.call import CrossEntropyArgs, Gradients, Head, Wanted, gradient_buffers, scalar_on
from lowtide.head.engine import Numbers, Terms, UpstreamOf, run, weight_lift
from lowtide.head.nodes import Function, Shape, named_gradients
from lowtide.head.plan import HeadPlan, plan_cross_entropy, skipping, skips_tokens
from lowtide.head.rows import Rows, looks_at_numbers
from lowtide.head.terms.loss import Loss, Mask, RowFactors
from lowtide.head.terms.statistics import Statistics, silenced

ROWS_OF_STEP = 64  # of the GEMM that sums over the rows of a chunk: none is of two pieces
ELSEWHERE = 2**30  # a class of no tile, and of no rank's weight


class RowLoss(Terms):
    """Cross entropy by one kernel that reads each row of products twice, and leaves the gradient in its place."""

    raw = True

    def __init__(self, head: Head, loss: Loss) -> None:
        self.head, self.loss, self.mask = head, loss, loss.mask

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Return "loss"."""
        return self.both_(z, part, None)[0]

    def both_(self, z: Tensor, part: slice, upstream: UpstreamOf | None) -> tuple[Numbers, Tensor | None]:
        """Return "loss" and what each row lacks; a narrow gradient is left in the first half of the row."""
        from lowtide.head.kernels.gemm import LogitTransform
        from lowtide.head.kernels.logit_rows import softmax_rows

        head, loss, kept = self.head, self.loss, self.loss.rows.kept
        factor_C = None if upstream is None else upstream({}, part)
        outside = factor_C if head.dtype != head.wide else None
        loss_C, lift_C = softmax_rows(
            z,
            loss.y[part],
            None if kept is None else kept[part],
            transform=LogitTransform(head.bias_V, head.scale, head.softcap),
            terms=(loss.class_weight, loss.total, float(loss.label_smoothing), float(loss.z_loss)),
            gradient=None if factor_C is None else head.dtype,
            factor_C=factor_C if outside is None else None,
        )
        return {"loss": loss_C}, outside if lift_C is None or outside is None else outside * lift_C


def forward(head: Head, args: CrossEntropyArgs, wanted: Wanted, keep: bool) -> dict[str, Tensor]:
    """Return the loss, with ``keep`` what `backward` needs of each token, and the needed gradients for upstream 1."""
    loss, plan = _plan(head, args, wanted)
    rows, into = loss.rows, Gradients()

    def factors() -> tuple[Tensor, Gradients]:
        nonlocal into
        into = gradient_buffers(head, rows, plan, wanted, stored=True)
        return loss.divided(), into

    numbers = _run(head, loss, plan, factors if any(wanted) else None, None)
    loss_n = numbers["loss"] * loss.unit
    loss_N = rows.among_all(loss_n if rows.kept is None else loss_n.where(rows.kept, 0))
    value, denominator = loss_N if args.reduction == "none" else loss_N.sum(), loss.denominator
    values = {"loss": value if denominator is None else value / denominator}
    if args.each:
        values["each"] = loss_N
    if keep:
        # copies: an operator returns no memory twice
        values |= {name: rows.among_all(numbers[name]).clone() for name in ("lse", "miss") if name in numbers}
        values |= {name: numbers[name] for name in ("tiles", "classes") if name in numbers}
    return values | named_gradients(head, into, stored=True)


def backward(
    head: Head, args: CrossEntropyArgs, wanted: Wanted, upstream: dict[str, Tensor | None], known: dict[str, Tensor]
) -> Gradients:
    """Return the needed gradients from the loss's upstream gradient, a scalar or [N], and what forward saved."""
    given = upstream["loss"]
    assert given is not None
    if given.dim():  # a token to which nothing flows back is as good as ignored, whatever its hidden state holds
        args = args._replace(target=args.target.where((given != 0).view(args.target.shape), args.ignore_index))
    loss, plan = _plan(head, args, wanted, known)
    rows = loss.rows
    into = gradient_buffers(head, rows, plan, wanted)
    given = given.to(head.wide)
    factor = loss.divided() * (rows.of(given) if given.dim() else given)
    factor = factor if rows.kept is None else factor.where(rows.kept, 0)
    numbers = known | rows.of_each({name: known[name] for name in ("lse", "miss")})
    _run(head, loss, plan, lambda: (factor, into), numbers)
    return into


def _run(head: Head, loss: Loss, plan: HeadPlan, factors: RowFactors | None, known: Numbers | None) -> Numbers:
    """Return "loss" [n] and, where they are computed, "lse" and "miss" (that minus the target's logit).

    With ``factors`` add the gradients, from ``known`` numbers where there are.
    """
    rows = loss.rows
    if head.remembered is not None and (plan.backend != "exp" or loss.label_smoothing):
        hint = f"No tile is skipped: {'label smoothing bears on all' if plan.backend == 'exp' else plan.reason}."
        raise UnsupportedError(message("options", "skip=None", f"skip={head.skip}", hint))
    if plan.backend == "exp":
        if head.ranks.alone and not plan.kept:
            from lowtide.head.exponentials.losses import CrossEntropy

            exponentials = CrossEntropy(head, loss, plan)
        elif plan.kept:
            exponentials = skipping().TiledCrossEntropy(head, loss, plan, known and known["classes"])
        else:
            from lowtide.head.exponentials.sharded import ShardedCrossEntropy

            exponentials = ShardedCrossEntropy(head, loss, plan)
        if known is None:
            return exponentials.forward(factors)
        if factors is not None:
            exponentials.gradients(*factors(), known)
        return {}
    factor_n, into = (loss.unit, None) if factors is None else factors()
    if plan.backend == "row":
        terms = RowLoss(head, loss)
        if head.dtype == torch.float16 and into is not None and into.weight_VD is not None:
            terms.lift = weight_lift(factor_n, head.scale, loss.class_weight)
        return run(head, rows, plan, terms, into, upstream=lambda _, part: factor_n[part])
    want = frozenset({"mean_logit"} if loss.label_smoothing else ())
    statistics = Statistics(head, plan, loss.y[:, None], want, loss.class_weight)
    statistics.mask = loss.mask
    if known is not None:
        known = {"lse": known["lse"], "logprob": -known["miss"][:, None]}
        known = known if rows.kept is None else silenced(known, rows.kept)
    numbers = run(
        head, rows, plan, statistics, into, known=known,
        upstream=lambda numbers, part: loss.upstream(numbers, part, factor_n[part]),
    )  # fmt: skip
    if known is not None:
        return {}
    return {"loss": loss.of(numbers), "lse": numbers["lse"], "miss": -numbers["logprob"][:, 0]}


def _plan(head: Head, args: CrossEntropyArgs, wanted: Wanted, known: Numbers | None = None) -> tuple[Loss, HeadPlan]:
    """Return the rows that are computed with their targets, and the plan for them.

    On the CPU a target that is no class is an error; elsewhere such a token's loss and gradients are NaN. In backward
    ``known`` has what forward saved.
    """
    ranks, V, wide = head.ranks, head.ranks.vocab, head.wide
    y_N = args.target.reshape(-1).long().contiguous()
    check_classes(head, y_N, args.ignore_index)
    kept_N = y_N != args.ignore_index
    rows = Rows(tokens=y_N.numel(), index=head.positions_of(kept_N))
    plan = plan_cross_entropy(head, args, rows.n, wanted, known is not None)
    rows = rows.in_order(ranks.order(plan))
    weight_N = None if args.token_weight is None else args.token_weight.reshape(-1).to(wide).contiguous()
    q = None if args.weight is None else args.weight.to(wide).contiguous()
    if plan.backend == "exp":
        # by one kernel, since the first GEMM waits for it
        from lowtide.head.kernels.elementwise import select

        of_shard = () if ranks.alone else ((ranks.first, ranks.rows, ELSEWHERE),)
        selection = select(y_N, V, args.ignore_index, weight_N, *of_shard)
        counted = selection.numbers
        if plan.kept:
            chosen = selection.y_N, selection.unit_N, plan.chunk_rows
            rows, y, unit = skipping().sorted_rows(head, rows, *chosen, known and known["classes"])
        elif skips_tokens(head, plan.backend) and (ranks.alone or plan.product_rows % ROWS_OF_STEP == 0):
            y, unit, index, count = selection.valid_first()
            rows = replace(rows, index=index, count=count)
        else:
            y, unit = rows.of(selection.y_N, -1), rows.of(selection.unit_N)
        kept = None if ranks.alone else y >= 0
    else:
        is_class_N = (y_N >= 0) & (y_N < V)
        unit = torch.ones_like(y_N, dtype=wide) if weight_N is None else weight_N
        unit = rows.of(unit.where(is_class_N, torch.nan).where(kept_N, 0))
        kept = None if head.drops_tokens else rows.of(kept_N)
        counted, y = kept_N.to(wide), rows.of(y_N.where(is_class_N, 0))
    rows, own_N = replace(rows, kept=kept), None if q is None else q[y_N.clamp(0, V - 1)]
    if own_N is not None:
        counted = own_N.where(kept_N, 0)
    if args.num_items is not None:
        counted = scalar_on(head.input.device, args.num_items, wide)
    return Loss(
        rows=rows, y=y, unit=unit, counted=counted if args.reduction == "mean" else None,
        class_weight=ranks.own_classes(q), total=None if q is None else q.sum(),
        own_n=None if own_N is None else rows.of(own_N),
        label_smoothing=args.label_smoothing, z_loss=args.z_loss, vocab=V,
        mask=None if args.mask is None else Mask(args.mask, rows, y[:, None]).fill_,
    ), plan  # fmt: skip


def check_classes(head: Head, target: Tensor, ignore_index: int) -> None:
    """Raise on the CPU where a target is no class; elsewhere looking at numbers would stop the host."""
    if looks_at_numbers(head.input.device):
        y_N, V = target.reshape(-1), head.ranks.vocab
        wrong = (y_N != ignore_index) & ((y_N < 0) | (y_N >= V))
        if wrong.any():
            position = int(wrong.nonzero()[0, 0])
            raise TargetIndexError(
                f"target: expected class indices from 0 to {V - 1} or ignore_index={ignore_index},"
                f" got {int(y_N[position])} at position {position} of the flattened (and shifted) targets."
                " Mask such tokens with ignore_index, or check that tokenizer and head have the same vocabulary."
            )


def _shapes(head: Head, args: CrossEntropyArgs, keep: bool) -> dict[str, Shape]:
    N = head.tokens
    each = (N if keep else 0,), head.wide
    return {
        "loss": ((N,) if args.reduction == "none" else (), head.wide),
        "each": ((N if args.each else 0,), head.wide),
        "lse": each,
        "miss": each,
        "tiles": ((0,), head.dtype),
        "classes": ((0,), torch.int32),
    }


CROSS_ENTROPY = Function(
    "cross_entropy", "linear_cross_entropy", CrossEntropyArgs, forward, backward, shapes=_shapes,
    returned=("loss", "each"), upstream=("loss",), known=("lse", "miss", "tiles", "classes"),
)  # fmt: skip
