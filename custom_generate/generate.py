"""`generate` with a compressed cache, for code that only passes options on:

model.generate(**inputs, custom_generate="path of this repository", trust_remote_code=True, format="turboquant_4bit_nc")
"""

from qkvcache import CompressedCache, policies
from qkvcache.attention import continued
from qkvcache.releases import passing

OPTIONS = ("num_sink_tokens", "residual_length", "skip_layers", "compile")
"""Options of CompressedCache that `generate` does not have itself."""


def generate(model, format=None, policy=None, budget=None, **options):
    """`model.generate` with a new `CompressedCache`, unless a cache is given as `cache` or `past_key_values`.

    Args:
        model: any decoder model of transformers.
        format: as CompressedCache takes it; by default 4 bits, or the model's dtype with a policy.
        policy: an eviction policy, or its registry name, and then with `budget`: tokens, or a share of them.
        **options: `num_sink_tokens`, `residual_length`, `skip_layers` and `compile` of CompressedCache, and all that `generate` takes.
    """
    of_cache = {name: options.pop(name) for name in OPTIONS if name in options}
    given = [options.pop(name, None) for name in ("cache", "past_key_values")]
    cache = next((one for one in given if one is not None), None)
    if cache is None:
        if format is None and policy is None:
            format = "turboquant_4bit_nc"
        if budget is not None:
            policy = policies.named(policy, budget=budget)
        cache = CompressedCache(model.config, format=format, policy=policy, **of_cache)
    stock = type(model).generate.__get__(model)
    return continued.generate(stock, model.generation_config, **passing(cache), **options)
