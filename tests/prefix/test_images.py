"""Prompts with images: entries end before the first, and positions of several axes are those of a whole prompt."""

import functools

import pytest
import torch
from families_models import build
from transformers import AutoConfig, DynamicCache, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from qkvcache import CompressedCache, PrefixStore, SinkCache, policies
from qkvcache.prefix.prompt import placeholders
from tests.reference import assert_close
from tests.seeds import SEED
from tests.tolerance import of_model

IMAGE, VIDEO, START = 97, 98, 96
ZONES = {"num_sink_tokens": 2, "residual_length": 4}


@functools.lru_cache
def network():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = Qwen2VLConfig(
        text_config=size | special | {"vocab_size": 100, "rope_parameters": rope, "initializer_range": 0.2},
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


def answer(given, past):
    """The logits of the steps of an answer."""
    found = network().generate(
        **given, past_key_values=past, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
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
        git(ids, past_key_values=past)
    assert not len(kept) and any("names no placeholder" in reason for reason in kept.stats.refused)


def test_placeholders_are_those_of_all_configs():
    config = AutoConfig.for_model("phi4_multimodal")
    assert {config.vision_config.image_token_id, config.audio_config.audio_token_id} <= placeholders(config)
    assert placeholders(network().config) == {IMAGE, VIDEO}
