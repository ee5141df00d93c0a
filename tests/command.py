"""The command line, as users type it."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from qkvcache.cli import app


def run(*arguments: object, columns: int = 200) -> Result:
    return CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"}).invoke(app, [str(word) for word in arguments])


def refuses(says: str, *arguments: object) -> None:
    """Wrong input ends the command with status 2, and words that say so."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert says in result.output
