"""Nothing that keys and values depend on goes unnoticed."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from qkvcache import CompressedCache, PrefixStore, demo
from qkvcache.prefix import identity
from qkvcache.prefix.identity import ModelIdentity
from qkvcache.releases import passing
from tests.prefix.made import fill, model, random_ids

IDS = random_ids(60)


def store(of, directory, **options) -> PrefixStore:
    return PrefixStore(of, **{"max_bytes": 2**24, "directory": directory} | options)


def other(**changes) -> LlamaForCausalLM:
    """A model with the same weights and another config."""
    changed = LlamaForCausalLM(type(model().config)(**model().config.to_dict() | changes)).eval()
    changed.load_state_dict(model().state_dict())
    return changed


def fine_tuned() -> LlamaForCausalLM:
    tuned = copy.deepcopy(model())
    with torch.no_grad():
        tuned.model.layers[1].self_attn.k_proj.weight.add_(1e-3)
    return tuned


@pytest.fixture
def filled(tmp_path):
    kept = store(model(), tmp_path)
    kept.store(IDS, fill(CompressedCache(model().config, format="int8"), IDS))
    return tmp_path


@pytest.mark.parametrize(
    "make",
    [
        lambda path: store(model(1), path),
        lambda path: store(fine_tuned(), path),
        lambda path: store(other(rope_parameters={"rope_type": "default", "rope_theta": 500.0}), path),
        lambda path: store(other(rms_norm_eps=1e-3), path),
        lambda path: store(copy.deepcopy(model()).bfloat16(), path),
        lambda path: store(model(), path, format="fp8"),
        lambda path: store(model(), path, residual_length=32),
        lambda path: store(model(), path, skip_layers=[0]),
        lambda path: store(model(), path, identity="another"),
        lambda path: store(model(), path, tokenizer=demo.load()[1]),
    ],
    ids=["weights", "fine-tuned", "rope", "config", "dtype", "format", "zones", "layers", "extra", "tokenizer"],
)
def test_what_differs_is_not_found(filled, make):
    assert store(copy.deepcopy(model()), filled).fetch(IDS).kind == "exact"
    assert make(filled).fetch(IDS).kind == "miss"
    assert store(model(), filled).fetch(IDS).kind == "exact"


def test_training_in_place_is_noticed():
    changing = copy.deepcopy(model())
    kept = PrefixStore(changing, max_bytes=2**24)
    cache = fill(CompressedCache(model().config, format="int8"), IDS)
    kept.store(IDS, cache)
    assert kept.fetch(IDS).kind == "exact"
    with torch.no_grad():
        changing.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    assert kept.fetch(IDS).kind == "miss"
    kept.store(IDS, cache)
    assert kept.fetch(IDS).kind == "exact" and len(kept) == 2


class Adapter(nn.Module):
    """What the store sees of a tuner layer of peft."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({name: nn.Linear(base.in_features, 2, bias=False) for name in ("one", "two")})
        self.active_adapter, self.merged_adapters, self.disable_adapters, self.scaling = ["one"], [], False, {"one": 1.0, "two": 1.0}


def test_each_adapter_has_entries_of_its_own():
    adapted = copy.deepcopy(model())
    layer = Adapter(adapted.model.layers[0].self_attn.q_proj)
    adapted.model.layers[0].self_attn.q_proj = layer
    name = ModelIdentity(adapted)
    names = {name.current()}
    for change in (
        {"active_adapter": ["two"]},
        {"disable_adapters": True},
        {"scaling": {"one": 0.5, "two": 1.0}},
        {"merged_adapters": ["two"]},
    ):
        vars(layer).update(change)
        names.add(name.current())
    assert len(names) == 5 and ModelIdentity(model()).current() not in names
    assert name.current() == name.current()


def test_asking_again_samples_no_weights(monkeypatch):
    name = ModelIdentity(model())
    monkeypatch.setattr("qkvcache.prefix.identity._samples", lambda model: 1 / 0)
    assert name.current() == name.name
    with pytest.raises(ZeroDivisionError):
        ModelIdentity(model())


def test_weights_that_are_not_in_memory_are_refused():
    with torch.device("meta"):
        empty = LlamaForCausalLM(model().config)
    with pytest.raises(ValueError, match="without offloading"):
        PrefixStore(empty, max_bytes=1)


def test_autocast_has_prefixes_of_its_own(filled):
    """Its keys and values have another dtype."""
    plain = ModelIdentity(model()).name
    with torch.autocast("cpu", torch.bfloat16):
        kept = store(model(), filled)
        assert kept.fetch(IDS).kind == "miss"
        with kept.reuse(IDS) as cache, torch.no_grad():
            model()(IDS[None], **passing(cache))
        assert kept.fetch(IDS).length and ModelIdentity(model()).name != plain
    assert ModelIdentity(model()).name == plain


def test_another_release_of_transformers_finds_nothing(filled, monkeypatch):
    """It may rotate keys otherwise, under the same config."""
    monkeypatch.setattr(identity.transformers, "__version__", "5.99.0")
    assert store(copy.deepcopy(model()), filled).fetch(IDS).kind == "miss"
