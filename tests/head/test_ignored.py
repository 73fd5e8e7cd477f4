"""Whether ignored tokens are skipped where nothing is asked: what the calls before say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from lowtide import HeadOptions, linear_cross_entropy
from lowtide.head import ignored
from lowtide.head.call import CrossEntropyArgs, DivergenceArgs, TokenStatsArgs
from lowtide.head.ignored import AFTER, LEAST, IgnoredShares, decided, kept_tokens


def chosen(shares: list[float], monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], list[tuple[int, int]]]:
    """Return what is chosen for each call, and the counts that were waited for: (of which call, in which call)."""
    calls, waits, out = IgnoredShares(), [], list[bool]()
    here = 0

    def share_of(kept: torch.Tensor) -> Callable[[], float]:
        of = here

        def wait() -> float:
            waits.append((of, here))
            return shares[of]

        return wait

    monkeypatch.setattr(ignored, "share_of", share_of)
    for here in range(len(shares)):
        if here:  # the first call's count is waited for before it
            out.append(calls.skip)
        calls.count(torch.ones(1))
        if here == 0:
            out.append(calls.skip)
    return out, waits


@pytest.mark.parametrize("share", [0.0, LEAST, 2 * LEAST, 1.0])
def test_the_same_share_is_the_same_choice_from_the_first_call_on(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, waits = chosen([share] * 100, monkeypatch)
    assert out == [share > LEAST] * 100
    assert waits[0] == (0, 0)
    assert all(now + 1 - of >= AFTER for of, now in waits[1:])  # once that call is launched


@pytest.mark.parametrize("kinds", [2, 3, 4, 5, 7, 8])
def test_batches_that_take_turns_are_seen(kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipping costs a batch without ignored tokens little, computing costs the others much."""
    for which in range(kinds):
        out, _ = chosen([0.5 * (n % kinds == which) for n in range(400)], monkeypatch)
        assert sum(out[2 * kinds + AFTER :]) > 0.75 * (400 - 2 * kinds - AFTER)


def test_what_changes_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = chosen([0.0] * 50 + [0.9] * 50 + [0.0] * 100, monkeypatch)
    assert not any(out[:50])
    assert all(out[50 + AFTER + 4 : 100])
    assert not any(out[160:])


def test_a_compiled_call_does_not_depend_on_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IgnoredShares, "count", lambda *_: pytest.fail("counted"))
    x, w, y = torch.randn(9, 8), torch.randn(11, 8), torch.arange(9)
    run = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    for way in ("auto", "compute"):
        loss = run(x, w, y, options=HeadOptions(ignored_tokens=way))
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x @ w.T, y))


def test_which_tokens_count() -> None:
    y, none = torch.tensor([[3, -100], [-100, -100], [1, 2], [-100, 4]]), torch.zeros(4)
    entropy = torch.tensor([0.0, 0.0, 0.0, 1.0])
    args = TokenStatsArgs(target=y, want="", topk=0, ignore_index=-100)
    assert kept_tokens(args, (), 4).tolist() == [True, False, True, True]
    assert kept_tokens(args, (torch.ones(4, 2), None), 4).tolist() == [True, False, True, True]
    upstream = torch.tensor([[0.0, 5], [1, 1], [0, 1], [1, 0]])
    assert kept_tokens(args, (upstream, none), 4).tolist() == [False, False, True, False]
    assert kept_tokens(args, (None, entropy), 4).tolist() == [False, False, False, True]
    loss = CrossEntropyArgs(y, ignore_index=-100)
    assert kept_tokens(loss, (torch.tensor(0.5),), 8).tolist() == (y != -100).tolist()
    assert kept_tokens(loss, (torch.arange(8.0),), 8).tolist() == [0, 0, 0, 0, 1, 1, 0, 1]
    empty = TokenStatsArgs(target=y[:, :0], want="", topk=0, ignore_index=-100)
    assert kept_tokens(empty, (None, entropy), 4).tolist() == [False, False, False, True]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that skips tokens, as far as `decided` looks at it; ``captures`` says whether a graph is captured."""
    gpu = SimpleNamespace(captures=False, share=0.0, counted=0)
    monkeypatch.setattr(ignored, "_known", {})
    monkeypatch.setattr(ignored, "_skips", lambda _: True)
    monkeypatch.setattr(ignored, "watched", lambda _: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.captures)

    def share(kept: torch.Tensor) -> Callable[[], float]:
        assert not gpu.captures, "counting needs events, which a graph that is captured does not allow"
        gpu.counted += 1
        found = 1 - float(kept.float().mean())
        return lambda: found

    monkeypatch.setattr(ignored, "share_of", share)
    return gpu


def call(gpu: SimpleNamespace, *, args: type = CrossEntropyArgs, alone: bool = True) -> str:
    """Return what one call of a kind does, and end it."""
    x = SimpleNamespace(device=torch.device("cuda", 0))
    w = SimpleNamespace(shape=torch.Size((11, 8)))
    kept = torch.arange(100) >= 100 * gpu.share
    way, after = decided(("name", args, "mean"), (x, w, x), lambda: kept, alone=alone)  # type: ignore[arg-type]
    if after is not None:
        after()
    return way


def test_the_first_call_waits_and_later_ones_follow(hopper: SimpleNamespace) -> None:
    assert [call(hopper) for _ in range(10)] == ["compute"] * 10
    hopper.share = 0.5
    ways = [call(hopper) for _ in range(AFTER + 10)]
    assert "skip" not in ways[:AFTER]
    assert ways[AFTER + 3 :] == ["skip"] * (len(ways) - AFTER - 3)


def test_a_captured_graph_does_what_the_last_call_did(hopper: SimpleNamespace) -> None:
    hopper.captures = True
    assert call(hopper) == "skip"  # nothing is known
    hopper.captures = False
    assert call(hopper) == "compute"
    hopper.captures = True
    assert [call(hopper) for _ in range(20)] == ["compute"] * 20
    assert hopper.counted == 1


def test_what_is_never_decided_by_counts(hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper.share = 0.5
    assert call(hopper, alone=False) == "auto"
    assert call(hopper, args=DivergenceArgs) == "auto"
    torch.use_deterministic_algorithms(True)
    try:
        assert call(hopper) == "skip"
    finally:
        torch.use_deterministic_algorithms(False)
    assert not ignored._known
    monkeypatch.setattr(ignored, "MOST_KINDS", 1)
    assert call(hopper) == "skip"
    assert call(hopper, args=TokenStatsArgs) == "skip"
    assert len(ignored._known) == 1
    assert hopper.counted == 2
