"""Wrong input is refused where it is given, in words that name the value and the fix, and leaves the cache as it was."""

import contextlib
import copy
import gc

import pytest
import torch
from transformers import LlamaConfig, MllamaForCausalLM, XLNetConfig, XLNetLMHeadModel
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from qkvcache import CompressedCache, H2OCache, HadaQuantCache, NVFP4Cache, QuantizedPerTokenCache, SinkCache, TurboQuantCache
from qkvcache.releases import CACHE_ARGUMENT, passing
from tests.matrix import model

CONFIG = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, hidden_size=512, head_dim=128)
ODD = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=400, head_dim=100)

WRONG = [
    (CompressedCache, (CONFIG,), {"format": "int9"}, ValueError, "int9"),
    (CompressedCache, (CONFIG,), {"format": "turboquant_4bit"}, ValueError, "turboquant_4bit_nc"),
    (CompressedCache, (CONFIG,), {"format": "FP8"}, ValueError, "format='FP8' is unknown: did you mean 'fp8'"),
    (CompressedCache, (CONFIG,), {"format": 4}, TypeError, "4"),
    (CompressedCache, (CONFIG,), {}, TypeError, "format"),
    (CompressedCache, ("llama",), {"format": "int8"}, TypeError, "model.config"),
    (CompressedCache, (CONFIG, "int8"), {}, TypeError, "positional"),
    (CompressedCache, (CONFIG,), {"format": "int8", "num_sink_tokens": -1}, ValueError, "num_sink_tokens=-1"),
    (CompressedCache, (CONFIG,), {"format": "int8", "residual_length": 1.5}, TypeError, "residual_length"),
    (CompressedCache, (CONFIG,), {"format": "int8", "residual_length": True}, TypeError, "residual_length"),
    (CompressedCache, (CONFIG,), {"format": "int8", "skip_layers": [4]}, ValueError, "layers 0 to 3"),
    (CompressedCache, (CONFIG,), {"format": "int8", "skip_layers": 0}, TypeError, "skip_layers=0: expected a tuple"),
    (CompressedCache, (CONFIG,), {"format": "int8", "skip_layers": ["last"]}, ValueError, "'last'"),
    (CompressedCache, (), {"format": "int8", "skip_layers": [0]}, ValueError, "config"),
    (CompressedCache, (ODD,), {"format": "nvfp4"}, ValueError, "head_dim 100"),
    (
        CompressedCache,
        (CONFIG,),
        {"policy": "keydiff", "compile": True, "skip_layers": (0,)},
        NotImplementedError,
        "they store max_length tokens",
    ),
    (CompressedCache, (CONFIG,), {"format": "int8", "max_length": 0}, ValueError, "max_length=0"),
    (CompressedCache, (CONFIG,), {"format": "int8", "max_length": 3.5}, TypeError, "max_length"),
    (CompressedCache, (CONFIG,), {"format": "int8", "max_length": True}, TypeError, "max_length"),
    (QuantizedPerTokenCache, (CONFIG,), {"dtype": "int3"}, ValueError, "'int3'"),
    (QuantizedPerTokenCache, (CONFIG,), {"scale": "tensor"}, ValueError, "tensor"),
    (QuantizedPerTokenCache, (CONFIG,), {"scale": "token", "symmetric": False}, ValueError, "token_head"),
    (QuantizedPerTokenCache, (CONFIG,), {"dtype": "fp8", "symmetric": False}, ValueError, "no zero point"),
    (QuantizedPerTokenCache, (CONFIG,), {"dtype": "int4", "scale": "token"}, ValueError, "token_head"),
    (NVFP4Cache, (CONFIG,), {"scale_search": "best"}, ValueError, "best"),
    (QuantizedPerTokenCache, (CONFIG,), {"format": "int8"}, TypeError, "pass dtype= or scale="),
    (NVFP4Cache, (CONFIG,), {"format": "int8"}, TypeError, "pass scale_search= or center= in place of format='int8'"),
    (TurboQuantCache, (CONFIG,), {"format": "int8"}, TypeError, "pass preset="),
    (HadaQuantCache, (CONFIG,), {"format": "int8"}, TypeError, "pass key_bits= or value_bits="),
    (CompressedCache, (CONFIG,), {"format": "fp8", "symmetric": False}, TypeError, "symmetric=False: known are config, format"),
    (CompressedCache, (CONFIG,), {"format": "int8", "symmetric": False}, TypeError, "format=formats.Int8(symmetric=False)"),
    (CompressedCache, (CONFIG,), {"format": "int8", "residual_lenght": 3}, TypeError, "residual_lenght=3: did you mean 'residual_length'"),
    (NVFP4Cache, (CONFIG,), {"centre": True}, TypeError, "NVFP4Cache has no option centre=True: did you mean 'center'?"),
    (TurboQuantCache, (CONFIG,), {"preset": "2bit_nc"}, ValueError, "2bit_nc"),
    (TurboQuantCache, (CONFIG,), {"boundary_layers": -1}, ValueError, "boundary_layers=-1"),
    (TurboQuantCache, (), {"boundary_layers": 2}, ValueError, "config"),
    (TurboQuantCache, (CONFIG,), {"boundary_layers": 2}, ValueError, "4 full-attention layers (0, 1, 2, 3) compressed: the most is 1"),
    (TurboQuantCache, (CONFIG,), {"boundary_layers": 9}, ValueError, "boundary_layers=9"),
    (TurboQuantCache, (CONFIG,), {"boundary_layers": 1, "skip_layers": 0}, TypeError, "skip_layers=0: expected a tuple"),
]


