"""Prompts with images: what they show is compared, and positions of several axes are those of a whole prompt."""

import functools

import pytest
import torch
from families_models import build
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from qkvcache import CompressedCache, PrefixStore, SinkCache, policies
from qkvcache.prefix import remaining
from qkvcache.prefix.media import placeholders
from qkvcache.releases import passing
from tests.reference import assert_close
from tests.seeds import SEED
from tests.tolerance import of_model

IMAGE, VIDEO, START = 97, 98, 96
ZONES = {"num_sink_tokens": 2, "residual_length": 4}
SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


@functools.lru_cache
def network():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = Qwen2VLConfig(
        text_config=SIZE | special | {"vocab_size": 100, "rope_parameters": rope, "initializer_range": 0.2},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
    )  # fmt: skip
    torch.manual_seed(SEED)
    return Qwen2VLForConditionalGeneration(config).eval()


def prompt(text, image=None, after=6):
    """`text` `[1, T]`, and after it four tokens of an image and others."""
    draw = torch.Generator().manual_seed(SEED if image is None else image)
    more = torch.randint(3, 90, (1, after), generator=draw)
    if image is None:
        return {"input_ids": torch.cat([text, more], 1)}
    ids = torch.cat([text, torch.tensor([[IMAGE] * 4]), more], 1)
    patches = torch.randn(16, 3 * 2 * 4 * 4, generator=draw)
    kinds = (ids == IMAGE).int()
    return {"input_ids": ids, "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": kinds}


def words(count, seed=0):
    return torch.randint(3, 90, (1, count), generator=torch.Generator().manual_seed(seed))


def answer(given, past, model=None):
    """The logits of the steps of an answer."""
    found = (model or network()).generate(
        **given, **passing(past), max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    return torch.stack(found.logits)


@pytest.mark.parametrize("policy", [None, policies.SlidingWindow(window_length=64)], ids=["all tokens", "evicting"])
def test_prompts_with_images_go_on_from_the_text_before(policy):
    """Each of two prompts with the same ids sees its own image; a text is not at the positions of an earlier prompt's image."""
    kept, text = PrefixStore(network(), max_bytes=2**24, format="identity", policy=policy, **ZONES), words(30)
    for given, found in ((prompt(text, image=1), 0), (prompt(text, image=2), 30), (prompt(text), 30), (prompt(text, image=1), 30)):
        expected = answer(given, DynamicCache(config=network().config))
        answer(prompt(words(9), image=3), DynamicCache(config=network().config))  # the model remembers its positions
        before, deltas = kept.stats.tokens_reused, network().model.rope_deltas
        with kept.reuse(given["input_ids"]) as past:
            got = answer(given, past)
        assert kept.stats.tokens_reused - before == found and network().model.rope_deltas is deltas
        assert_close(got, expected, of_model(network()))


LLAMA = SIZE | {"vocab_size": 100, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 4}


@functools.lru_cache
def vision(kind):
    """A model with positions of several axes, of one, and with sliding windows and images whose tokens see each other."""
    torch.manual_seed(SEED)
    if kind == "qwen2_vl":
        return network()
    if kind == "llava":
        tower = CLIPVisionConfig(**TOWER | {"num_hidden_layers": 2}, image_size=8)
        llava = {"vision_config": tower, "text_config": LlamaConfig(**LLAMA), "image_token_index": IMAGE, "vision_feature_layer": -1}
        return LlavaForConditionalGeneration(LlavaConfig(**llava)).eval()
    text = LLAMA | {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    special = {"image_token_index": IMAGE, "boi_token_index": 95, "eoi_token_index": 96, "mm_tokens_per_image": 4}
    gemma = Gemma3Config(text_config=text, vision_config=TOWER | {"image_size": 16}, **special)
    return Gemma3ForConditionalGeneration(gemma).eval()


def shown(kind, *parts):
    """The inputs of texts, lists of ids, and images, numbers."""
    ids = torch.tensor([[token for part in parts for token in (part if isinstance(part, list) else [IMAGE] * 4)]])
    shape = {"qwen2_vl": (16, 96), "llava": (1, 3, 8, 8), "gemma3": (1, 3, 16, 16)}[kind]
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(part)) for part in parts if isinstance(part, int)]
    given = {"input_ids": ids, {"gemma3": "token_type_ids"}.get(kind, "mm_token_type_ids"): (ids == IMAGE).int()}
    if kind == "llava":
        del given["mm_token_type_ids"]
    grid = {"image_grid_thw": torch.tensor([[1, 4, 4]] * len(drawn))} if kind == "qwen2_vl" else {}
    return given | ({"pixel_values": torch.cat(drawn)} | grid if drawn else {})


