"""`Rope`: keys turned from one position to another, against the models' own rotary modules and against a rotation in fp64."""

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig

from qkvcache.attention.model_code import code_of
from qkvcache.evict.rope import Rope
from tests.seeds import SEED

B, H, T = 2, 3, 5
TINY = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=64, vocab_size=32)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
LINEAR = dict(rope_type="linear", factor=4.0)
HYBRID = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

# model_type, rope_parameters beside the theta, channels turned of 16, interleaved
MODELS = {
    "llama": ("llama", {}, 16, False),
    "llama3": ("llama", LLAMA3, 16, False),
    "yarn": ("llama", YARN, 16, False),
    "linear": ("llama", LINEAR, 16, False),
    "phi": ("phi", {"partial_rotary_factor": 0.5}, 8, False),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25}, 4, False),
    "gpt_neox": ("gpt_neox", {"partial_rotary_factor": 0.5}, 8, False),
    "gpt_neox_linear": ("gpt_neox", {**LINEAR, "partial_rotary_factor": 0.5}, 8, False),
    "glm": ("glm", {"partial_rotary_factor": 0.5}, 8, True),
    "cohere": ("cohere", {}, 16, True),
    "cohere_yarn": ("cohere", YARN, 16, True),
    "ernie4_5": ("ernie4_5", {}, 16, True),
    "qwen3": ("qwen3", {}, 16, False),
    "gpt_oss": ("gpt_oss", YARN, 16, False),
    "gemma3": ("gemma3_text", HYBRID, 16, False),
}
if "exaone" in CONFIG_MAPPING:  # from transformers 5.24 on, with the code of Llama
    MODELS["exaone"] = ("exaone", {}, 16, False)
every_model = pytest.mark.parametrize("name", MODELS)


def config_of(model_type: str, parameters: dict):
    nested = any(isinstance(value, dict) for value in parameters.values())
    layers = {"layer_types": ([*parameters] * 2)[:2]} if nested else {}
    config = CONFIG_MAPPING[model_type](**TINY, **layers, max_position_embeddings=256, head_dim=16)
    default = {} if nested else {"rope_type": "default", "rope_theta": 1e4}
    config.rope_parameters = copy.deepcopy({**default, **parameters})  # transformers fills them in
    return config


