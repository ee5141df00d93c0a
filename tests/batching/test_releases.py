"""Continuous batching on releases of transformers before and after the tested one."""

import sys

import pytest

from qkvcache import batching, continuous_batching, releases
from tests.matrix import model
from tests.releases import BATCHING

pytestmark = pytest.mark.contract


def install(patch: pytest.MonkeyPatch, version: str) -> None:
    """Sets the version that the subclasses of transformers find when they are imported again."""
    patch.setattr(sys.modules["transformers"], "__version__", version)
    for name in [name for name in sys.modules if name.startswith(f"{batching.__name__}.transformers")]:
        patch.delitem(sys.modules, name)
    patch.delattr(batching, "transformers", raising=False)


@pytest.mark.parametrize("version", ["5.17.0", "5.23.4"])
def test_older_releases_are_refused_with_the_fix(monkeypatch, version):
    network = model("llama")
    install(monkeypatch, version)
    with pytest.raises(NotImplementedError, match=rf"from 5.24 on.*{version} differs .it is older.: pip install 'transformers.serving.=="):
        continuous_batching(network)
    assert "init_continuous_batching" not in network.__dict__


@pytest.mark.skipif(not BATCHING, reason="continuous batching needs transformers 5.24")
def test_a_newer_release_is_compared_with_the_tested_one(monkeypatch):
    network, compared = model("llama"), []
    install(monkeypatch, "5.99.0")
    monkeypatch.setattr(releases, "warn_if_newer", lambda: compared.append("5.99.0"))
    with pytest.warns(UserWarning, match="no kernels"), continuous_batching(network):
        assert compared
