"""Profiles of heads: shares of a context, budgets made of them, files; heads that look things up are found."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from qkvcache import CompressedCache, demo, policies, profile_heads
from qkvcache.cli import app
from qkvcache.evaluation.spec import CacheSpec
from qkvcache.policies import Budget, HeadProfile
from qkvcache.releases import passing
from tests import matrix
from tests.evict.test_kept import TEXTS, check
from tests.evict.test_kept import ZONES as LAYER_ZONES
from tests.matrix import covering

PROFILE = HeadProfile((((0.9, 0.8, 0.7, 0.6), (0.5, 0.1, 0.0, 0.0)), ((0.4, 0.3, 0.2, 0.1), (0.0, 0.0, 0.0, 0.0))))


@pytest.mark.parametrize(
    ("share", "wanted"),
    [(0.25, [[1, 0], [0, 0]]), (0.5, [[1, 0.25], [0.75, 0]]), (1.0, [[1, 1], [1, 1]]), (1e-6, [[0.25, 0], [0, 0]])],
)
def test_shares_are_those_above_one_score(share, wanted):
    assert PROFILE.shares(share) == wanted


@pytest.mark.parametrize("share", [0.05, 0.1, 0.33, 0.5, 0.77, 1.0])
def test_the_mean_of_shares_is_what_was_asked_for(share):
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(3, 4, 128, generator=generator).pow(5).sort(-1, descending=True).values
    profile = HeadProfile(tuple(tuple(tuple(head) for head in layer) for layer in scores.tolist()))
    shares = torch.tensor(profile.shares(share))
    assert shares.mean().item() == pytest.approx(share, abs=1 / 1000) and (shares <= 1).all()
    threshold = scores.flatten().sort(descending=True).values[round(share * scores.numel()) - 1]
    assert torch.equal(shares, (scores >= threshold).float().mean(-1))
    budgets = profile.budget(share)
    assert sum(budget.share for budget in budgets) == pytest.approx(share * 3, abs=3 / 1000)
    assert [budget.heads for budget in budgets] == [tuple(parts) for parts in profile.shares(share)]


def test_budgets_in_tokens():
    assert PROFILE.budget(100, share=0.5) == (Budget(125, heads=(1.0, 0.25)), Budget(75, heads=(0.75, 0.0)))
    assert PROFILE.budget(100) == PROFILE.budget(100, share=0.25) == (Budget(200, heads=(1.0, 0.0)), Budget(1, heads=(1.0, 1.0)))
    assert PROFILE.budget(0.25)[1].share < 1e-5, "a layer whose heads need nothing retains what is protected"


def test_a_layer_that_needs_little_retains_what_is_protected():
    """Of a budget in tokens and of one that is a share."""
    for budget in (PROFILE.budget(20, share=0.25), PROFILE.budget(0.02)):
        policy = policies.SnapKV(budget=budget, recent=8, interval=2)
        assert policy.size(policy.budgets[1], 1000) == 4 + 8 + 2


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: PROFILE.budget(0), ValueError, "budget=0: must be 1 or more tokens"),
        (lambda: PROFILE.budget(1.5), ValueError, "budget=1.5: must be 1 or more tokens"),
        (lambda: PROFILE.budget(True), TypeError, "got True"),
        (lambda: PROFILE.budget("all"), TypeError, "got 'all'"),
        (lambda: PROFILE.budget(0.5, share=0.2), ValueError, "leave out share"),
        (lambda: PROFILE.budget(100, share=0), ValueError, "share=0: must be above 0"),
        (lambda: PROFILE.shares(math.nan), ValueError, "share=nan"),
        (lambda: HeadProfile(()), ValueError, "quantiles must hold"),
        (lambda: HeadProfile((((1.0, 2.0), (1.0,)),)), ValueError, "quantiles must hold"),
        (lambda: policies.SnapKV(budget=Budget(100, heads=(-1.0, 2.0))), ValueError, "parts must be 0 or more"),
        (lambda: policies.SnapKV(budget=Budget(100, heads=(0.0, 0.0))), ValueError, "one of them above 0"),
        (lambda: policies.AdaKV(policies.SnapKV(budget=PROFILE.budget(200))), ValueError, "with Budget.heads"),
    ],
)
def test_what_is_no_budget(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_files(tmp_path):
    path = tmp_path / "heads.json"
    profile = HeadProfile(PROFILE.quantiles, {"model": "demo"})
    profile.save(path)
    read = HeadProfile.load(path)
    assert read == profile and read.about == {"model": "demo"}
    for text in ("", "[]", "{}", json.dumps({"quantiles": [[1.0]]}), json.dumps({"quantiles": [[["a", "b"]]]})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"heads.json' is no profile of heads: make one with `qkvcache profile-heads`"):
            HeadProfile.load(path)
    with pytest.raises(FileNotFoundError):
        HeadProfile.load(tmp_path / "none.json")


@torch.no_grad()
def test_heads_of_a_model_that_looks_things_up():
    """A profile of the embedded model depends little on the text, and its budgets keep what an equal budget for each head loses."""
    model, tokenizer = demo.load()
    ids = demo.text_ids(tokenizer)
    profile, other = (profile_heads(model, part, tokenizer=tokenizer, context=600, windows=1) for part in (ids[:4000], ids[20000:24000]))
    shares, of_other = torch.tensor(profile.shares(0.25)), torch.tensor(other.shares(0.25))
    assert shares.max() > 0.8 > 4 * shares.median(), "few heads need most of a context"
    assert torch.corrcoef(torch.stack([shares.flatten(), of_other.flatten()]))[0, 1] > 0.95
    prompt = torch.tensor([ids[8000:8500]])
    repeated = prompt[:, :200]
    losses = {}
    for name, budget in {"heads": profile.budget(0.25), "equal": 0.25}.items():
        cache = CompressedCache(model.config, format="identity", policy=policies.SnapKV(budget=budget, recent=32))
        model(prompt, **passing(cache))
        log_probs = model(repeated, **passing(cache)).logits.log_softmax(-1)
        losses[name] = -log_probs[:, 20:-1].gather(-1, repeated[:, 21:, None]).mean().item()
    assert losses["heads"] < losses["equal"] - 0.3, losses


OF_HEADS = {
    "snapkv": lambda budget: policies.SnapKV(budget=budget, interval=1, window_size=4, recent=3),
    "snapkv_interval": lambda budget: policies.SnapKV(budget=budget, interval=3, window_size=4, recent=2),
    "keydiff": lambda budget: policies.KeyDiff(budget=budget, recent=3),
}
"""Policies whose scores heads cannot compare, too."""


@pytest.mark.parametrize(("heads", "text", "name"), covering([(3.0, 1.0), (0.0, 1.0), (1.0, 1.0), (0.9, 0.1)], TEXTS, OF_HEADS))
def test_each_head_retains_its_part(name, text, heads):
    """Against a plain loop, in a cache without exact zones and in one with them."""
    for zones in ({}, LAYER_ZONES[0]):
        check(OF_HEADS[name](Budget(14, heads=heads)), TEXTS[text], **zones)


def test_the_command_and_evaluations(tmp_path):
    """On a CPU the model computes in fp32; lm-eval's model takes the file."""
    path = tmp_path / "demo.heads.json"

    def run(*arguments):
        return CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1"}).invoke(app, arguments)

    done = run("profile-heads", "demo", "--context", "200", "--windows", "1", "--device", "cpu", "--out", str(path))
    assert done.exit_code == 0 and f"head_profile={path}" in done.stdout, done.output
    profile = HeadProfile.load(path)
    assert (profile.about["dtype"], profile.about["model"]) == ("float32", "demo")
    assert [len(layer) for layer in profile.quantiles] == [2] * 5
    spec = CacheSpec(cache="int8", policy="snapkv", budget=0.25, recent=16, head_profile=str(path))
    assert spec.make(demo.load()[0].config).policy.budgets == profile.budget(0.25) and spec.name.endswith("25% by head")
    with pytest.raises(ValueError, match="divides a budget: pass budget"):
        CacheSpec(cache="int8", policy="snapkv", head_profile=str(path))
    refused = run("profile-heads", "demo", "--out", str(tmp_path / "heads.txt"))
    assert refused.exit_code == 2 and "must end with .json" in refused.output


