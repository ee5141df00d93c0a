"""Streams: the loss of every token, however the text is cut."""

import torch
from transformers import DynamicCache

from qkvcache import demo
from qkvcache.evaluation.quality import stream
from tests.reference import assert_close
from tests.tolerance import of_model


def test_chunks_do_not_change_the_loss():
    model, tokenizer = demo.load()
    ids = torch.tensor(demo.text_ids(tokenizer)[:202]).view(2, -1)
    whole, parts = (torch.cat(list(stream(model, DynamicCache(config=model.config), ids, n)), dim=1) for n in (100, 33))
    assert whole.shape == (2, 100)
    assert_close(whole, parts, of_model(model, 100))
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert_close(whole.mean(), loss, of_model(model, 100))