@pytest.mark.parametrize(("kind", "args", "options", "error", "says"), WRONG)
def test_constructors_refuse(kind, args, options, error, says):
    with pytest.raises(error) as caught:
        kind(*args, **options)
    assert says in str(caught.value)


def test_boundary_layers_are_exact():
    cache = TurboQuantCache(CONFIG, boundary_layers=1)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicLayer", "CompressedLayer", "CompressedLayer", "DynamicLayer"]


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        (TurboQuantCache(CONFIG, skip_layers=[-1]), "layers=3 of 4 compressed, tokens=0"),
        (
            SinkCache(CONFIG),
            "policy=SinkWindow(window_length=1020, positions=cache), num_sink_tokens=4, residual_length=64, layers=4 of 4 evicting",
        ),
        (H2OCache(CONFIG, format="fp8", skip_layers=(0,)), "layers=3 of 4 compressed, 3 of 4 evicting, tokens=0"),
        (CompressedCache(CONFIG, format="identity"), "layers=0 of 4 compressed, tokens=0"),
    ],
    ids=["a format", "a policy", "both", "neither"],
)
def test_repr_counts_what_is_compressed(cache, says):
    assert says in repr(cache)


@pytest.mark.parametrize("length", [None, 40])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (torch.randn(2, 2, 1, 128), "batch_repeat_interleave"),
        (torch.randn(1, 3, 1, 128), "another model"),
        (torch.randn(1, 2, 1, 64), "another model"),
        (torch.randn(1, 2, 1, 128, dtype=torch.float64), "cast the model"),
    ],
    ids=["batch", "heads", "head_dim", "dtype"],
)
def test_other_tensors_are_refused(wrong, says, length):
    cache = NVFP4Cache(CONFIG, num_sink_tokens=1, residual_length=2, max_length=length)
    x = torch.randn(1, 2, 20, 128)
    for layer in range(4):
        cache.update(x, x, layer)
    before = repr(cache), [layer.dense()[0].clone() for layer in cache.layers]
    with pytest.raises(ValueError, match=rf"{says}.*reset\(\)"):
        cache.update(wrong, wrong, 0)
    assert repr(cache) == before[0]
    assert all(torch.equal(layer.dense()[0], kept) for layer, kept in zip(cache.layers, before[1], strict=True))


@pytest.mark.parametrize("length", [None, 40])
def test_a_model_with_more_layers_is_refused(length):
    network = model("llama")
    config = copy.copy(network.config)
    config.num_hidden_layers = 2
    cache = CompressedCache(config, format="int8", max_length=length)
    with pytest.raises(ValueError, match="layer 2 of a cache for 2 layers: it was made for another model"):
        network.generate(torch.randint(3, 90, (1, 8)), **passing(cache), max_new_tokens=3, disable_compile=True)


class Program(torch.nn.Module):
    """A model with a cache closed over, as torch.export takes it."""

    def __init__(self, network, cache):
        super().__init__()
        self.network, self.cache = network, cache

    def forward(self, ids):
        return self.network(ids, **passing(self.cache)).logits


@pytest.mark.parametrize("filled", [False, True])
def test_export_of_a_growing_cache_is_refused(filled):
    network, ids = model("llama"), torch.randint(3, 90, (1, 8))
    cache = CompressedCache(network.config, format="int8")
    with torch.no_grad():
        if filled:
            network(ids, **passing(cache))
        with pytest.raises(NotImplementedError, match=r"torch.export with a cache that grows: .* make the cache with max_length"):
            torch.export.export(Program(network, cache), (ids,))
    assert cache.get_seq_length() == 8 * filled


