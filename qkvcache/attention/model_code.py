"""The module with the code of a model, from its config."""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType

from transformers import MODEL_MAPPING, PreTrainedConfig


def code_of(config: PreTrainedConfig) -> ModuleType | None:
    """The module beside that of the config or, for a model that shares the code of another one (Sarvam uses DeepSeek's code, EXAONE uses
    Llama's), where transformers finds it; None if there is none."""
    kinds = type(config).__mro__[: type(config).__mro__.index(PreTrainedConfig)]
    for kind in kinds:
        package, _, name = kind.__module__.rpartition(".")
        if name.startswith("configuration_"):
            with contextlib.suppress(ImportError):
                return importlib.import_module(f"{package}.{name.replace('configuration_', 'modeling_', 1)}")
    return next((sys.modules[MODEL_MAPPING[kind].__module__] for kind in kinds if kind in MODEL_MAPPING), None)
