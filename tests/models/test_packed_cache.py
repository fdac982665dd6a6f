"""transformers' cache in few bits: what a model's forward and ``generate`` make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fewbits.errors import BadInput, Unsupported
from fewbits.formats.kv_cache import KVCache
from fewbits.models.generation.packed_cache import PackedCache, PackedLayer
from tests.models.tiny import tiny, tokens

SMALL = KVCache(newest=8, first=2)


def logits_with(model: Any, ids: Tensor, cache: Any, prompt: int = 10) -> Tensor:
    """Logits of all tokens behind the prompt, one at a time."""
    with torch.no_grad():
        out = [model(ids[:, :prompt], past_key_values=cache, use_cache=True).logits[:, -1]]
        for n in range(prompt, ids.shape[1]):
            out.append(model(ids[:, n : n + 1], past_key_values=cache, use_cache=True).logits[:, -1])
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_logits_stay_near_those_of_a_plain_cache(family: str) -> None:
    """Eight bits nearer than four; nothing packed: the same to the bit."""
    model, ids = tiny(family), tokens(2, 60)
    need = logits_with(model, ids, DynamicCache(config=model.config))
    apart = {}
    for kind in (KVCache(keys="int8", values="int8", newest=8), SMALL):
        cache = PackedCache(model.config, kind)
        got = logits_with(model, ids, cache)
        assert cache.get_seq_length() == 60
        apart[kind.name] = float((got - need).norm() / need.norm())
    assert 0 < apart["int8"] < 0.02 and apart["int8"] < apart["int4"] < 0.3
    whole = PackedCache(model.config, KVCache(newest=64))
    assert torch.equal(logits_with(model, ids, whole), need)


def test_where_a_prompt_is_cut_changes_only_what_its_own_tokens_see() -> None:
    """The cache after 40 tokens is the same whether they came at once or one by one."""
    layers = [PackedLayer(SMALL) for _ in range(2)]
    keys, values = torch.randn(2, 2, 2, 40, 16)
    layers[0].update(keys, values)
    for n in range(40):
        seen, _ = layers[1].update(keys[:, :, n : n + 1], values[:, :, n : n + 1])
        assert seen.shape[2] == n + 1
        assert torch.equal(seen[:, :, :2], keys[:, :, : min(n + 1, 2)])
        assert torch.equal(seen[:, :, -8:], keys[:, :, : n + 1][:, :, -8:])
    for which in ("keys", "values"):
        for name, tensor in layers[0].heads[which].tensors().items():
            assert torch.equal(tensor, layers[1].heads[which].tensors()[name]), name
    seen, _ = layers[0].update(keys[:, :, :1], values[:, :, :1])
    assert not torch.equal(seen[:, :, 2:32], keys[:, :, 2:32])
    torch.testing.assert_close(seen[:, :, :40], keys, rtol=0, atol=0.4)


def test_padding_moves_the_first_tokens() -> None:
    """A padded row's cache is that of the row alone."""
    keys, values = torch.randn(2, 2, 2, 30, 16)
    padded = PackedLayer(SMALL, torch.tensor([0, 5]))
    alone = PackedLayer(SMALL)
    padded.update(keys[:, :, :12], values[:, :, :12])
    alone.update(keys[1:, :, 5:12], values[1:, :, 5:12])
    for n in range(12, 30):
        new = slice(n, n + 1)
        seen = padded.update(keys[:, :, new], values[:, :, new])
        own = alone.update(keys[1:, :, new], values[1:, :, new])
        for mine, theirs in zip(seen, own, strict=True):
            assert torch.equal(mine[1:, :, 5:], theirs)


@pytest.mark.parametrize("padding", [None, torch.tensor([0, 1])])
def test_what_search_and_speculation_do_to_it(padding: Tensor | None) -> None:
    layer = PackedLayer(SMALL, padding)
    keys, values = torch.randn(2, 2, 2, 30, 16)
    layer.update(keys, values)
    before, _ = layer.update(keys[:, :, :0], values[:, :, :0])
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([3, 0, 0, 2]))
    after, _ = layer.update(keys[:, :, :0].repeat(2, 1, 1, 1), values[:, :, :0].repeat(2, 1, 1, 1))
    assert torch.equal(after, before[[1, 0, 0, 1]])
    layer.batch_select_indices(torch.tensor([0, 1]))
    for cut in (3, 15):
        layer.crop(-cut)
    assert layer.get_seq_length() == 12 and layer.get_mask_sizes(1) == (13, 0)
    short, _ = layer.update(keys[:, :, :1], values[:, :, :1])
    assert torch.equal(short[:, :, :12], before[[1, 0]][:, :, :12])
    layer.crop(12)  # so many stay, in the words of transformers 5.0
    assert layer.get_seq_length() == 12
    layer.reset()
    assert layer.get_seq_length() == 0
    assert layer.update(keys, values)[0].shape[2] == 30


def test_generate_takes_it() -> None:
    """Greedy, several beams, several answers, an assistant; sliding layers stay transformers' own."""
    model, ids = tiny("llama"), tokens(2, 20)
    model.generation_config.eos_token_id = None
    common: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    plain = model.generate(ids, **common)
    whole = model.generate(ids, **common, past_key_values=PackedCache(model.config, KVCache(newest=64)))
    assert torch.equal(whole, plain)
    for more in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        cache = PackedCache(model.config, SMALL)
        out = model.generate(ids, **{**common, **more}, past_key_values=cache)
        assert out.shape[1] == 40 and cache.get_seq_length() == 39
    cache = PackedCache(model.config, SMALL)
    out = model.generate(ids[:1], **common, past_key_values=cache, prompt_lookup_num_tokens=4)
    assert out.shape[1] == 40
    layers = PackedCache(tiny("gemma2").config, SMALL).layers
    assert [type(layer).__name__ for layer in layers] == ["DynamicSlidingWindowLayer", "PackedLayer"]


def test_a_prefix_for_a_batch() -> None:
    model, ids = tiny("llama"), tokens(1, 30)
    prefix = PackedCache(model.config, SMALL)
    with torch.no_grad():
        model(ids, past_key_values=prefix)
        more = tokens(3, 5, seed=4)
        shared = prefix.for_batch(3)
        together = model(more, past_key_values=shared).logits
        for row in range(3):
            one = model(more[row : row + 1], past_key_values=prefix.for_batch(1)).logits
            torch.testing.assert_close(together[row], one[0], rtol=1e-4, atol=1e-4)
    assert prefix.get_seq_length() == 30 and shared.get_seq_length() == 35
    with pytest.raises(BadInput, match="a prefix for a batch is one sequence"):
        shared.for_batch(2)


def test_it_is_as_small_as_counted() -> None:
    model, kind = tiny("llama"), KVCache(newest=8, first=2)
    cache = PackedCache(model.config, kind)
    with torch.no_grad():
        model(tokens(3, 100), past_key_values=cache)
    # float32 here: what is kept as it is takes twice the 16 bits that are counted
    exact = 2 * 2 * 16 * (8 + 2) * 2 * 2 * 3
    assert cache.nbytes == 2 * 2 * kind.nbytes(100, 16, sequences=3) + exact


def test_models_that_cannot_have_it() -> None:
    with pytest.raises(Unsupported, match=r"no layer of mistral attends to all .* \(sliding_attention\)"):
        PackedCache(tiny("mistral").config, "int4")
    with pytest.raises(Unsupported, match="heads of 12 values do not divide"):
        PackedCache(tiny("llama", head_dim=12).config, "int4")
    with pytest.raises(BadInput, match="no key/value cache in 'q4'"):
        PackedCache(tiny("llama").config, "q4")
