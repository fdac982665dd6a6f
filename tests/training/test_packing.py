"""Packing: full, repeatable, and without one row seeing another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fewbits.host.attention import use_attention, used_attention
from fewbits.nn.segments import Segments
from fewbits.training.data.collator import Collator, count_trained
from fewbits.training.data.examples import Example
from fewbits.training.data.packing import SequenceDataset, pack
from fewbits.training.data.step_sampler import EpochSampler

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, **WINDOW},
    "qwen3": {},
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "phi3": {"sliding_window": 5},
}


def make_model(family, attention="sdpa"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **TINY, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():  # larger than the usual initial values, so that attention matters
            p.copy_(torch.randn_like(p) * 0.3)
    return model


def make_examples(lengths, seed=0):
    random = np.random.default_rng(seed)
    examples = []
    for row, length in enumerate(lengths, 1):
        trained = random.random(length) < 0.7
        trained[-1] = True
        examples.append(Example(random.integers(3, 96, length).astype(np.int32), trained, row))
    return examples


def loss_and_gradients(model, *batches):
    model.zero_grad()
    count = sum(count_trained(batch) for batch in batches)
    loss = 0
    for batch in batches:
        inputs = {k: v for k, v in batch.items() if k not in ("rows", "num_tokens")}
        part = model(**inputs, num_items_in_batch=count).loss
        part.backward()
        loss = loss + part.detach()
    return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# Gemma 2 caps the scores, which only eager attention does; of the others, one with each kind of mask.
CASES = [(f, "sdpa") for f in FAMILIES if f != "gemma2"] + [
    (f, "eager") for f in ("llama", "gemma2", "gemma3_text")
]


@pytest.mark.parametrize("family, attention", CASES)
def test_alone_padded_and_packed_rows_give_the_same_loss_and_gradients(family, attention):
    model = make_model(family, attention)
    examples = make_examples([9, 3, 14, 1 + 1, 7, 12])
    bins = pack([len(e) for e in examples], 24, seed=0)
    assert len(bins) == 2
    dataset = SequenceDataset(examples, bins)
    items = [dataset[i] for i in range(len(dataset))]
    count = sum(int(e.trained[1:].sum()) for e in examples)
    alone = [Collator(0)([[e]]) for e in examples]  # the reference: no other row, no padding
    want, gradients = loss_and_gradients(model, *alone)
    batches = (
        Collator(0)([[e] for e in examples]),
        Collator(0, packed=True)(items),
        Collator(0, packed=True, flatten=True)(items),
        Collator(0, packed=True, width=32)(items),
    )
    for by_fewbits in (False, True):
        if by_fewbits:
            assert "by fewbits" in str(use_attention(model))
        for batch in batches:
            assert count_trained(batch) == count
            assert batch["num_tokens"] == sum(map(len, examples))
            loss, own = loss_and_gradients(model, batch)
            # The model is in float64, but transformers takes the loss of float32 logits: 2**-24 for each.
            torch.testing.assert_close(loss, want, rtol=2**-22, atol=0)
            for name, gradient in gradients.items():
                # Eager attention takes its softmax in float32, as fewbits' does not for float64.
                close = 2**-18 if by_fewbits and attention == "eager" else 2**-20
                assert (own[name] - gradient).norm() <= close * gradient.norm(), name
    assert used_attention(model).taken == {"plain": len(batches)}


def test_the_comparison_can_fail():
    """With one run of positions the rows see each other, and the loss is another."""
    model = make_model("llama")
    examples = make_examples([9, 3, 12])
    batch = Collator(0, packed=True)([examples])
    want, _ = loss_and_gradients(model, batch)
    mixed = {**batch, "position_ids": torch.arange(24)[None]}
    assert abs(loss_and_gradients(model, mixed)[0] - want) > 1e-3


def test_fewbits_attention_goes_by_the_boundaries():
    model = make_model("llama")
    examples = make_examples([9, 3, 12])
    batch = Collator(0, packed=True)([examples])
    want, _ = loss_and_gradients(model, batch)
    use_attention(model)
    one = {**batch, **Segments.from_lengths([24]).keywords()}
    assert abs(loss_and_gradients(model, one)[0] - want) > 1e-3


def test_boundaries_and_positions_agree():
    """Also with padding, which is a row of its own; and they have few shapes."""
    shapes = set()
    for seed in range(40):
        lengths = np.random.default_rng(seed).integers(1, 30, 12).tolist()
        examples = make_examples(lengths, seed)
        bins = pack(lengths, 64, seed=seed)
        dataset = SequenceDataset(examples, bins)
        batch = Collator(0, packed=True, width=64)([dataset[0], dataset[-1 % len(dataset)]])
        assert batch["input_ids"].shape == (2, 64)
        told = Segments.from_keywords(batch, 128)
        assert told.bounds() == Segments.from_position_ids(batch["position_ids"]).bounds()
        shapes.add((len(told.cu_seqlens), told.max_seqlen))
    assert len(shapes) <= 3
    assert "cu_seq_lens_q" not in Collator(0, width=64)([[examples[0]]])
    assert Collator(0, width=64)([[examples[0]]])["input_ids"].shape == (1, len(examples[0]))


@pytest.mark.parametrize("seed", [0, 1])
def test_pack_fills_and_repeats(seed):
    lengths = np.random.default_rng(seed).integers(1, 100, 500).tolist()
    bins = pack(lengths, 128, seed=seed)
    assert sorted(i for group in bins for i in group) == list(range(500))
    sums = [sum(lengths[i] for i in group) for group in bins]
    assert max(sums) <= 128
    assert sum(sums) / (128 * len(bins)) > 0.97
    assert bins == pack(lengths, 128, seed=seed)
    assert bins != pack(lengths, 128, seed=seed + 1)


def test_pack_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="does not fit"):
        pack([3, 9], 8)


def test_padding_is_a_row_of_its_own():
    first, second = make_examples([3, 2])
    batch = Collator(0, packed=True, multiple_of=4)([[first, second], [second]])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert (batch["labels"][0, [0, 3, 5, 6, 7]] == -100).all()
    assert batch["rows"] == [[1, 2], [2]] and batch["num_tokens"] == 7


def test_the_order_depends_on_seed_and_epoch_only():
    sampler = EpochSampler(50, seed=3)
    first = list(sampler)
    torch.rand(3)
    assert list(sampler) == first and sorted(first) == list(range(50))
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(EpochSampler(50, seed=4)) != first


def test_batches_of_a_graph_differ_in_values_alone():
    examples = make_examples([5, 9, 3, 12, 7, 4, 10, 6, 2, 2, 2])
    bins = pack([len(e) for e in examples], 16)
    data = SequenceDataset(examples, bins)
    assert data.longest() == 16 and data.most_rows() == max(map(len, bins))
    collate = Collator(0, packed=True, width=16, segments=2 * (data.most_rows() + 1))
    plain = Collator(0, packed=True, width=16)
    shapes = set()
    for i in range(0, len(bins) - 1, 2):
        batch, other = (c([data[i], data[i + 1]]) for c in (collate, plain))
        shapes.add(
            tuple(
                (k, v.shape if torch.is_tensor(v) else v)
                for k, v in batch.items()
                if k != "rows" and k != "num_tokens"
            )
        )
        ends, expected = batch["cu_seq_lens_q"].tolist(), other["cu_seq_lens_q"].tolist()
        assert sorted(set(ends)) == sorted(set(expected)) and len(ends) == 2 * (data.most_rows() + 1) + 1
        assert batch["max_length_q"] == 16
    assert len(shapes) == 1