def test_a_program_with_a_cache_without_storage_is_refused():
    network, ids = model("llama"), torch.randint(3, 90, (1, 8))
    cache = CompressedCache(network.config, format="int8", max_length=40)
    with pytest.raises(NotImplementedError, match=r"torch.export.*early_initialization"):
        torch.export.export(Program(network, cache), (ids,))
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    with torch.no_grad():
        network(ids, **passing(cache))
        other = copy.deepcopy(cache)
        program = torch.export.export(Program(network, cache), (ids[:, :1],)).module()
        for token in (5, 6):  # it goes on with what the cache held, and with its own steps
            step = torch.tensor([[token]])
            torch.testing.assert_close(program(step), network(step, **passing(other)).logits, atol=1e-4, rtol=1e-4)
        del cache
        gc.collect()
        with pytest.raises(RuntimeError, match="compiled code was called whose cache is gone"):
            program(step)


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        *((rows, ValueError, r"one row or more, or call reset\(\)") for rows in ([], torch.tensor([]))),
        *((rows, TypeError, "batch_select_indices") for rows in (1, torch.tensor(1), [[0], [1]])),
    ],
)
def test_one_row_or_several_must_be_kept(rows, error, says):
    cache = CompressedCache(CONFIG, format="int8", skip_layers=(0,))
    for layer in range(4):
        cache.update(torch.randn(2, 2, 80, 128), torch.randn(2, 2, 80, 128), layer)
    with pytest.raises(error, match=says):
        cache.batch_select_indices(rows)
    assert [layer.keys.shape[0] if i == 0 else layer.rows for i, layer in enumerate(cache.layers)] == [2] * 4


@pytest.mark.parametrize("kind", [{"format": "int8"}, {"format": "int8", "max_length": 40}, {"policy": "h2o"}])
def test_a_cache_with_tokens_is_initialized(kind):
    """Some models ask the cache whether a step is the first."""
    cache = CompressedCache(CONFIG, **kind)
    assert not cache.is_initialized
    for layer in range(4):
        cache.update(torch.randn(2, 2, 3, 128), torch.randn(2, 2, 3, 128), layer)
    assert cache.is_initialized
    with pytest.raises(NotImplementedError, match=r"layer.dense\(\) of a layer in cache.layers"):
        list(cache)


def test_nothing_to_compress_is_said():
    for make in (NVFP4Cache, lambda config: CompressedCache(config, format="int8")):
        with pytest.warns(UserWarning, match="nothing will be compressed") as caught:
            make(model("mistral").config)
        assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"skip_layers=\(0, 1, 2, 3\) contains every full-attention layer: nothing will be compressed"):
        NVFP4Cache(CONFIG, skip_layers=range(4))


@pytest.mark.parametrize(("name", "inputs"), [("t5", torch.randint(3, 90, (1, 8))), ("whisper", torch.randn(1, 16, 60))])
def test_an_unwrapped_cache_on_an_encoder_decoder_is_refused(name, inputs):
    network = model(name)
    cache = CompressedCache(network.config, format="int8")
    with pytest.raises(ValueError, match=r"pass EncoderDecoderCache\(CompressedCache\(config, ...\), DynamicCache\(\)\)"):
        network.generate(inputs, **passing(cache), max_new_tokens=3)
    assert name == "t5" or cache.get_seq_length() == 0


def test_models_that_read_keys_themselves_are_refused():
    ids, says = torch.randint(3, 90, (1, 8)), r"Mllama, XLNet\) are not supported"
    network = XLNetLMHeadModel(XLNetConfig(vocab_size=100, d_model=64, n_layer=2, n_head=4, d_inner=64)).eval()
    # from 5.24 on transformers reads no cache there
    with contextlib.nullcontext() if CACHE_ARGUMENT == "cache" else pytest.raises(NotImplementedError, match=says):
        network.generate(ids, **passing(CompressedCache(network.config, format="int8")), max_new_tokens=3)
    size = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = MllamaTextConfig(**size, **rope, vocab_size=100, cross_attention_layers=[1, 3], pad_token_id=0)
    network, cache = MllamaForCausalLM(config).eval(), CompressedCache(config, format="int8")
    with pytest.raises(NotImplementedError, match=says), torch.no_grad():
        for states in (torch.randn(1, 5, 64), None):
            network(ids, cross_attention_states=states, **passing(cache))
