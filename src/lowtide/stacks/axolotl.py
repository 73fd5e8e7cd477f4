"""A plugin for axolotl: the model is patched once it is loaded, with its adapters.

In the YAML file: ``plugins: [lowtide.stacks.axolotl.LowtidePlugin]``, and instead of axolotl's own fused losses, MLPs
and norms (``liger_*``, ``cut_cross_entropy``, ``chunked_cross_entropy``). Written for axolotl 0.19.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field

import lowtide


class LowtideArgs(BaseModel):  # type: ignore[misc]
    """What the plugin reads from the YAML file: arguments of `lowtide.patch`."""

    lowtide_loss: bool = True
    lowtide_mlp: bool = True
    lowtide_norm: bool = True
    lowtide_rope: bool = True
    lowtide_workspace_mib: float | None = Field(default=None, gt=0)


class LowtidePlugin(BasePlugin):  # type: ignore[misc]
    """Patches the model with `lowtide.patch`, and prints its report when training has ended."""

    def get_input_args(self) -> str:
        """Return where the arguments of the YAML file are declared."""
        return "lowtide.stacks.axolotl.LowtideArgs"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Patch the model."""
        own = ("loss", "mlp", "norm", "rope")
        given: Any = {name: cfg.get(f"lowtide_{name}", True) is not False for name in own}
        options = lowtide.HeadOptions(workspace_mib=cfg.get("lowtide_workspace_mib"))
        self.report = lowtide.patch(model, options=options, **given)

    def post_train(self, cfg: Any, model: Any) -> None:  # noqa: ARG002
        """Print what was patched, and how many losses were computed without logits."""
        print(self.report)  # noqa: T201
