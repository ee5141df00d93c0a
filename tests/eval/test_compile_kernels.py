"""The ahead-of-time check names the kernels' constants as the kernels do; compiling itself takes minutes and is `make kernels`."""

import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).parents[2] / "eval" / "compile_kernels.py"


def test_knows_the_kernels():
    done = subprocess.run([sys.executable, CHECK, "--only", "no kernel"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
