"""Tests of the behavior of transformers' server on which `qkvcache serve` relies."""

import ast
import inspect
import textwrap
from pkgutil import resolve_name

import pytest

from tests.releases import BATCHING

pytestmark = pytest.mark.contract
if not BATCHING:
    pytest.skip("continuous batching needs transformers 5.24", allow_module_level=True)
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from transformers.cli.serve import Serve  # noqa: E402
from transformers.cli.serving import server, utils  # noqa: E402
from transformers.cli.serving.model_manager import ModelManager  # noqa: E402
from transformers.cli.serving.utils import BaseHandler, CBGenerateManager, GenerateManager, GenerationState  # noqa: E402


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_constructor_starts_the_server_last():
    assert {"force_model", "continuous_batching", "non_blocking", "host", "port", "device", "dtype", "cb_num_blocks"} <= set(
        parameters(Serve)
    )
    body = ast.parse(textwrap.dedent(inspect.getsource(Serve.__init__))).body[0].body
    last = ast.unparse(body[-1])
    assert last.startswith("if non_blocking:\n    self.start_server()") and "self.server.run()" in last
    names = {ast.unparse(node) for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Attribute)}
    handlers = {"self._chat_handler", "self._completion_handler", "self._response_handler"}
    assert {"self._model_manager", "self._generation_state", "self.server", *handlers} <= names


def test_the_server_asks_the_instance_of_the_model_manager():
    source = inspect.getsource(server)
    for call in ("model_manager.shutdown()", "model_manager.list_models()"):
        assert call in source
    assert "self.model_manager.load_model_and_processor(" in inspect.getsource(BaseHandler._resolve_model)
    listed = inspect.getsource(ModelManager.list_models)
    assert "if self.force_model is not None:" in listed and "self.process_model_name(" in listed
    assert parameters(ModelManager.load_model_and_processor)[:2] == ["self", "model_id_and_revision"]
    assert ModelManager.process_model_name("demo") == "demo@main" and ModelManager.process_model_name("demo@v2") == "demo@v2"


def test_handlers_make_and_parse_prompts_by_their_processor():
    """The prompt's maker ends a first call of a handler, before it has done anything else (`batching/prompts.py`)."""
    calls = {"chat_completion.ChatCompletion": "processor.apply_chat_template(", "response.Response": "processor.apply_chat_template("}
    for name, call in (calls | {"completion.Completion": "tokenizer(prompt, "}).items():
        source = inspect.getsource(resolve_name(f"transformers.cli.serving.{name}Handler").handle_request)
        assert source.count(call) == 1 and source.index(call) < source.index("self._build_generation_config(") < source.index("_streaming(")
    assert "return tokenizer.decode(input_ids)" in inspect.getsource(utils._decode_prefix)
    parsed = inspect.getsource(utils.parse_assistant_message)
    assert "tokenizer.parse_response(" in parsed and "prefix=_decode_prefix(tokenizer, input_ids), tools=tools" in parsed


def test_the_state_of_generation_can_be_shut_down():
    state = GenerationState(continuous_batching=True)
    state.shutdown()
    assert state.is_cb_alive()


def test_handlers_pass_what_the_front_relies_on():
    """The body and the id of a request, one manager for each way to generate, and a request that is added before it streams."""
    for name in ("chat_completion.ChatCompletion", "completion.Completion", "response.Response"):
        kind = resolve_name(f"transformers.cli.serving.{name}Handler")
        assert parameters(kind.handle_request) == ["self", "body", "request_id"]
        assert "return StreamingResponse(" in inspect.getsource(kind) and "return JSONResponse(" in inspect.getsource(kind)
    for kind in (CBGenerateManager, GenerateManager):
        for name in ("generate_streaming", "generate_non_streaming"):
            assert parameters(getattr(kind, name))[:6] == ["self", "model", "processor", "inputs", "gen_config", "request_id"]
    state = GenerationState(continuous_batching=True)
    state._generate_managers["demo@main"] = manager = object()
    assert state.get_manager("demo@main") is manager and parameters(CBGenerateManager.init_cb) == ["self", "model", "gen_config"]
    assert "cb.add_request(" in inspect.getsource(CBGenerateManager.generate_streaming)
