"""Interim."""
from dataclasses import dataclass
@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Interim: being rewritten."""
    workspace_mib: float | None = None
    accumulate: str = "auto"
    backend: str = "auto"
    gradient: str = "auto"
class HeadPlan: ...
def plan_head(N, D, V, dtype, device, options=None): ...
