"""lm-eval's command line with the model and the tasks of this library: `python -m qkvcache.evaluation run --model qkvcache --tasks
qkvcache_needle ...`."""

from __future__ import annotations

import sys
from pathlib import Path

NAME, TARGET = "qkvcache", "qkvcache.evaluation.model:CacheLM"
TASKS = Path(__file__).parent / "tasks"


def register() -> None:
    """Registers `model="qkvcache"` with lm-eval."""
    try:
        import lm_eval.models  # noqa: F401  # first: it registers its own models only in an empty registry
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise ImportError(f"lm-eval is needed: pip install 'qkvcache[eval]' ({error})") from error
    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


def _with_ours(manager: type) -> type:
    """lm-eval's TaskManager with the tasks of this library added, since its `--include_path` takes one folder, which is
    left to the user."""

    class WithOurs(manager):
        def __init__(self, *args, include_path=None, **options):
            theirs = include_path if isinstance(include_path, list | tuple) else [include_path] if include_path else []
            super().__init__(*args, include_path=[TASKS, *theirs], **options)

    return WithOurs


def main(arguments: list[str]) -> None:
    """`lm-eval ARGUMENTS`, with the tasks of this library beside its own."""
    register()
    from lm_eval.__main__ import cli_evaluate

    if not {"-h", "--help"}.intersection(arguments):  # which needs no tasks: they take a second to import
        import lm_eval.tasks

        lm_eval.tasks.TaskManager = _with_ours(lm_eval.tasks.TaskManager)
    if arguments[:1] == ["run"] and not any(argument.startswith("--device") for argument in arguments):
        import torch

        if not torch.cuda.is_available():  # lm-eval's default is cuda:0
            arguments = [*arguments, "--device", "cpu"]
    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()


if __name__ == "__main__":
    main(sys.argv[1:])
