"""A cache under code that lets none through."""

import transformers

from qkvcache import TurboQuantCache, attach, demo, detach


def test_text_generation():
    network, tokenizer = demo.load()
    write = transformers.pipeline("text-generation", model=network, tokenizer=tokenizer)
    made = []

    def factory(config):
        made.append(TurboQuantCache(config, num_sink_tokens=0, residual_length=0))
        return made[-1]

    def text() -> list[str]:
        out = write(["The old harbour", "Once"], max_new_tokens=8, do_sample=False, return_full_text=False)
        return [row[0]["generated_text"] for row in out]

    plain = text()
    with attach(write, factory) as model:
        assert model is network
        compressed = text()
    assert len(made) == 2 and all(cache.memory().codes for cache in made)  # the pipeline calls generate for each prompt
    assert all(compressed) and text() == plain
    assert len(made) == 2
    attach(write, factory)
    detach(write)
    assert text() == plain and len(made) == 2
