"""Requests of lm-eval, and its own model to compare with, for tests of `CacheLM`."""

import random

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from qkvcache import demo
from qkvcache.evaluation.model import CacheLM
from tests.matrix import model
from tests.seeds import SEED

TOKENIZER = demo.load()[1]
SHORT = {"num_sink_tokens": 2, "residual_length": 4}
"""Zones that leave most of a short context compressed."""


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


def token_requests(vocabulary: int = 100) -> list[tuple]:
    """Contexts of three lengths with one to three choices of one to five tokens; one token of context; one that is asked twice."""
    rng = random.Random(SEED)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(count)]

    found = []
    for length, choices in ((40, 3), (40, 2), (57, 1), (90, 3), (40, 1)):
        context = ids(length)
        found += [(None, context, ids(1 + (length + choice) % 5)) for choice in range(choices)]
    found += [(None, ids(1), ids(70)), (None, ids(1), ids(1)), found[0]]
    rng.shuffle(found)
    return found


def plain(name: str = "llama", batch_size: int = 1, **options) -> HFLM:
    return HFLM(model(name), tokenizer=TOKENIZER, batch_size=batch_size, logits_cache=False, **options)


def cached(name: str = "llama", batch_size: int = 1, **options) -> CacheLM:
    return CacheLM(model(name), tokenizer=TOKENIZER, batch_size=batch_size, **options)


def score(lm: HFLM, requests: list[tuple] | None = None) -> torch.Tensor:
    """Log-probability of each request, and whether it is the likeliest."""
    return torch.tensor(
        [[float(x) for x in answer] for answer in lm._loglikelihood_tokens(requests or token_requests(), disable_tqdm=True)]
    )