def test_refusals():
    config = matrix.model("llama").config
    for options, error, match in (
        ({"max_length": 64}, NotImplementedError, "budgets of heads with max_length"),
        ({"compile": True}, NotImplementedError, "budgets of heads with compile=True"),
        ({"budget": Budget(15, heads=(1.0,) * 3)}, ValueError, "budgets for other heads than the 2 KV heads of llama"),
    ):
        policy = OF_HEADS["snapkv"](options.pop("budget", Budget(15, heads=(3.0, 1.0))))
        with pytest.raises(error, match=match):
            CompressedCache(config, policy=policy, **options)
    cache = CompressedCache(policy=OF_HEADS["snapkv"](Budget(15, heads=(1.0,) * 3)))
    with pytest.raises(ValueError, match=r"a budget for 3 heads: the keys \[1, 2, 5, 32\] have 2"):
        cache.update(torch.zeros(1, 2, 5, 32), torch.zeros(1, 2, 5, 32), 0)
    assert cache.get_seq_length() == 0


def test_profiles_of_models_without_full_attention():
    model = matrix.model("mistral")
    with pytest.raises(ValueError, match="no layer of mistral has full attention"):
        profile_heads(model, list(range(100)), context=64, windows=1)
    with pytest.raises(ValueError, match="need a longer text"):
        profile_heads(matrix.model("llama"), list(range(100)), context=64, windows=2)
