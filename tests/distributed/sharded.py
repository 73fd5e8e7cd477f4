"""A sharded vocabulary for the cases of ranks: how a user holds tensors, and a call beside the whole in float64."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import lowtide
from contract.cases import FUNCTIONS, Arguments, arguments, counting, flat, total, trained
from distributed.collectives import seen_collectives
from distributed.launch import DEVICE, SEED
from head.kernel_plans import use_kernels
from support import head as head_on_host
from support import in_float64, relative_error

V, D, LEADING = 50, 6, (2, 7)
# DTensors: hidden states replicated, or sharded along the sequence; "local": plain tensors with `vocab_shard`
WAYS = ("replicated", "sequence", "local")
IN_PARTS = {"input": False, "teacher_input": False}  # and whether it is the vocabulary's axis that is cut
IN_PARTS |= dict.fromkeys(("linear_weight", "linear_bias", "teacher_weight", "teacher_bias"), True)


def head(*args: Any, seed: int = 0, **kwargs: Any) -> Any:
    """As `support.head`, on the device of the cases."""
    made = head_on_host(*args, seed=seed + SEED, **kwargs)
    return [t if t is None else t.detach().to(DEVICE).requires_grad_(t.requires_grad) for t in made]


@functools.cache
def mesh() -> Any:
    return init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("tp",))


def sizes(total: int) -> list[int]:
    """Return parts of a vocabulary as a user may cut it: of any sizes, one of them empty where there are three."""
    return {1: [total], 2: [total - 3, 3], 3: [total - 20, 0, 20], 4: [total - 25, 0, 20, 5]}[dist.get_world_size()]


def part_of(tensor: Tensor) -> Tensor:
    """Return this rank's rows, cut by `sizes`, as a leaf."""
    held = tensor.detach().split(sizes(tensor.shape[0]))[dist.get_rank()].clone()
    return held.requires_grad_(tensor.requires_grad)


def spread(way: str, x: Tensor | None, *, of_vocab: bool) -> Any:
    """Return a tensor as a user of this ``way`` has it."""
    if x is None:
        return None
    if way == "local":
        return part_of(x) if of_vocab else x.detach().clone().requires_grad_(x.requires_grad)
    sequence = [Shard(max(0, x.dim() - 2))] if way == "sequence" else [Replicate()]
    return distribute_tensor(x.detach(), mesh(), [Shard(0)] if of_vocab else sequence).requires_grad_(x.requires_grad)


def shard_of(way: str, w: Any) -> dict[str, Any]:
    return {"vocab_shard": lowtide.VocabShard.of(w)} if way == "local" else {}


def whole(way: str, grad: Any, *, of_vocab: bool) -> Tensor:
    """Return a gradient that is held in parts."""
    if way != "local":
        assert isinstance(grad, DTensor)
        assert grad.placements[0] == (Shard(0) if of_vocab else grad.placements[0])
        assert not grad.placements[0].is_partial()
        return grad.full_tensor()
    if not of_vocab:
        return grad
    return torch.cat(of_all_ranks(grad.cpu())).to(DEVICE)  # a tensor of another rank's GPU would come as one there