A, B, C = (words(count, seed=count)[0].tolist() for count in (20, 6, 7))
ASKED = {
    "the first": ((A, 1, B), 0, 0),
    "again": ((A, 1, B), 29, 29),
    "another image": ((A, 2, B), 20, 16),
    "a second image": ((A, 1, B, 3, C), 30, 29),
    "the first image alone": ((A, 1, C), 24, 24),
    "another second image": ((A, 1, B, 4, C), 30, 29),
    "an image at the end": ((A, 1, B, 3), 30, 29),
    "no image": ((A, B), 20, 16),
}
"""Prompts in order, and how many tokens of each a store has: of layers that can be cut to any, and with checkpoints every 8."""


@pytest.mark.parametrize("kind", ["qwen2_vl", "llava", "gemma3"])
def test_prompts_with_images_match_as_far_as_they_show_the_same(kind, tmp_path):
    model = vision(kind)
    options = {"max_bytes": 2**24, "format": "identity", "checkpoint_interval": 8, "min_match_tokens": 8, **ZONES}
    kept = PrefixStore(model, directory=tmp_path, **options)
    for name, (parts, cuttable, with_checkpoints) in ASKED.items():
        given = shown(kind, *parts)
        expected, before = answer(given, DynamicCache(config=model.config), model), kept.stats.tokens_reused
        with kept.reuse(given) as past:
            found = kept.stats.tokens_reused - before
            got = answer(remaining(model, given, past), past, model)
        assert found == (with_checkpoints if kind == "gemma3" else cuttable), name
        assert_close(got, expected, of_model(model))
    other = PrefixStore(model, directory=tmp_path, **options)
    assert [other.fetch(shown(kind, A, image, B)).length for image in (1, 5)] == [29, ASKED["another image"][2 - (kind != "gemma3")]]


def test_images_of_one_run_of_placeholders_match_together():
    """LLaVA has no token between two images; their text is not told apart from other images' either."""
    model = vision("llava")
    kept, pair = PrefixStore(model, max_bytes=2**24, format="identity", min_match_tokens=8), shown("llava", A, 1, 2, B)
    past = CompressedCache(model.config, format="identity")
    answer(pair, past, model)
    kept.store(pair, past)
    given = [shown("llava", A, 1, 2, C), shown("llava", A, 1, 3, B), shown("llava", A, 1, B)]
    assert [kept.fetch(x).length for x in given] == [28, 20, 20]
    with pytest.raises(ValueError, match="ends within an image"):
        past.crop(24 - past.get_seq_length())
        remaining(model, pair, past)


def test_inputs_that_cannot_be_compared_are_refused():
    kept = PrefixStore(vision("llava"), max_bytes=2**24, format="identity")
    with pytest.raises(TypeError, match="return_tensors"):
        kept.fetch(shown("llava", A, 1) | {"pixel_values": ["a picture"]})
    with pytest.raises(ValueError, match="input_ids, got pixel_values"):
        kept.fetch({"pixel_values": torch.zeros(1)})
    two = {name: torch.cat([x, x]) for name, x in shown("llava", A, 1).items()}
    with pytest.raises(ValueError, match="2 rows with pixel_values: pass one row"):
        remaining(vision("llava"), two, CompressedCache(vision("llava").config, format="identity"))


BUDGETED = {
    "h2o": lambda tokens: policies.H2O(budget=tokens),
    "snapkv": lambda tokens: policies.SnapKV(budget=tokens),
    "keydiff": lambda tokens: policies.KeyDiff(budget=tokens),
    "sinks": lambda tokens: policies.SinkWindow(window_length=tokens - 4, positions="original"),
}


@pytest.mark.parametrize("policy", BUDGETED)
def test_policies_keep_the_positions_of_images(policy):
    """Keys carry the positions of three axes; evicted tokens move none of them."""
    given, long = prompt(words(31), image=1), prompt(words(31), image=1, after=40)
    expected, dense = (answer(x, DynamicCache(config=network().config)) for x in (given, long))
    few, many = (CompressedCache(network().config, policy=BUDGETED[policy](tokens)) for tokens in (24, 64))
    assert_close(answer(given, many), expected, of_model(network()))
    assert_close(answer(long, few)[0], dense[0], of_model(network()))
    assert few.stored_length(0) < few.get_seq_length()


def test_what_turns_keys_is_refused_with_the_reason():
    """A gap between positions of several axes is not one number."""
    for make in (lambda of: SinkCache(of, window_length=20), lambda of: CompressedCache(of, policy="expected_attention")):
        with pytest.raises(NotImplementedError, match="qwen2_vl_text' has multimodal RoPE"):
            make(network().config)


def test_models_whose_ids_do_not_show_images_are_not_stored():
    git = build("git")
    kept, ids = PrefixStore(git, max_bytes=2**22, format="identity"), words(30)
    with kept.reuse(ids) as past:
        git(ids, **passing(past))
    assert not len(kept) and any("names no placeholder" in reason for reason in kept.stats.refused)


def test_placeholders_are_those_of_all_configs():
    config = AutoConfig.for_model("phi4_multimodal")
    assert {config.vision_config.image_token_id, config.audio_config.audio_token_id} <= placeholders(config)
    assert placeholders(network().config) == {IMAGE, VIDEO}
