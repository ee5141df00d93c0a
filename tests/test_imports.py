"""Modules that importing the package and asking the command for help load: none that takes seconds."""

import subprocess
import sys

import pytest

import qkvcache

HEAVY = {"torch", "transformers", "triton", "accelerate", "datasets", "scipy", "safetensors", "sympy"}
OF_MODELS = {"torch._dynamo", "sympy", "scipy", "transformers.modeling_utils", "transformers.masking_utils", "datasets", "rich", "typer"}
"""Modules that transformers loads with a model, in a second or two, and modules of the command."""
CACHES = "from qkvcache import TurboQuantCache, attach, detach, formats, plan, policies, recommend, warmup"
EVERY_HELP = """
import typer, qkvcache.cli
from typer.testing import CliRunner
def ask(command, words):
    assert CliRunner().invoke(qkvcache.cli.app, [*words, "--help"]).exit_code == 0, words
    for word, inner in getattr(command, "commands", {}).items():
        ask(inner, [*words, word])
ask(typer.main.get_command(qkvcache.cli.app), [])
"""


def loaded(code: str) -> set[str]:
    """Modules of a fresh process after `code`."""
    code = f"{code}\nimport sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    ("code", "without"),
    [("import qkvcache; dir(qkvcache)", HEAVY | {"numpy", "rich", "typer"}), (EVERY_HELP, HEAVY), (CACHES, OF_MODELS)],
    ids=["package", "help", "caches"],
)
def test_nothing_heavy_is_loaded(code, without):
    assert not loaded(code) & without


def test_names_are_there_on_first_use():
    assert issubclass(qkvcache.TurboQuantCache, qkvcache.CompressedCache) and callable(qkvcache.plan) and qkvcache.formats.FP8
    assert {*qkvcache.__all__} <= {*dir(qkvcache)} and all(hasattr(qkvcache, name) for name in qkvcache.__all__)
    assert qkvcache.kernels.attend  # the parts are attributes
    with pytest.raises(AttributeError, match="'qkvcache' has no attribute 'TurboCache'"):
        qkvcache.TurboCache  # noqa: B018
