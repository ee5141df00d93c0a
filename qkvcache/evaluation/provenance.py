"""The provenance of a result: its date, commit, versions and command."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers


def provenance() -> dict[str, str]:
    """Date, commit, versions and the running command; absolute paths are reduced to their last part."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    command = " ".join(Path(word).name if Path(word).is_absolute() else word for word in sys.argv)
    return {"date": time.strftime("%Y-%m-%d"), "commit": _commit()} | versions | {"command": command}


@functools.cache
def _commit() -> str:
    return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
