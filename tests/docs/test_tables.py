"""The tables of README and of the site say what the rows say. `make tables` writes them again."""

import pages
import pytest

TABLES = [(page, match["command"], match["text"]) for page in pages.pages() for match in pages.tables(page.read_text())]


@pytest.mark.parametrize("page, command, text", TABLES, ids=[f"{page.stem}-{command}" for page, command, _ in TABLES])
def test_tables_are_those_of_the_rows(page, command, text):
    assert text == pages.printed(command), "make tables"


def test_a_table_is_filled(tmp_path):
    example = "```text\n<!-- table: eval/none.py -->\n<!-- end -->\n```\n"
    text = f"before\n<!-- table: eval/bench_prefix.py --markdown -->\nold\n<!-- end -->\nafter\n{example}"
    made = pages.filled(text)
    assert "old" not in made and "| format |" in made and made.startswith("before") and "eval/none.py" in made
    assert pages.filled(made) == made