def of_all_ranks(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def same_on_all_ranks(mine: Tensor) -> bool:
    """Return whether a tensor is the same everywhere, bit for bit."""
    return all(torch.equal(other, mine.cpu()) for other in of_all_ranks(mine.cpu()))


def plain(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def near(got: Any, want: Tensor, what: object) -> None:
    torch.testing.assert_close(plain(got), want, rtol=1e-9, atol=1e-11, equal_nan=True, msg=lambda m: f"{what}: {m}")


@contextmanager
def exchanged() -> Iterator[list[tuple[str, int]]]:
    """Record collectives, and how many numbers each takes from this rank (or from all, where each keeps its part)."""
    seen: list[tuple[str, int]] = []

    def see(name: str, args: tuple[Any, ...]) -> None:
        if name != "barrier":
            seen.append((name, args[0 if name == "all_reduce" else 1].numel()))

    with seen_collectives(see):
        yield seen


@contextmanager
def kernels(schedule: str = "chunks") -> Iterator[list[str]]:
    """Run nothing but the kernels, in Triton's interpreter; on a GPU they run by themselves."""
    warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter computes in NumPy
    with pytest.MonkeyPatch.context() as patched:
        yield use_kernels(patched, schedule) if DEVICE == "cpu" else []


def in_parts(kwargs: Arguments, way: str, i: int = 0) -> Arguments:
    """Return the arguments as a user of this ``way`` has them; an odd ``i`` shards further ones."""
    ours = {
        name: spread(way, value, of_vocab=IN_PARTS[name]) if name in IN_PARTS and isinstance(value, Tensor) else value
        for name, value in kwargs.items()
    }
    if kwargs.get("weight") is not None and i % 2 and way != "local":
        ours["weight"] = spread(way, kwargs["weight"], of_vocab=True)
    if way == "sequence" and i % 2 and kwargs.get("target") is not None and "weights" not in kwargs:
        ours["target"] = distribute_tensor(kwargs["target"], mesh(), [Shard(1)])
    for name in set(trained(kwargs)) - {*IN_PARTS}:
        ours[name] = kwargs[name].detach().clone().requires_grad_()
    return ours | shard_of(way, ours["linear_weight"])


def problem(name: str, choice: Arguments, i: int = 0, classes: int = V, **form: Any) -> Arguments:
    """Return the contract's arguments, on the device of the cases; of an odd ``i`` some tokens are sure."""
    kwargs = arguments(name, seed=i + SEED, **{"D": D, "V": classes, **form}, **choice)
    kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(DEVICE).detach().requires_grad_(t.requires_grad), kwargs)
    with torch.no_grad():
        kwargs["input"] *= 1 + 3 * (i % 2)
        if kwargs.get("weight") is not None:
            kwargs["weight"][3] = 0
        if choice.get("targets") == 3:
            kwargs["target"][..., 1] = kwargs["target"][..., 0]  # the same class twice
    return kwargs


def frozen(kwargs: Arguments, *names: str) -> Arguments:
    return kwargs | {name: kwargs[name].detach() for name in names if kwargs.get(name) is not None}


def through(t: Tensor) -> Tensor:
    """Give each value an upstream gradient of its own, of a size that loses no digits."""
    return t + t.sin() / 2


def of_float32(of: str) -> float:
    return 1e-5 if of == "values" else 2e-5


def compare(
    name: str,
    kwargs: Arguments,
    ways: Iterable[str],
    what: object,
    i: int = 0,
    bounds: Callable[[str], float] | None = None,
    *,
    upstream: Callable[[Tensor], Tensor] = through,
    passes: int = 1,
) -> None:
    """Hold values, and the gradients of all that can have one, against the whole's in float64, which one rank computes.

    ``bounds`` are the relative errors of "values" and of each argument's gradient; None: float64's own, or float32's.
    Tokens that do not count get NaN, an odd ``i`` shards further arguments, and the graph is used for ``passes``.
    """
    function, leaves = FUNCTIONS[name], trained(kwargs)
    want, true = on_one_rank(lambda: truth(name, kwargs, upstream))
    if bounds is None and kwargs["input"].dtype == torch.float32:
        bounds = of_float32

    if "want" not in kwargs and not kwargs.get("shift") and kwargs["input"].numel():
        with torch.no_grad():
            kwargs["input"][~counting(kwargs)] = torch.nan

    def agree(got: Tensor, e: Tensor, place: object, of: str) -> None:
        if bounds is None or not e.is_floating_point():
            near(got, e, place)
        else:
            room = function.of_scalars if of != "values" and e.dim() == 0 else 1  # a sum with cancellation
            assert relative_error(plain(got), e) <= room * bounds(of) or e.isnan().all(), place

    for way in ways:
        ours = in_parts(kwargs, way, i)
        got = {key: plain(value) for key, value in flat(function.run(**ours)).items()}
        assert got.keys() == want.keys(), (way, what)
        for key, (value, trains) in want.items():
            assert got[key].requires_grad == trains, (key, way, what)
            agree(got[key], value, (key, way, what), "values")
        for left in reversed(range(passes if true else 0)):
            given = [ours[n] for n in leaves]
            grads = torch.autograd.grad(total(got, upstream), given, allow_unused=True, retain_graph=left > 0)
            for n, grad, e in zip(leaves, grads, true, strict=True):
                if grad is None:
                    assert not e.any(), (n, way, what)
                    continue
                assert grad.dtype == ours[n].dtype, (n, way, what)
                agree(whole(way, grad, of_vocab=IN_PARTS[n]) if n in IN_PARTS else plain(grad), e, (n, way, what), n)


def truth(
    name: str, kwargs: Arguments, upstream: Callable[[Tensor], Tensor]
) -> tuple[dict[str, tuple[Tensor, bool]], tuple[Tensor, ...]]:
    """Return the whole's values in float64, which of them can have a gradient, and the gradients of the leaves."""
    wide = in_float64(kwargs)
    want, true = flat(FUNCTIONS[name].truth(**wide)), tuple[Tensor, ...]()
    if any(value.requires_grad for value in want.values()):
        given = [wide[n] for n in trained(kwargs)]
        true = torch.autograd.grad(total(want, upstream), given, materialize_grads=True, allow_unused=True)
    return {key: (value.detach(), value.requires_grad) for key, value in want.items()}, true


def on_one_rank(compute: Callable[[], Any]) -> Any:
    """Return what the first rank computes."""
    found = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return pytree.tree_map_only(Tensor, lambda t: t.to(DEVICE), found[0])
