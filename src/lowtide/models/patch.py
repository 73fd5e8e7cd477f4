"""`patch` and `unpatch`: a model's loss without its logits, and its MLPs, norms and rotary embeddings fused.

Every module that changes, the model and its output embedding among them, gets a class of its own: see `instance`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lowtide.arguments import check_flag
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.head.options import HeadOptions, check_options
from lowtide.models import eligibility, parts
from lowtide.models.head_call import LossState
from lowtide.models.instance import give_class, is_on_top, part_of
from lowtide.models.lazy_logits import keep_from_compiling
from lowtide.models.lazy_operations import look_up
from lowtide.models.loss_part import LOSS, STATE, adopt_head, model_overrides
from lowtide.models.parts import PARTS
from lowtide.models.report import PatchReport


def patch(
    model: nn.Module,
    *,
    loss: bool = True,
    mlp: bool = True,
    norm: bool = True,
    rope: bool = True,
    fuse: tuple[type[nn.Module], ...] = (),
    scoring: bool = False,
    options: HeadOptions | None = None,
) -> PatchReport:
    """Make a Hugging Face model compute its loss without its logits, its MLPs, norms and rotations by fused operations.

    This instance alone is changed, and nothing about its weights, their names or what ``save_pretrained`` writes.

    The loss: called with ``labels``, ``shift_labels`` or ``num_items_in_batch``, the model's output embedding returns
    lazy logits, which record scales, soft caps, biases, slices and views. A cross entropy of rows and class indices,
    wherever it is computed, is then `lowtide.linear_cross_entropy` of the hidden states; gathered log-probabilities,
    logsumexp and argmax need no logits either. Anything else that reads the logits (``outputs.logits`` later, another
    loss, a metric) gets real ones, built on first use and counted in the report. The loss uses float32 logits, even if
    the model would have rounded its own to its dtype first. The output embedding is a ``torch.nn.Linear``, plain
    or in peft's modules_to_save; others (adapters, quantised weights, tensor parallelism) stay unmodified, and the
    report says why. Under ``torch.compile`` the model's own forward runs in eager, and what it calls is compiled. With
    ``scoring`` calls without labels return lazy logits too, except those for one token of each sequence, as in
    generation.

    The other parts: of modules whose forward is transformers' own code, and of classes in ``fuse``, lowtide runs the
    code on a few random rows beside its own operation, and compares values, gradients and attributes. Where they differ
    the module stays unmodified, with the reason in the report. In training and in evaluation a patched module computes
    the same as before to rounding, saves less for backward and takes less time on a GPU. A call with hooks on a
    projection, DTensors or ``torch.func`` runs the stock code; so do compiled layers, but for experts and for MLPs at
    ``checkpoint_level`` 1 or in 4 bits. After a change of the module's code or settings call `patch` again.

    Patching again applies the new arguments, ``options`` included, and returns the same report.

    Args:
        model: A model with ``get_output_embeddings`` and a forward that takes labels, as those of transformers; also
            one wrapped by peft. Not one wrapped by DDP, FSDP1 or ``torch.compile``: patch first, wrap then.
        loss: Whether to patch the loss.
        mlp: Whether gated MLPs (gate_proj, up_proj, down_proj, or gate_up_proj, down_proj; SiLU or tanh-GELU) run as
            `lowtide.swiglu_mlp`, also with LoRA, and over 4-bit weights of bitsandbytes, which are dequantised for one
            GEMM at a time. A mixture's experts with their weights in one module run by grouped GEMMs. All of these get
            an attribute ``checkpoint_level``, 0 at first, as `lowtide.swiglu_mlp` takes it.
        norm: Whether RMS norms run as `lowtide.layers.rms_norm`.
        rope: Whether attention that calls a rotary embedding (``apply_rotary_pos_emb`` and others with "rotary" in
            their names) rotates by `lowtide.layers.rotary`.
        fuse: Further classes of MLPs, experts, norms and attention, whose code is not transformers' own; also the
            transformers' class around an activation of your own.
        scoring: Whether calls without labels build no logits either where only log-probabilities, their sums or argmax
            are read of them, as in an evaluation. It needs ``loss``. See also `scoring`.
        options: How `lowtide.linear_cross_entropy` is to run.

    Returns:
        A `PatchReport`: print it for a table. Its counts are live.

    Raises:
        ArgumentTypeError: ``model`` is no module with ``get_output_embeddings``, ``options`` no HeadOptions, or
            ``fuse`` no tuple of classes.
        ArgumentValueError: ``scoring`` without ``loss``; or a class in ``fuse`` is not in the model, or does not
            compute what lowtide does, with the reason. Then nothing is changed.
        UnsupportedError: A part is to be undone, and something else changed a patched module's class since; then
            nothing is changed.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("path/to/model")
        >>> report = lowtide.patch(model)
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> print(report)
        >>> lowtide.unpatch(model)
    """
    target = _unwrapped(model)
    check_options(options)
    parts.check_fuse(fuse)
    flags = {"loss": loss, "mlp": mlp, "norm": norm, "rope": rope}
    for name, flag in {**flags, "scoring": scoring}.items():
        check_flag(name, flag)
    if scoring and not loss:
        raise ArgumentValueError(message("scoring", "loss=True beside it", "loss=False"))
    state: LossState = vars(target).get(STATE) or LossState(PatchReport(), options)
    _check_nothing_on_top(target, [part for part, wanted in flags.items() if not wanted])
    found = {part: parts.find(target, part, fuse) for part in PARTS if flags[part]}
    parts.check_named(fuse, found)
    state.options, state.scoring = options, scoring
    if loss:
        _patch_loss(target, state)
    else:
        _unpatch_loss(target, state)
        state.report.add("loss", "-", "left as it is: loss=False", patched=False)
    for part in PARTS:
        if part in found:
            parts.fuse(found[part], part, state.report)
        else:
            parts.restore(target, part)
            state.report.add(part, "-", f"left as it is: {part}=False", patched=False)
    if part_of(target) is not None or any(row.patched for row in state.report.parts.values()):
        vars(target)[STATE] = state
    else:
        vars(target).pop(STATE, None)
    return state.report


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: the model and its modules get back the classes and attributes they had.

    A model that is not patched is left as it is, so that cleaning up twice does no harm.

    Args:
        model: What `patch` was given.

    Raises:
        ArgumentTypeError: ``model`` is no module with output embeddings.
        UnsupportedError: Something else changed a patched module's class since (``fully_shard``, a parametrization);
            then nothing is changed.

    Example:
        >>> lowtide.patch(model)
        >>> lowtide.unpatch(model)
    """
    target = _unwrapped(model)
    state = vars(target).get(STATE)
    if state is None:
        return
    _check_nothing_on_top(target, (LOSS, *PARTS))
    _unpatch_loss(target, state)
    for part in PARTS:
        parts.restore(target, part)
    del vars(target)[STATE]


