"""Signatures of the named caches, as editors and `help` show them: each has the options of CompressedCache, apart from what it makes."""

import inspect
import typing

import pytest

from qkvcache import CompressedCache, caches
from qkvcache.caches.named import FormatOptions, Options

GENERAL = {name: at for name, at in inspect.signature(CompressedCache).parameters.items() if at.kind is at.KEYWORD_ONLY}
OF_FORMATS = {"policy", "num_sink_tokens", "attention_budget", "offload_pages"}
NAMED = [getattr(caches, name) for name in caches.__all__ if name.endswith("Cache") and name != "CompressedCache"]


@pytest.mark.parametrize("kind", NAMED, ids=lambda kind: kind.__name__)
def test_a_signature_lists_every_option(kind):
    parameters = inspect.signature(kind).parameters
    made = GENERAL.keys() - parameters.keys()
    assert made in ({"format"}, {"policy"})
    assert not [at for at in parameters.values() if at.kind is at.VAR_KEYWORD]
    assert parameters["max_length"] == GENERAL["max_length"] and parameters["residual_length"].default == 64
    with pytest.raises(TypeError, match=rf"{kind.__name__} makes its {min(made)} itself: pass \w+="):
        kind(**dict.fromkeys(made, "int8"))


def test_type_checkers_know_the_same_options():
    assert typing.get_type_hints(FormatOptions).keys() == GENERAL.keys() - {"format"}
    assert typing.get_type_hints(Options).keys() == GENERAL.keys() - {"format"} - OF_FORMATS
