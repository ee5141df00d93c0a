"""One color for each family of formats and for each policy, in every picture."""

from pathlib import Path

import palette

from qkvcache import policies
from qkvcache.formats import REGISTRY

EVAL = Path(__file__).parents[2] / "eval"


def test_every_format_and_policy_has_a_color_of_its_own():
    assert {palette.family(name) for name in REGISTRY} <= set(palette.FAMILIES)
    colors = [palette.policy_color(name) for name in policies.REGISTRY]
    assert set(palette.POLICIES) >= set(policies.REGISTRY) and len(set(colors)) == len(colors)


def test_names_of_rows_have_the_color_of_their_policy_or_family():
    for name in ("SinkWindow", "sink_window, recent 32", "sink_window"):
        assert palette.policy_color(name) == palette.POLICIES["sink_window"]
    assert palette.format_color("turboquant_4bit_nc_uncentered") == palette.FAMILIES["turboquant"]


def test_no_script_chooses_colors_of_its_own():
    for script in EVAL.glob("*.py"):
        text = script.read_text()
        assert "tab20" not in text and '"tab:' not in text, script