@contextmanager
def scoring(model: nn.Module) -> Iterator[PatchReport]:
    """Have a model build no logits inside the block where its log-probabilities, their sums or argmax are read.

    A patched model returns lazy logits in calls without labels too, as `patch` with ``scoring=True`` has it; one that
    is not patched gets the loss's part of `patch` for the block, and its logits have to be read inside it.

    Args:
        model: As `patch` takes it.

    Yields:
        The `PatchReport`, whose counts go on in the block.

    Raises:
        ArgumentTypeError: As `patch` does.
        ArgumentValueError: A patched model whose loss is left as it is.
        UnsupportedError: Something else changed a patched module's class in the block.

    Example:
        >>> with lowtide.scoring(model) as report, torch.no_grad():
        ...     logprobs = model(input_ids).logits.log_softmax(-1)[:, :-1]
        ...     scores = logprobs.gather(-1, input_ids[:, 1:, None]).sum()
    """
    target = _unwrapped(model)
    state: LossState | None = vars(target).get(STATE)
    if state is None:
        report = patch(model, mlp=False, norm=False, rope=False, scoring=True)
        try:
            yield report
        finally:
            unpatch(model)
        return
    if part_of(target) is None:
        raise ArgumentValueError(message("model", "a model with the loss patched", state.report.parts["loss"].outcome))
    before, state.scoring = state.scoring, True
    try:
        yield state.report
    finally:
        state.scoring = before


def _patch_loss(target: Any, state: LossState) -> None:
    if part_of(target) is None:
        why_not = eligibility.why_not_patch_model(target)
        if why_not is not None:
            state.report.add("loss", "-", f"left as it is: {why_not}", patched=False)
            return
        give_class(target, LOSS, model_overrides)
    keep_from_compiling()
    look_up()
    if is_on_top(target):
        adopt_head(target, state)  # it may have got adapters since, or lost them


def _check_nothing_on_top(target: nn.Module, undone: Sequence[str]) -> None:
    """Check, before anything changes, that nothing has given a class to a module of the parts ``undone`` since.

    Raises:
        UnsupportedError: Something has (``fully_shard``, a parametrization).
    """
    for module in target.modules():
        if part_of(module) in undone and not is_on_top(module):
            expected = f"{type(module).__name__} to have the class that patch gave it"
            hint = "Undo what came after lowtide.patch first."
            raise UnsupportedError(message("model", expected, f"one changed since, {type(module).__mro__}", hint))


def _unpatch_loss(target: nn.Module, state: LossState) -> None:
    parts.restore(target, LOSS)
    state.head, state.why_not = None, None


def _unwrapped(model: Any) -> Any:
    """Return the model inside peft's wrapper, which calls its forward; any other model itself."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(message("model", "a torch.nn.Module", type(model).__name__))
    if hasattr(model, "_orig_mod"):
        hint = "Pass the model itself: patch first, compile then."
        raise ArgumentTypeError(message("model", "a Hugging Face model", "one wrapped by torch.compile", hint))
    unwrap: Any = getattr(model, "get_base_model", None)
    if callable(unwrap):
        model = unwrap()
    if not callable(getattr(model, "get_output_embeddings", None)):
        hint = "Pass the Hugging Face model itself, before DDP, FSDP or torch.compile wraps it."
        raise ArgumentTypeError(message("model", "a model with get_output_embeddings()", type(model).__name__, hint))
    return model
