"""lm-eval's command line with our model and our tasks: `python -m qkvcache.harness run --model qkvcache --tasks qkvcache_needle ...`."""

from __future__ import annotations

import sys
from pathlib import Path

NAME, TARGET = "qkvcache", "qkvcache.harness.model:CacheLM"
TASKS = Path(__file__).parent / "tasks"


def register() -> None:
    """Makes `model="qkvcache"` known to lm-eval. Its next release finds it by itself."""
    try:
        import lm_eval.models  # noqa: F401  # first: it registers its own models only in an empty registry
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise ImportError(f"lm-eval is needed: pip install 'qkvcache[eval]' ({error})") from error
    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


def main(arguments: list[str]) -> None:
    """`lm-eval ARGUMENTS`, with our tasks beside its own."""
    register()
    from lm_eval.__main__ import cli_evaluate

    if arguments and arguments[0] not in ("ls", "validate", "-h", "--help") and "--include_path" not in arguments:
        arguments = [*arguments, "--include_path", str(TASKS)]
    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()


if __name__ == "__main__":
    main(sys.argv[1:])
