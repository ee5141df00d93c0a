"""`CacheLM` scores as lm-eval's `hf` does where the cache is exact, and as the cache does where it is not."""

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM

from qkvcache import demo, formats
from qkvcache.evaluation.model import CacheLM
from qkvcache.evaluation.spec import CacheSpec
from qkvcache.policies import REGISTRY, AdaKV, SnapKV
from qkvcache.releases import passing
from tests.evaluation.asked import SHORT, TOKENIZER, cached, instances, plain, score, token_requests
from tests.matrix import covering, model, slowly

SCORINGS = ("cached", "deployed")
PROMPTS = [("One two three four five six seven eight nine ten " * n + "go", {"until": ["."], "max_gen_toks": 6}) for n in (4, 2, 4, 1)]


DENSE = slowly(["llama", "gemma3", "qwen3_next", "gpt2", "mistral", "gemma4"], {"llama", "gemma3", "qwen3_next"})


@pytest.mark.parametrize(("name", "scoring"), covering(DENSE, SCORINGS, strength=1))
def test_a_dense_cache_is_plain_hf(name, scoring):
    expected = score(plain(name, batch_size=4))
    for batch_size, chunk in ((1, 1), (7, 32)):
        got = score(cached(name, batch_size, scoring=scoring, chunk=chunk))
        assert torch.equal(got[:, 1], expected[:, 1])
        torch.testing.assert_close(got[:, 0], expected[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_dense_cache_answers_as_plain_transformers(scoring):
    network, _ = demo.load()
    rolling = instances("loglikelihood_rolling", [(demo.text()[9000:9500],), ("A short one.",)])
    asked = instances("generate_until", PROMPTS)
    pairs = instances("loglikelihood", [("", "Hello there"), ("The cat sat on the ", "mat"), ("The cat sat on the", " dog")])
    lms = [HFLM(network, tokenizer=TOKENIZER, batch_size=3), CacheLM(network, tokenizer=TOKENIZER, batch_size=3, scoring=scoring)]
    for kind, requests in (("loglikelihood_rolling", rolling), ("loglikelihood", pairs)):
        expected, got = (torch.tensor(getattr(lm, kind)(requests, disable_tqdm=True)) for lm in lms)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    expected, got = (lm.generate_until(asked, disable_tqdm=True) for lm in lms)
    assert got == expected and len(set(got)) > 1


MIXTURES = [(format, None) for format in formats.REGISTRY] + [
    ("fp8", name) for name, policy in REGISTRY.items() if not policy.second_reading
]


SOME = slowly(MIXTURES, {("int8", None), ("turboquant_3bit_nc", None), ("fp8", "h2o")})


@pytest.mark.parametrize(("mixture", "scoring"), covering(SOME, SCORINGS, strength=1))
def test_the_batch_size_changes_nothing(mixture, scoring):
    format, policy = mixture
    options = {"cache": format, "policy": policy, "budget": policy and 20, "scoring": scoring} | SHORT
    if policy == "expected_attention":  # whose default protects more recent tokens
        options |= {"recent": 4}
    one, seven = (score(cached(batch_size=batch, **options)) for batch in (1, 7))
    torch.testing.assert_close(one, seven, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "chunk"),
    [({"cache": "turboquant_3bit_nc"}, 1), ({"cache": "int8", "policy": "h2o", "budget": 20}, 3), ({"cache": "nvfp4"}, 3)],
)
def test_scores_are_those_of_reading_on_through_the_cache(options, chunk):
    network, requests = model("llama"), token_requests()
    got = score(cached(chunk=chunk, **options, **SHORT))  # the shapes of below: rounding turns no code
    for (_, context, continuation), (log_prob, likeliest) in zip(requests, got.tolist(), strict=True):
        cache = CacheSpec(**options, **SHORT).make(network.config)
        ids = torch.tensor([context + continuation])
        with torch.no_grad():
            if len(context) > 1:
                network(ids[:, : len(context) - 1], **passing(cache))
            steps = ids[:, len(context) - 1 : -1].split(chunk, dim=1)
            # Beside longer continuations, a last step of one token has padding after it.
            padded = [F.pad(step, (0, int(step.shape[1] == 1 < chunk))) for step in steps]
            logits = torch.cat([network(step, **passing(cache)).logits for step in padded], dim=1)[:, : len(continuation)]
        expected = logits.log_softmax(-1).gather(-1, ids[:, len(context) :, None]).sum()
        assert log_prob == pytest.approx(expected.item(), abs=1e-4)
        assert likeliest == (logits.argmax(-1) == ids[:, len(context) :]).all()


def test_tokens_of_an_answer_go_through_the_cache():
    requests = [(None, context, continuation[:1]) for _, context, continuation in token_requests() if len(context) > 1]
    dense = score(plain(), requests)
    coarse = {"cache": "turboquant_3bit_nc", "num_sink_tokens": 0, "residual_length": 0}
    assert (score(cached(**coarse), requests) - dense)[:, 0].abs().min() > 1e-4
    torch.testing.assert_close(score(cached(**coarse, scoring="deployed"), requests), dense, atol=1e-5, rtol=1e-5)
    longer = [(None, context, continuation + continuation) for _, context, continuation in requests]
    assert (score(cached(**coarse, scoring="deployed"), longer) - score(plain(), longer))[:, 0].abs().max() > 1e-2


def test_contexts_that_are_too_long_are_cut_from_the_left():
    requests = token_requests()
    expected = score(plain(max_length=30), [r for r in requests if len(r[2]) <= 30])
    got = score(cached(max_length=30), [r for r in requests if len(r[2]) <= 30])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("request_", [([3], [4] * 31), ([3] * 9, [4] * 40), ([3, 4], []), ([], [3, 4])])
def test_requests_without_a_score_are_refused_at_first(request_):
    lm = cached(max_length=30)
    with mock.patch.object(lm, "_forward") as forward, pytest.raises(ValueError) as refused:
        score(lm, [(None, [3] * 5, [4] * 30), (None, *request_)])
    lengths = [f"{len(ids)}" for ids in request_]
    assert re.findall(r"\d+", str(refused.value)) == ["1", *lengths, "30"] and not forward.called


@pytest.mark.parametrize("policy", [None, "h2o"])
def test_answers_are_those_of_generate_with_a_read_prompt(policy):
    options = {"cache": "turboquant_3bit_nc", "policy": policy, "budget": policy and 20, **SHORT}
    network, _ = demo.load()
    lm = CacheLM(network, tokenizer=TOKENIZER, batch_size=4, **options)
    got = lm.generate_until(instances("generate_until", PROMPTS), disable_tqdm=True)
    for (prompt, _), answer in zip(PROMPTS, got, strict=True):
        ids = TOKENIZER(prompt, return_tensors="pt")["input_ids"]
        cache = lm.new_cache()
        with torch.no_grad():
            network(ids[:, :-1], **passing(cache))
        out = network.generate(ids, **passing(cache), max_new_tokens=6, do_sample=False)
        assert answer == TOKENIZER.decode(out[0, ids.shape[1] :], skip_special_tokens=True).split(".")[0]


def test_tokens_after_compress_before_do_not_see_evicted_ones():
    """A window that holds the question alone: with the fact gone it cannot be told, and a dense cache tells it."""
    network, _ = demo.load()
    text = " ".join(demo.text()[5000:5600].split())
    prompt = f"The code word of Anna is 48213. {text}\n\nWhat is the code word of Anna? The code word of Anna is"
    asked = instances("generate_until", [(prompt, {"until": ["."], "max_gen_toks": 6, "compress_before": "What is the code word"})])
    seen = {}

    def answer(**options) -> str:
        lm = CacheLM(network, tokenizer=TOKENIZER, **options)
        forward = lm._forward
        lm._forward = lambda ids, *rest, **more: (seen.update(prefix=TOKENIZER.decode(ids[0])), forward(ids, *rest, **more))[1]
        return lm.generate_until(asked, disable_tqdm=True)[0]

    assert answer(cache="int8") == " 48213" == answer()
    assert seen["prefix"].endswith(text[-20:]) or text[-10:] in seen["prefix"][-14:]
    assert "48213" not in answer(cache="identity", policy="sliding_window", budget=64)
    lm = cached(cache="int8")
    with pytest.raises(ValueError, match="compress_before='nowhere' is not in the prompt"):
        lm.generate_until(
            instances("generate_until", [("some words", {"until": ["."], "max_gen_toks": 6, "compress_before": "nowhere"})]), True
        )


def test_answers_of_two_formats_in_one_file_are_kept_apart(tmp_path):
    file = str(tmp_path / "answers.db")
    asked = instances("loglikelihood", [("One two three four five six seven eight", " nine ten"), ("One two", " three")])
    network, _ = demo.load()

    def answers(kind=CacheLM, **options) -> tuple[list, bool]:
        """With whether they were computed."""
        caching = CachingLM(lm := kind(network, tokenizer=TOKENIZER, **options), file)
        with mock.patch.object(lm, "_loglikelihood_tokens", wraps=lm._loglikelihood_tokens) as computing:
            found = caching.loglikelihood(asked)
        caching.dbdict.close()
        return found, computing.called

    coarse = {"cache": "turboquant_3bit_nc", "num_sink_tokens": 0, "residual_length": 0}
    others = [{}, {"cache": "dynamic"}, coarse | {"scoring": "deployed"}, coarse | {"num_sink_tokens": 4}, {"kind": HFLM}]
    first, _ = answers(**coarse)
    for options in others:
        found, computed = answers(**options)
        assert computed == (options != {"cache": "dynamic"}) and found != first
    assert answers(**coarse) == (first, False)
    assert not answers(kind=HFLM)[1]
    assert answers(**coarse, max_length=60)[1]  # an option of lm-eval's own model


def test_the_results_say_what_was_measured():
    lm = cached(batch_size=2, cache="int8", policy="h2o", budget=20, **SHORT | {"num_sink_tokens": 0})
    assert "kv_ratio" not in lm.get_model_info()
    score(lm)
    info = lm.get_model_info()
    named = {"kv_cache": "int8", "kv_policy": "h2o", "kv_budget": 20, "kv_scoring": "cached", "kv_chunk": 32, "kv_dtype": "float32"}
    assert named.items() <= info.items()
    assert info["kv_ratio"] > 2.3 and info["kv_bytes_per_token"] * info["kv_ratio"] == pytest.approx(3 * 2 * 2 * 32 * 4)
    dense = cached()
    score(dense)
    assert dense.get_model_info()["kv_ratio"] == 1


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"cache": "int9"}, ValueError, "int9"),
        ({"cache": None}, TypeError, "expected 'dynamic'"),
        ({"cache": "int8", "budget": 9}, ValueError, "budget without a policy"),
        ({"cache": "int8", "recent": 8}, ValueError, "recent without a policy"),
        ({"cache": "int8", "policy": "adakv_keydiff"}, ValueError, "the scores of KeyDiff are not attention weights"),
        ({"policy": "h2o"}, ValueError, "cache='identity'"),
        ({"cache": "int8", "policy": "h3o"}, ValueError, "h3o"),
        ({"scoring": "fast"}, ValueError, "scoring='fast'"),
        ({"chunk": 0}, ValueError, "chunk=0"),
        ({"batch_size": "auto"}, ValueError, "batch_size='auto': is found by trying"),
        ({"batch_size": "auto:4"}, ValueError, "batch_size='auto:4': is found by trying"),
        ({"device": "cuda:99"}, ValueError, "device='cuda:99' is not on this machine"),
        ({"batch_size": 0}, ValueError, "batch_size=0: must be 1 or more rows"),
        ({"batch_size": "-3"}, ValueError, "batch_size=-3: must be 1 or more rows"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be a number of rows, got 2.0"),
        ({"batch_size": "many"}, TypeError, "batch_size must be a number of rows, got 'many'"),
        ({"cache": "int8", "policy": "sink_window", "num_sink_tokens": -1}, ValueError, "num_sink_tokens=-1"),
        ({"residual_length": 0}, ValueError, "takes no residual_length"),
        ({"cache": "int8", "num_sink_tokens": -5}, ValueError, "num_sink_tokens=-5"),
        ({"cache": "int8", "residual_lenght": 0}, TypeError, "did you mean 'residual_length'"),
    ],
)
def test_wrong_input_is_explained(options, error, says):
    with pytest.raises(error, match=says):
        cached(**options)
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        cached("t5", backend="seq2seq")


