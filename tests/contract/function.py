"""How the contract's tests see a public function: random arguments for it, and what plain PyTorch makes of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import support
from lowtide import HeadPlan, plan_head
from support import in_float64, relative_error

Arguments = dict[str, Any]
WIDE = (torch.float64, torch.float32)
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Function:
    """One public function.

    ``draw`` makes its arguments of a choice: a value of each of its options, ``leading`` axes of the tokens, the axes
    of ``sizes``, a ``dtype``, and a generator ``g``. What needs a gradient is a leaf that requires one; the first of
    these holds the tokens. Everything is drawn on the CPU.
    """

    name: str
    run: Callable[..., Any]
    truth: Callable[..., Any]  # from the same arguments, but for `options`
    draw: Callable[[Arguments], Arguments]
    options: dict[str, list[Any]]  # what each may be; the first is the plain one
    sizes: dict[str, int]
    large: dict[str, int]  # sizes at which errors are averaged over many numbers
    tolerance: dict[torch.dtype, tuple[float, float]]  # relative errors of values and of gradients
    instead: str = ""  # a pattern: what the errors of second derivatives name as the way out
    busy: Arguments = field(default_factory=dict)  # the choice with everything in it
    cast: tuple[str, ...] = ()  # arguments that autocast rounds
    saved: tuple[str, ...] = ()  # arguments that backward reads again where gradients are not stored
    of_scalars: float = 100.0  # times as much for the gradient of a number, a sum with cancellation; and its rounding
    rounding: float = 0.0  # where terms cancel: of gradients, in eps times the upstream's norm
    plan: Callable[..., HeadPlan] = plan_head
    widens: bool = True  # results are float32 of narrow operands, too
    public: bool = True  # else patched models alone call it, which refuse transforms before
    saves_outputs: bool = False  # which a caller may not write to before backward

    @property
    def beside_plain(self) -> float:
        """How much more than plain PyTorch a narrow gradient may err: with wide logits never, else by luck alone."""
        return 1.1 if self.widens else 2.0

    def arguments(self, dtype: torch.dtype, seed: int | None = None, **choice: Any) -> Arguments:
        """Return random arguments, everything not chosen plain; without a seed others each time."""
        seed = int(torch.randint(2**31, ())) if seed is None else seed
        g = torch.Generator().manual_seed(seed + 1)
        plain = {option: values[0] for option, values in self.options.items()}
        drawn = self.draw({**plain, **self.sizes, **choice, "dtype": dtype, "seed": seed, "g": g})
        return drawn if support.DEVICE == "cpu" else on_device(drawn)


@dataclass(frozen=True)
class Mode:
    """A function with some of its options chosen."""

    function: Function
    choice: Arguments = field(default_factory=dict)
    stored: bool = False  # gradients are computed in forward
    stored_where_frozen: bool = False  # the same, where the head is frozen

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def per_token(self) -> bool:
        """Whether each token has a value of its own."""
        plain = {option: values[0] for option, values in self.function.options.items()} | self.choice
        return plain.get("reduction", "none") == "none" and plain.get("out", "token").startswith("token")

    def arguments(
        self,
        leading: int | tuple[int, ...] = 9,
        *,
        dtype: torch.dtype = torch.float64,
        large: bool = False,
        **more: Any,
    ) -> Arguments:
        leading = (leading,) if isinstance(leading, int) else leading
        sizes = self.function.large if large else {}
        return self.function.arguments(dtype, **{"leading": leading, **sizes, **self.choice, **more})

    def busy(self, leading: int | tuple[int, ...] = (2, 6), **more: Any) -> Arguments:
        """Return arguments with all options in them."""
        return self.arguments(leading, **{**self.function.busy, **self.choice, **more})

    def run(self, kwargs: Arguments) -> dict[str, Tensor]:
        return flat(self.function.run(**kwargs))

    def truth(self, kwargs: Arguments) -> dict[str, Tensor]:
        return flat(self.function.truth(**{k: v for k, v in kwargs.items() if k != "options"}))


def on_device(kwargs: Arguments) -> Arguments:
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().to(support.DEVICE).requires_grad_(t.requires_grad), kwargs
    )  # fmt: skip


def flat(found: Any) -> dict[str, Tensor]:
    """Return the tensors of any pytree by their places in it."""
    leaves, _ = pytree.tree_flatten_with_path(found)
    return dict(sorted((pytree.keystr(path), leaf) for path, leaf in leaves if leaf is not None))


def trained(kwargs: Arguments) -> list[str]:
    return [name for name, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad]


def leaves(kwargs: Arguments) -> list[Tensor]:
    return [kwargs[name] for name in trained(kwargs)]


def total(found: dict[str, Tensor], through: Callable[[Tensor], Tensor] = torch.sin) -> Tensor:
    """One number to which all differentiable outputs contribute, each with a factor of its own."""
    needed = any(out.requires_grad for out in found.values())
    terms = [(i + 1) * through(out).sum() for i, out in enumerate(found.values()) if out.requires_grad or not needed]
    return torch.stack(terms).sum()


def gradients(mode: Mode, kwargs: Arguments, **total_of: Any) -> list[Tensor]:
    return list(torch.autograd.grad(total(mode.run(kwargs), **total_of), leaves(kwargs)))


def true_gradients(mode: Mode, kwargs: Arguments, **total_of: Any) -> list[Tensor]:
    """The same by plain PyTorch in float64."""
    wide = in_float64(kwargs)
    return list(torch.autograd.grad(total(mode.truth(wide), **total_of), [wide[n] for n in trained(kwargs)]))


def near(double: float, single: float, bf16: float = 1e-2, fp16: float = 2e-3, times: float = 1.0) -> Any:
    """Return the bounds of each dtype, ``times`` as far for gradients in the wide ones."""
    wide = {dtype: (bound, times * bound) for dtype, bound in ((torch.float64, double), (torch.float32, single))}
    return wide | {torch.bfloat16: (1e-5, bf16), torch.float16: (1e-5, fp16)}


def check(function: Function, choice: Arguments, dtype: torch.dtype, seed: int | None = None, **bounds: Any) -> None:
    """Compare a function's values and gradients with plain PyTorch's in float64; some outputs get an upstream."""
    seed = int(torch.randint(2**31, ())) if seed is None else seed
    function, choose = replace(function, **bounds), random.Random(seed)
    kwargs = function.arguments(dtype, seed, **choice)
    wide = in_float64(kwargs)
    got, want = flat(function.run(**kwargs)), flat(function.truth(**wide))
    near, near_gradients = function.tolerance[dtype]
    case = (choice, seed)
    assert got.keys() == want.keys()
    for key, e in want.items():
        g = got[key]
        assert g.shape == e.shape, key
        if e.is_floating_point():
            assert g.dtype == (torch.promote_types(dtype, torch.float32) if function.widens else dtype), key
            least = 4 * torch.finfo(g.dtype).eps / (e.norm().item() or 1.0) if function.rounding else 0.0
            assert relative_error(g, e) <= near + least or (g.isnan().all() and e.isnan().all()), (key, case)
            assert g.requires_grad == e.requires_grad, (key, case)
        else:
            assert g.dtype == e.dtype
            assert torch.equal(g, e), (key, case)
    used = [key for key in want if want[key].requires_grad and choose.random() < 0.7]
    used = used or [key for key in want if want[key].requires_grad][:1]
    if not used:
        return
    one = choose.random() < 0.3
    upstream = [torch.ones_like(want[key]) if one else torch.randn_like(want[key]) for key in used]
    names = trained(kwargs)
    found, true = (
        torch.autograd.grad(
            [outputs[key] for key in used], [given[n] for n in names],
            [u.to(outputs[key].dtype) for key, u in zip(used, upstream, strict=True)],
            allow_unused=True, materialize_grads=True,
        )
        for outputs, given in ((got, kwargs), (want, wide))
    )  # fmt: skip
    rounding = torch.finfo(got[used[0]].dtype).eps * sum(u.norm().item() for u in upstream)
    for n, g, e in zip(names, found, true, strict=True):
        assert g.dtype == kwargs[n].dtype
        bound, least = near_gradients, function.rounding
        if e.dim() == 0:
            bound, least = bound * function.of_scalars, max(least, function.of_scalars)
        error, norm = relative_error(g, e), e.norm().item() or 1.0
        assert error <= bound + least * rounding / norm, (n, used, case)
    kept = kwargs.get("mask")
    if kept is not None and kept.shape == kwargs[names[0]].shape[:-1]:
        assert (found[0][~kept] == 0).all()
