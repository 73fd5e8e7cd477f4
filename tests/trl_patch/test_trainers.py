"""TRL's six trainers, stock and patched, on a tiny model: the same losses, metrics and weights, and no logits."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.measure.allocations import track_allocations
from promises import promise
from support import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")  # TRL's own settings


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


def train(make_trainer: Any, kind: str, model: Any, **settings: Any) -> tuple[list[dict[str, float]], Tensor]:
    """Train, and return what was logged and by how much all the weights together changed."""
    before = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    trainer = make_trainer(kind, model, **settings)
    trainer.train()
    after = torch.cat([p.detach().flatten().double() for p in trainer.model.parameters()])
    clocks = ("runtime", "per_second", "step_time", "flos")
    logged = [
        {name: value for name, value in entry.items() if not any(clock in name for clock in clocks)}
        for entry in trainer.state.log_history
    ]
    return logged, after - before


def assert_same_runs(got: Any, expected: Any, tolerance: float) -> None:
    assert len(got[0]) == len(expected[0]) == 4
    for entry, stock in zip(got[0], expected[0], strict=True):
        assert entry.keys() == stock.keys()
        for name, value in stock.items():
            assert entry[name] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), name
    assert expected[1].norm() > 0
    assert relative_error(got[1], expected[1]) < tolerance


CAPPED = {"family": "Gemma2", "final_logit_softcapping": 2.0}
GRANITE = {"family": "Granite", "logits_scaling": 3.0}
PACKED = {"packing": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
CASES = [  # and whether TRL scores as on GPUs, where the number of tokens changes from call to call
    ("SFT", True, {}, {}),
    ("DPO", False, {}, {}),
    ("KTO", False, {}, {}),
    ("GRPO", True, {}, {}),
    ("RLOO", False, {}, {}),
    ("Distillation", False, {}, {}),
    ("SFT", False, {}, {"loss_type": "dft"}),
    ("DPO", False, {"family": "Qwen3", "tie_word_embeddings": True}, {"use_weighting": True}),  # squared probabilities
    ("GRPO", False, GRANITE, {"entropy_coef": 0.05}),  # differentiates the entropy
    ("Distillation", False, CAPPED, {"beta": 0.0}),
    ("SFT", False, CAPPED, PACKED),
    ("DPO", False, {"family": "Phi"}, {}),  # a head with a bias
    slow("DPO", True, {}, {}),
    slow("GRPO", False, {}, {"top_entropy_quantile": 0.5, "loss_type": "dapo"}),  # masks tokens by their entropy
    slow("Distillation", False, {}, {"beta": 1.0}),
    slow("GRPO", False, {"family": "Cohere2", "logit_scale": 0.25}, {}),
]


@promise("trainers")
@pytest.mark.parametrize(("kind", "valid", "model", "settings"), CASES)
def test_same_as_stock(
    kind: str,
    valid: bool,
    model: dict[str, Any],
    settings: dict[str, Any],
    make_trainer: Any,
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if valid:
        for module in ("trl.trainer.utils", "trl.trainer.distillation_trainer"):
            monkeypatch.setattr(importlib.import_module(module), "_use_triton", lambda device: True)
    expected = train(make_trainer, kind, tiny_model(**model), **settings)
    report = lowtide.patch_trl()
    got = train(make_trainer, kind, tiny_model(**model), **settings)
    assert_same_runs(got, expected, 2e-4)
    assert {"entropy", "loss"} <= got[0][0].keys()
    assert report.calls_trl == {}
    function = "ChunkedDivergenceFunction" if kind == "Distillation" else "ChunkedLogProbFunction"
    assert report.calls_lowtide.keys() == {function}
    assert report.calls_lowtide[function] >= 3


@promise("reversible")
def test_a_trainer_made_before_is_patched_and_unpatched(make_trainer: Any, tiny_model: Any) -> None:
    trainer = make_trainer("SFT", tiny_model())
    report = lowtide.patch_trl()
    trainer.train()
    assert report.calls_lowtide == {"ChunkedLogProbFunction": 3}
    lowtide.unpatch_trl()
    trainer.train()
    assert report.calls_lowtide == {"ChunkedLogProbFunction": 3}


@promise("memory")
@pytest.mark.parametrize("kind", ["DPO", slow("GRPO"), slow("Distillation")])
@pytest.mark.usefixtures("short_chunks")
def test_nothing_of_the_size_of_the_logits_is_allocated(kind: str, make_trainer: Any, tiny_model: Any) -> None:
    """The batch is long enough that a quarter of its logits is more than anything of the size of the weight."""
    V = 5003
    lengths = {"max_completion_length": 6} if kind in ("GRPO", "RLOO", "Distillation") else {}
    settings = {"max_steps": 1, "per_device_train_batch_size": 12, "num_generations": 12, **lengths}
    if not lengths or kind == "Distillation":
        del settings["num_generations"]

    def largest() -> int:
        trainer = make_trainer(
            kind, tiny_model(vocab_size=V, hidden_size=8, head_dim=4, num_hidden_layers=1), **settings
        )
        with track_allocations() as seen:
            trainer.train()
        return seen.largest_bytes

    N = 12 * 8  # fewer tokens than any of these batches scores
    assert largest() >= N * V * 4, "the tracker must see the logits where there are any"
    lowtide.patch_trl()
    assert largest() < N * V * 4 / 2
