from __future__ import annotations

import math

import pytest
import torch

from fewbits.errors import BadInput
from fewbits.inference.evaluate import perplexity, plan_windows
from fewbits.models.fast import FastLanguageModel
from fewbits.models.packing.cache_choice import choose_cache


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 10, 11, 57])
@pytest.mark.parametrize(("content", "stride"), [(10, 10), (10, 9), (10, 3), (2, 1)])
@pytest.mark.parametrize("first", [0, 1])
def test_windows_score_every_token_once(num_tokens, content, stride, first):
    if first == 1 and stride == content:
        stride -= 1
    windows = list(plan_windows(num_tokens, content, stride, first=first))
    scored = [t for w in windows for t in range(w.first, w.end)]
    assert scored == list(range(first, num_tokens))
    for w in windows:
        assert w.end - w.begin <= content
        assert w.first - w.begin >= first  # something always stands before a scored token
    for w in windows[1:]:
        assert w.first - w.begin >= content - stride


def test_stories260k_gives_the_published_figure(stories260k, tinystories):
    result = perplexity(*stories260k, tinystories, window=512, max_tokens=40_000)
    assert result.tokens == 40_000
    assert result.perplexity == pytest.approx(4.276, abs=2e-3)
    assert result.bits_per_character == pytest.approx(1.000, abs=2e-3)


@pytest.mark.slow
def test_stories3m_gives_the_published_figure(stories3m, tinystories):
    result = perplexity(*stories3m, tinystories, window=512, max_tokens=20_000)
    assert result.perplexity == pytest.approx(4.929, abs=1e-3)
    assert result.nll == pytest.approx(1.595, abs=1e-3)
    assert result.window == 512
    assert result.stride == 511


def test_sliding_equals_one_token_at_a_time(stories260k, tinystories):
    """Against the definition: each token's probability given BOS and the tokens of its window."""
    model, tokenizer = stories260k
    result = perplexity(model, tokenizer, tinystories, window=16, stride=5, max_tokens=40, batch_size=3)
    ids = tokenizer(tinystories, add_special_tokens=False).input_ids[:40]
    total, begin = 0.0, 0
    for t in range(40):
        while t >= begin + 15:
            begin += 5
        context = torch.tensor([[tokenizer.bos_token_id, *ids[begin:t]]])
        with torch.no_grad():
            total -= model(context).logits[0, -1].log_softmax(-1)[ids[t]].item()
    # float32 sums in another order: 40 terms of relative error 1e-6
    assert result.nll * result.tokens == pytest.approx(total, rel=1e-5)
    assert result.tokens == 40


@pytest.mark.slow
def test_batching_and_more_context(stories260k, tinystories):
    def run(**options):
        return perplexity(*stories260k, tinystories, window=64, max_tokens=1000, **options)

    one, many = run(batch_size=1), run(batch_size=7)
    assert one.nll == pytest.approx(many.nll, rel=1e-5)
    assert run(stride=16).nll < one.nll  # each token then has at least 48 tokens before it


def test_without_bos_every_token_but_the_first_is_scored(stories260k, tinystories):
    model, tokenizer = stories260k

    class NoBos:
        bos_token_id = None
        is_fast = False
        decode = staticmethod(tokenizer.decode)

        def __call__(self, text, **options):
            options.pop("return_offsets_mapping")
            return tokenizer(text, **options)

    result = perplexity(model, NoBos(), tinystories, window=32, max_tokens=100)
    assert result.tokens == 99
    assert result.stride == 31
    with pytest.raises(BadInput, match="none to predict"):
        perplexity(model, NoBos(), "a", max_tokens=1)


def test_progress_and_mode(stories260k, tinystories):
    model, tokenizer = stories260k
    seen = []
    model.train()
    perplexity(
        model,
        tokenizer,
        tinystories,
        window=32,
        max_tokens=200,
        batch_size=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert model.training
    model.eval()
    assert seen[-1] == (200, 200)
    assert seen == sorted(seen)
    assert len(seen) == math.ceil(math.ceil(200 / 31) / 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, "predicts nothing"),
        ({"window": 513}, "context of 512"),
        ({"window": 16, "stride": 16}, "from 1 to 15"),
        ({"window": 16, "stride": 0}, "from 1 to 15"),
    ],
)
def test_bad_options(stories260k, options, message):
    with pytest.raises(BadInput, match=message):
        perplexity(*stories260k, "Once upon a time", **options)


def test_empty_text(stories260k):
    with pytest.raises(BadInput, match="0 tokens"):
        perplexity(*stories260k, "")


@pytest.mark.slow
def test_keys_and_values_in_few_bits(shared, tinystories):
    """Chosen on the model; eight bits change little, four more, and nothing packed nothing."""
    path = shared / "data/models/stories3m"
    model, tokenizer = FastLanguageModel.from_pretrained(path, load_in_4bit=False)
    found = {}
    for kind in ("bfloat16", {"newest": 1024}, "int8", "int4"):
        choose_cache(model, kind)
        result = perplexity(model, tokenizer, tinystories, max_tokens=399, window=400)
        found[str(kind)] = result
    plain, whole, int8, int4 = (one.nll for one in found.values())
    assert [one.kv_cache for one in found.values()] == [None, "int4", "int8", "int4"]
    assert whole == pytest.approx(plain, rel=1e-4)
    assert 0 < abs(int8 - plain) < 0.002 and abs(int8 - plain) < abs(int4 - plain) < 0.05