def test_beams_need_a_cache_of_the_whole_prompt():
    asked = instances("generate_until", [("One two three", {"until": ["."], "max_gen_toks": 4, "num_beams": 2})])
    network, _ = demo.load()
    with pytest.raises(NotImplementedError, match="deployed"):
        CacheLM(network, tokenizer=TOKENIZER, cache="int8").generate_until(asked, disable_tqdm=True)
    lm = CacheLM(network, tokenizer=TOKENIZER, cache="int8", scoring="deployed")
    assert lm.generate_until(asked, disable_tqdm=True)[0]


def test_policies_by_name_take_their_options():
    for name in ("h2o", "tova", "sink_window", "keydiff"):
        spec = CacheSpec(cache="fp8", policy=name, budget=40)
        assert spec.make(model("llama").config).policy.budgets[0].tokens == (44 if name == "sink_window" else 40)
    assert CacheSpec(cache="fp8", policy="h2o", budget=0.5).name == "fp8 + h2o 50%"
    spec = CacheSpec(cache="fp8", policy="adakv_snapkv", budget=40)
    assert spec.make(model("llama").config).policy == AdaKV(SnapKV(budget=40)) and spec.name == "fp8 + adakv_snapkv 40"
    assert CacheSpec().make(model("llama").config).__class__.__name__ == "DynamicCache"


def test_an_attention_budget_holds_for_each_scored_token():
    lm = cached(cache="int8", attention_budget=0.125)
    assert lm.chunk == 1 and lm.new_cache().attention_budget == 0.125 and lm.spec.name == "int8 reading 12%"
    made = CacheSpec(cache="turboquant_4bit_nc", attention_budget=64, offload_pages=True).make(model("llama").config)
    assert made.attention_budget == 64 and made.offload_pages
    with pytest.raises(ValueError, match="takes no attention_budget"):
        cached(cache="dynamic", attention_budget=64)
