"""The head's three GEMMs over a chunk, for every device and dtype: narrow operands, wide results, no wide weight.

C rows of the chunk, D hidden size, V vocabulary. ``wide`` is float32, or float64 for float64 operands.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.head.plan import HeadPlan
from lowtide.head.planner import padded

BIAS_FIRST = 2048  # hidden size from which a GPU's product hides that it reads what it adds to


class HeadMatmul:
    """The GEMMs of one call of the head, as its plan chose them.

    Args:
        weight_VD: The head's weight, of any floating dtype and any strides.
        plan: Says how each product comes about and how large the weight's blocks are.
        dtype: dtype that the operands are rounded to: ``input``'s, or autocast's.
        wide: dtype of the logits and of every sum.
    """

    def __init__(self, weight_VD: Tensor, plan: HeadPlan, dtype: torch.dtype, wide: torch.dtype) -> None:
        self.plan, self.dtype, self.wide = plan, dtype, wide
        needs_whole = plan.backward_gemm != "blocks" or plan.logits_gemm == "out_dtype"
        if 1 not in weight_VD.stride():
            weight_VD = weight_VD.contiguous()  # mm would copy it once a chunk
        self.weight_VD = weight_VD.to(dtype) if needs_whole else weight_VD
        D = weight_VD.shape[1]
        self._with_bias: Tensor | None = None
        self._unit = weight_VD.new_empty(0)
        self._block = weight_VD.new_empty(plan.block_rows * D, dtype=wide)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the weight, rounded to the operands' dtype, in blocks of rows of the wide dtype."""
        for part in slices(len(self.weight_VD), self.plan.block_rows):
            wide = self._wide_rows(part)
            yield part, wide.copy_(self.weight_VD[part].to(self.dtype))

    def _wide_rows(self, part: slice) -> Tensor:
        D = self.weight_VD.shape[1]
        return self._block[: (part.stop - part.start) * D].view(part.stop - part.start, D)

    def take_bias(self, bias_V: Tensor) -> None:
        """Add a bias, of the weight's dtype here, to all logits to come.

        As one more column of a copy of the weight, times 1: logits are written once, where adding it would read and
        write them again, which takes as long as the product where the hidden size is small.
        """
        V, D = self.weight_VD.shape
        rest = self.weight_VD.new_zeros(1, padded(D + 1) - D - 1)  # zeros also where the bias is -inf
        self._unit = torch.cat((rest.new_ones(1, 1), rest), 1)
        self._with_bias = torch.cat((self.weight_VD, bias_V[:, None], rest.expand(V, -1)), 1)

    def logits(self, x_CD: Tensor, out_CV: Tensor, bias_V: Tensor | None = None) -> None:
        """Write ``x @ weight.T``, and a bias of the wide dtype, into ``out_CV`` of the wide dtype."""
        weight = self.weight_VD
        if self._with_bias is not None:
            x_CD = torch.cat((x_CD, self._unit.expand(len(x_CD), -1)), 1)
            weight = self._with_bias
        first = bias_V is not None and (x_CD.shape[1] >= BIAS_FIRST or not x_CD.is_cuda)
        if bias_V is not None and first:
            out_CV.copy_(bias_V)
        if self.plan.logits_gemm == "blocks":
            wide_x = x_CD.to(self.wide)
            for part, w in self._blocks():
                matmul_into(wide_x, w.T, out_CV[:, part], add=first)
        else:
            matmul_into(x_CD, weight.T, out_CV, add=first)
        if bias_V is not None and not first:
            out_CV.add_(bias_V)

    def operand(self, g_CV: Tensor) -> Tensor:
        """Return the logits' gradient as the two products below take it, in the memory of ``g_CV``."""
        if self.plan.backend == "row":  # its kernel has narrowed it
            return g_CV if g_CV.dtype == self.dtype else narrow_view(g_CV, self.dtype)
        return _narrow_in_place(g_CV, self.dtype) if self.plan.backward_gemm == "narrow" else g_CV

    def input_grad(self, g_CV: Tensor, factor_C: Tensor | None, out_CD: Tensor) -> None:
        """Write ``factor * (g @ weight)`` into ``out_CD``; None: 1."""
        product = out_CD if out_CD.dtype == self.wide else torch.empty_like(out_CD, dtype=self.wide)
        if self.plan.backward_gemm == "blocks":
            product.zero_()
            for part, w in self._blocks():
                product.addmm_(g_CV[:, part], w)
        elif g_CV.is_cuda or g_CV.dtype == self.wide:
            matmul_into(g_CV, self.weight_VD, product, add=False)
        else:  # on a CPU products are no wider than their operands
            product = g_CV @ self.weight_VD
        if factor_C is not None:
            torch.mul(product, factor_C[:, None], out=out_CD)
        elif product is not out_CD:
            out_CD.copy_(product)

    def weight_grad(self, g_CV: Tensor, factor_C: Tensor | None, x_CD: Tensor, total_VD: Tensor, first: bool) -> None:
        """Add ``g.T @ (factor * x)`` to ``total_VD``, which holds nothing yet where ``first`` is True."""
        x = (x_CD if factor_C is None else x_CD * factor_C[:, None]).to(g_CV.dtype)
        if total_VD.dtype == g_CV.dtype or (g_CV.is_cuda and total_VD.dtype == self.wide):
            matmul_into(g_CV.T, x, total_VD, add=not first)
            return
        for part in slices(len(total_VD), self.plan.block_rows):
            wide = self._wide_rows(part)
            if g_CV.dtype == self.wide:
                torch.mm(g_CV[:, part].T, x, out=wide)
            else:
                wide.copy_(g_CV[:, part].T @ x)
            total_VD[part].copy_(wide if first else wide.add_(total_VD[part]))


def _narrow_in_place(wide_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``wide_CV`` rounded to ``dtype`` (half as wide), written over the first half of each of its own rows.

    Block after block, each as wide as all before it: what block [a, 2a) becomes lies where [a / 2, a) was, which has
    been read by then.
    """
    V = wide_CV.shape[1]
    narrow_CV = narrow_view(wide_CV, dtype)
    first = min(V, 64)
    narrow_CV[:, :first] = wide_CV[:, :first].to(dtype)
    start = first
    while start < V:
        stop = min(2 * start, V)
        narrow_CV[:, start:stop].copy_(wide_CV[:, start:stop])
        start = stop
    return narrow_CV


def narrow_view(wide_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the first half of each row's memory as [C, V] of ``dtype``, half as wide."""
    rows, V = wide_CV.shape
    length = wide_CV.stride(0)
    return torch.as_strided(wide_CV, (rows, length), (length, 1)).view(dtype)[:, :V]


def matmul_into(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write ``a @ b`` into ``out``, or add it: summed in float32, rounded once."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def slices(N: int, size: int) -> Iterator[slice]:
    """Yield the slices of ``size`` that make up N, the last one perhaps shorter."""
    for start in range(0, N, max(1, size)):
        yield slice(start, min(start + size, N))


def finish_logits_(
    z_CV: Tensor, bias_V: Tensor | None, logit_scale: Tensor | None, softcap: float | Tensor | None, columns: int
) -> None:
    """Turn ``x @ w.T`` into logits in place: ``softcap * tanh((z + bias) * logit_scale / softcap)``."""
    if bias_V is None and logit_scale is None and softcap is None:
        return
    for part in slices(z_CV.shape[1], columns):
        z = z_CV[:, part]
        if bias_V is not None:
            z.add_(bias_V[part])
        if logit_scale is not None:
            z.mul_(logit_scale)
        if softcap is not None:
            z.div_(softcap).tanh_().mul_(softcap)
