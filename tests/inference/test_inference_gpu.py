"""Evaluation and generation on a GPU agree with the CPU; the GPU's generator is left alone."""

from __future__ import annotations

import pytest
import torch

from fewbits.inference.evaluate import perplexity
from fewbits.inference.generate import Sampling, generate

pytestmark = pytest.mark.gpu


class Letters:
    """A tokenizer of characters, so that no file is needed."""

    bos_token_id, eos_token_id, pad_token_id, is_fast = 1, None, 0, False

    def __call__(self, text, **options):
        return {
            "input_ids": [1] * bool(options.get("add_special_tokens", True))
            + [ord(c) % 250 + 2 for c in text]
        }

    def decode(self, ids, **options):
        return "".join(chr(i % 26 + 97) for i in ids if i > 1)


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    return LlamaForCausalLM(config).eval()


def test_perplexity_is_the_cpu_s(model):
    text = "the quick brown fox jumps over the lazy dog, and again. " * 10
    here = perplexity(model.cpu(), Letters(), text, window=64, stride=40)
    there = perplexity(model.cuda(), Letters(), text, window=64, stride=40)
    # float32 sums in another order; TF32 products, should torch allow them, have 2**-11 relative error each
    assert there.nll == pytest.approx(here.nll, rel=2e-3)
    assert there.tokens == here.tokens == len(text)


def test_a_seed_gives_the_same_text_and_leaves_the_generator_alone(model):
    model.cuda()
    sampling = Sampling(seed=5, max_new_tokens=30, temperature=1.0)
    before = torch.cuda.get_rng_state()
    texts = {generate(model, Letters(), "hello", sampling).text for _ in range(2)}
    assert len(texts) == 1
    assert torch.equal(before, torch.cuda.get_rng_state())