class Model:
    """What the code of the model does with keys."""

    def __init__(self, config):
        self.config = config
        self.module = code_of(config)
        self.rotary = next(k for n, k in vars(self.module).items() if n.endswith("RotaryEmbedding") and isinstance(k, type))(config)
        self.layer_type = ("full_attention",) if config.model_type == "gemma3_text" else ()

    def at(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rotary(keys, positions, *self.layer_type)
        channels = keys.shape[-1]
        if self.config.model_type in ("phi", "stablelm"):  # their attention cuts the keys
            channels = cos.shape[-1]
        turned = self.module.apply_rotary_pos_emb(keys[..., :channels], keys[..., :channels], cos, sin)[1]
        return torch.cat([turned, keys[..., channels:]], -1)


def model_of(name: str) -> Model:
    model_type, parameters, *_ = MODELS[name]
    return Model(config_of(model_type, parameters))


def exactly(keys: torch.Tensor, by: torch.Tensor, inv_freq: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair times exp(i angle), in fp64; `by` may be broadcast to `[B, T]`."""
    out, half = keys.double().clone(), len(inv_freq)
    for i in range(half):
        one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = (by.double() * inv_freq[i].double())[:, None].expand(keys.shape[:3])
        turned = torch.complex(keys[..., one].double(), keys[..., two].double()) * torch.polar(torch.ones_like(angle), angle)
        out[..., one], out[..., two] = turned.real, turned.imag
    return out


def random_keys(head_dim: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(B, H, T, head_dim, generator=torch.Generator().manual_seed(SEED + 1)).to(dtype)


@every_model
def test_channels_and_pairs_are_those_of_the_model(name):
    *_, channels, interleaved = MODELS[name]
    rope = Rope.of(model_of(name).config)
    assert (2 * len(rope.inv_freq), rope.interleaved) == (channels, interleaved)
    assert rope.inv_freq.device.type == "cpu"
    assert rope.inv_freq.dtype == torch.float32


@every_model
@pytest.mark.parametrize("gap, tolerance", [(1, 1e-5), (1000, 1e-4), (100_000, 2e-2)])  # the model's own angles are fp32
def test_keys_turn_as_the_model_turns_them(name, gap, tolerance):
    """And by far gaps as exactly as by near ones."""
    model, keys = model_of(name), random_keys()
    rope, positions = Rope.of(model.config), torch.arange(T).expand(B, T)
    # atol: the keys reach 4, and yarn stretches them
    torch.testing.assert_close(rope.rotate(model.at(keys, positions), gap), model.at(keys, positions + gap), rtol=0, atol=4 * tolerance)
    for by in (gap, 100 * gap, -gap):
        expected = exactly(keys, torch.full((B, 1), by), rope.inv_freq, rope.interleaved)
        torch.testing.assert_close(rope.rotate(keys, by).double(), expected, rtol=0, atol=2e-6)


def test_the_frequencies_are_those_of_the_papers():
    powers = 1e4 ** -(torch.arange(8, dtype=torch.float64) / 8)
    torch.testing.assert_close(Rope.of(config_of("llama", {})).inv_freq.double(), powers, rtol=1e-6, atol=0)
    torch.testing.assert_close(Rope.of(config_of("llama", LINEAR)).inv_freq.double(), powers / 4, rtol=1e-6, atol=0)
    scaled = Rope.of(config_of("llama", LLAMA3)).inv_freq.double() / powers
    torch.testing.assert_close(scaled[[0, -1]], torch.tensor([1, 1 / 8], dtype=torch.float64), rtol=1e-6, atol=0)
    full = 1e6 ** -(torch.arange(8, dtype=torch.float64) / 8) / 8
    torch.testing.assert_close(Rope.of(config_of("gemma3_text", HYBRID)).inv_freq.double(), full, rtol=1e-6, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channels, head_dim", [(16, 16), (8, 16), (2, 6)])
def test_each_row_and_each_token_may_turn_by_its_own(interleaved, channels, head_dim):
    rope, keys = Rope(1e4 ** -(torch.arange(0, channels, 2) / channels), interleaved), random_keys(head_dim)
    for by in (torch.tensor([0, 1234]), torch.tensor([[0, 1, 2, 77, 100_000], [5, 4, 3, 2, -1]]), torch.tensor(9)):
        turned = rope.rotate(keys, by)
        each = by[:, None] if by.dim() == 1 else by.expand(B, T)
        torch.testing.assert_close(turned.double(), exactly(keys, each, rope.inv_freq, interleaved), rtol=0, atol=2e-6)
        assert torch.equal(turned[..., channels:], keys[..., channels:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_rounded_once(dtype, interleaved):
    rope, keys = Rope(1e4 ** -(torch.arange(8) / 8), interleaved), random_keys(dtype=dtype)
    turned = rope.rotate(keys, 12_345)
    assert turned.dtype == dtype
    expected = exactly(keys, torch.full((B, 1), 12_345), rope.inv_freq, interleaved)
    error = (turned.double() - expected).abs()
    assert (error <= expected.abs() * torch.finfo(dtype).eps / 2 + (1e-12 if dtype == torch.float64 else 2e-6)).all()
    assert torch.equal(rope.rotate(keys, 0), keys)


def test_no_keys_and_gradients():
    rope = Rope.of(config_of("llama", {}))
    assert rope.rotate(torch.zeros(B, H, 0, 16), 3).shape == (B, H, 0, 16)
    with torch.inference_mode():
        made = Rope.of(config_of("llama", {}))
        made.rotate(random_keys(), 3)
    keys = random_keys().requires_grad_()
    made.rotate(keys, 3).square().sum().backward()  # a turn keeps the norm
    torch.testing.assert_close(keys.grad, 2 * keys.detach(), rtol=0, atol=1e-5)


def test_wherever_the_caller_makes_tensors():
    with torch.device("meta"):
        rope = Rope.of(config_of("llama", LLAMA3))
    assert rope.inv_freq.device.type == "cpu"


def test_a_config_class_of_the_user():
    class Mine(LlamaConfig):
        model_type = "mine"

    assert not Rope.of(Mine(**TINY)).interleaved


REFUSED = {
    "learned positions": (lambda: CONFIG_MAPPING["gpt2"](), "'gpt2' has no rope_parameters"),
    "alibi": (lambda: CONFIG_MAPPING["bloom"](), "'bloom' has no rope_parameters"),
    "dynamic": (lambda: config_of("llama", {"rope_type": "dynamic", "factor": 2.0}), "'dynamic'.*change with the length"),
    "longrope": (
        lambda: config_of("llama", {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}),
        "'longrope'.*change with the length",
    ),
    "multimodal sections": (lambda: config_of("llama", {"mrope_section": [2, 3, 3]}), "multimodal"),
    "multimodal model": (lambda: CONFIG_MAPPING["qwen3_vl_text"](), "multimodal"),
    "latent attention": (lambda: CONFIG_MAPPING["deepseek_v3"](), "latent attention"),
    "sliding layers only": (lambda: CONFIG_MAPPING["cohere2"](), "some layers only.*sliding_window is not None"),
    "some layers only": (lambda: CONFIG_MAPPING["smollm3"](), "some layers only.*use_rope"),
    "no full attention": (
        lambda: config_of("gemma3_text", {"sliding_attention": HYBRID["sliding_attention"]}),
        "none for 'full_attention'",
    ),
    "cross attention": (lambda: CONFIG_MAPPING["mllama_text_model"](), "some layers only.*CrossAttention"),
    "turned backward": (lambda: CONFIG_MAPPING["nanochat"](), "neither pairs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_turned_is_refused(case):
    make, message = REFUSED[case]
    with pytest.raises(NotImplementedError, match=message):
        Rope.of(make())


def test_keys_that_do_not_fit_are_refused():
    rope = Rope.of(config_of("llama", {}))
    with pytest.raises(ValueError, match="rotates 16 channels, the keys have 8"):
        rope.rotate(random_keys(8), 1)
    for by in (torch.zeros(B + 1), torch.zeros(B, T + 1), torch.zeros(B, 1, T)):
        with pytest.raises(ValueError, match="by has shape"):
            rope.rotate(random_keys(), by)
