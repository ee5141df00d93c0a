"""The ahead-of-time check names the kernels' constants as the kernels do; compiling itself takes minutes and is `make kernels`."""

from pathlib import Path

from tests.processes import Program

CHECK = Path(__file__).parents[2] / "eval" / "compile_kernels.py"


def test_knows_the_kernels():
    Program(CHECK, ["--only", "no kernel"]).result()
