"""Tests of the behavior of transformers' server on which `qkvcache serve` relies."""

import inspect
from pkgutil import resolve_name

import pytest

from tests.releases import BATCHING

pytestmark = pytest.mark.contract
if not BATCHING:
    pytest.skip("continuous batching needs transformers 5.24", allow_module_level=True)
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from transformers.cli.serve import Serve  # noqa: E402
from transformers.cli.serving.model_manager import ModelManager  # noqa: E402
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager, GenerationState  # noqa: E402


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_state_of_generation_can_be_shut_down():
    state = GenerationState(continuous_batching=True)
    state.shutdown()
    assert state.is_cb_alive()


def test_signatures_that_the_front_relies_on():
    """The body and the id of a request, one manager for each way to generate, and the options of the server."""
    options = {"force_model", "continuous_batching", "non_blocking", "host", "port", "device", "dtype", "cb_num_blocks"}
    assert options <= set(parameters(Serve))
    assert parameters(ModelManager.load_model_and_processor)[:2] == ["self", "model_id_and_revision"]
    assert ModelManager.process_model_name("demo") == "demo@main" and ModelManager.process_model_name("demo@v2") == "demo@v2"
    for name in ("chat_completion.ChatCompletion", "completion.Completion", "response.Response"):
        kind = resolve_name(f"transformers.cli.serving.{name}Handler")
        assert parameters(kind.handle_request) == ["self", "body", "request_id"]
    for kind in (CBGenerateManager, GenerateManager):
        for name in ("generate_streaming", "generate_non_streaming"):
            assert parameters(getattr(kind, name))[:6] == ["self", "model", "processor", "inputs", "gen_config", "request_id"]
    state = GenerationState(continuous_batching=True)
    state._generate_managers["demo@main"] = manager = object()
    assert parameters(ModelManager.shutdown) == ["self"] and state._cb_manager is None  # which `Server` replaces, and empties
    assert state.get_manager("demo@main") is manager and parameters(CBGenerateManager.init_cb) == ["self", "model", "gen_config"]
