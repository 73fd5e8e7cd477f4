"""What every child of the sweep has imported before it begins."""

import importlib
import warnings

from lowtide.bench import models_case as models_case

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _module in ("transformers.modeling_utils", "transformers.models.auto.modeling_auto"):
        importlib.import_module(_module)
