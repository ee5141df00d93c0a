"""The load test, with few requests."""

import pytest
import transformers
from packaging.version import Version

pytest.importorskip("uvicorn")
if Version(transformers.__version__) < Version("5.19"):
    pytest.skip("transformers has no page allocators", allow_module_level=True)

import load_batching  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:continuous batching on compressed pages")


@pytest.mark.slow
def test_every_request_has_its_own_answer_and_leaves_nothing(capfd):
    counts = load_batching.run(30, 8)
    assert sum(counts[kind] for kind in ("whole", "stream", "leaves", "refused")) == 30
    assert all(counts[kind] for kind in ("whole", "stream", "leaves", "refused"))
    assert counts["counted finished"] > 15 and "Traceback" not in capfd.readouterr().err
