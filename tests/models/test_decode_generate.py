"""``generate`` through decoding's own kernels, by their definitions on a CPU: numbers, what users pass."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import fewbits
from fewbits.errors import Unsupported
from fewbits.models.fast import with_methods
from fewbits.models.generation import loop as decode_generate
from fewbits.models.generation import step as decode_step
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.products import products_in_16_bits
from fewbits.models.generation.prompt import left_padding, read_prompt
from tests.models.emulated import on_a_cpu
from tests.models.tiny import tiny, tokens

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the question whether there is a GPU."""
    on_a_cpu(monkeypatch)


def model_of(family: str, recipe: str | None = "qlora_nf4", **changes: Any) -> Any:
    model = tiny(family, dtype=BF16, **changes)
    if recipe:
        fewbits.convert(model, recipe)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return with_methods(model)


def padded(length: int = 20) -> dict[str, Tensor]:
    """Three prompts, two of them padded on the left."""
    ids = tokens(3, length)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, : length - 1] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("recipe", ["qlora_nf4", "int8", None, "qlora_nf4_fp8"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_every_step_gives_the_models_own_logits(family: str, recipe: str | None) -> None:
    """Forced along one text, padding in front, beyond mistral's window; the difference is rounding's."""
    if recipe != "qlora_nf4" and family not in ("llama", "qwen3"):
        pytest.skip("one family says it")
    model, prompt = model_of(family, recipe), padded()
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    text = torch.cat([ids, tokens(3, 12, seed=5)], dim=1)
    whole = torch.cat([mask, torch.ones(3, 12, dtype=mask.dtype)], dim=1)
    with torch.no_grad(), products_in_16_bits(model):
        own = model(
            input_ids=text, attention_mask=whole, position_ids=(whole.cumsum(-1) - 1).clamp(min=0)
        ).logits.float()
        padding = left_padding(ids, mask)
        state = decoding_of(model)
        read = read_prompt(model, ids, mask, padding)
        step = decode_generate._ready(state, model, ids, read, padding, mask, text.shape[1])
        assert state.proved and not state.refused
        for n in range(ids.shape[1], text.shape[1] - 1):
            step.tokens.copy_(text[:, n])
            logits = step.advance()
            assert float((logits - own[:, n]).norm() / own[:, n].norm()) < 0.02 * 2**0.5


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens the steps made so far."""
    made = [0]
    real = decode_step.DecodeStep.advance

    def advance(self: Any) -> Tensor:
        made[0] += 1
        return real(self)

    monkeypatch.setattr(decode_step.DecodeStep, "advance", advance)
    return made


def test_what_users_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = model_of("qwen3"), counted(monkeypatch)
    prompt = padded()
    greedy = model.generate(**prompt, max_new_tokens=9, do_sample=False)
    assert greedy.shape == (3, 29) and made[0] == 8
    assert torch.equal(greedy[:, :20], prompt["input_ids"])
    again = model.generate(**prompt, max_new_tokens=9, do_sample=False)
    assert torch.equal(again, greedy)
    alone = model.generate(prompt["input_ids"][2:, -1:], max_new_tokens=9, do_sample=False)
    assert torch.equal(alone[0, 1:], greedy[2, 20:])  # padding changes nothing
    torch.manual_seed(3)
    many = model.generate(
        **prompt, max_new_tokens=5, do_sample=True, temperature=0.8, top_p=0.9, num_return_sequences=2
    )
    torch.manual_seed(3)
    assert torch.equal(
        many,
        model.generate(
            **prompt, max_new_tokens=5, do_sample=True, temperature=0.8, top_p=0.9, num_return_sequences=2
        ),
    )
    assert many.shape == (6, 25)
    banned = model.generate(
        **prompt, max_new_tokens=9, do_sample=False, suppress_tokens=greedy[:, 20:].unique().tolist()
    )
    assert not set(banned[:, 20:].unique().tolist()) & set(greedy[:, 20:].unique().tolist())
    assert model.generate(**prompt, max_new_tokens=1, do_sample=False).shape == (3, 21)


def test_a_sequence_ends_where_it_does_in_transformers() -> None:
    """Also if all ended some tokens before the loop looks."""
    model = model_of("llama")
    prompt = padded()
    free = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    end = int(free[0, 26])
    ours = model.generate(**prompt, max_new_tokens=24, do_sample=False, eos_token_id=end)
    for row, whole in zip(ours[:, 20:], free[:, 20:], strict=True):
        stop = (whole == end).nonzero()
        length = int(stop[0]) + 1 if len(stop) else len(whole)
        assert torch.equal(row[:length], whole[:length]) and (row[length:] == 0).all()
    one = model.generate(
        prompt["input_ids"][:1],
        attention_mask=prompt["attention_mask"][:1],
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=end,
    )
    assert one.shape[1] == 20 + int((free[0, 20:] == end).nonzero()[0]) + 1


def test_a_streamer_sees_every_token() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    model, streamer = model_of("llama"), Streamer()
    out = model.generate(tokens(1, 8), max_new_tokens=6, do_sample=False, streamer=streamer)
    assert streamer.seen == out[0].tolist() and streamer.ended


def test_adapters_stay_unmerged_and_new_values_are_used() -> None:
    model = model_of("llama")
    peft_model = fewbits.get_peft_model(model, r=4, lora_alpha=16, target_modules="all-linear")
    prompt = padded()

    def logits() -> tuple[Tensor, Tensor, Tensor]:
        """After one token more: the step's, the model's own, and those of the same model in float32."""
        peft_model.generate(**prompt, max_new_tokens=2, do_sample=False)
        step = decoding_of(peft_model).step
        assert step is not None
        ids = torch.cat([prompt["input_ids"], step.tokens[:, None]], dim=1)
        mask = torch.cat([prompt["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            own, exact = (
                m(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1].float()
                for m in (peft_model, copy.deepcopy(peft_model).float())
            )
        return step.logits.clone(), own, exact

    def agreed() -> Tensor:
        """The model's own: large adapters enlarge what 16 bits round away, in its own layers too."""
        ours, own, exact = logits()
        limit = max(0.02, float((own - exact).norm() / exact.norm()))
        assert limit < 0.2 and float((ours - exact).norm() / exact.norm()) <= limit
        return own

    seen = []
    for scale in (0.0, 0.3, -0.5):
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                torch.manual_seed(1)
                parameter.data.normal_().mul_(scale)
        seen.append(agreed())
    assert float((seen[1] - seen[0]).norm() / seen[0].norm()) > 0.05
    with peft_model.disable_adapter():
        own = agreed()
    assert float((own - seen[0]).norm() / own.norm()) < 1e-3
    peft_model.merge_adapter()
    own = agreed()
    assert float((own - seen[0]).norm() / own.norm()) > 0.05


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("phi3", "layers of phi3 are built differently: one linear holds several"),
        ("gemma2", "layers of gemma2 are built differently: norms stand behind attention and MLP as well"),
    ],
)
def test_families_without_a_step_decode_as_before(
    family: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = model_of(family), counted(monkeypatch)
    assert model.generate(tokens(1, 8), max_new_tokens=3, do_sample=False).shape == (1, 11)
    assert made[0] == 0 and decode_step.why_not(model) == reason


def test_a_hook_that_changes_numbers_is_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, made = model_of("llama"), counted(monkeypatch)
    prompt = padded()
    model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert made[0] == 3
    hook = model.model.layers[0].register_forward_hook(lambda module, args, output: output * 3)
    want = type(model).generate(model, **prompt, max_new_tokens=4, do_sample=False)
    for _ in range(2):
        assert torch.equal(model.generate(**prompt, max_new_tokens=4, do_sample=False), want)
    assert made[0] == 3 and "apart from the model's own" in decoding_of(model).refused
    hook.remove()
    model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert made[0] == 6 and not decoding_of(model).refused
    assert caplog.text.count("transformers' own loop") == 1


@pytest.mark.parametrize("asked", [{"num_beams": 2}, {"use_cache": False}])
def test_other_ways_of_generating_are_transformers_own(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = model_of("llama"), counted(monkeypatch)
    model.generate(tokens(1, 8), max_new_tokens=3, do_sample=False, **asked)
    assert made[0] == 0


def test_models_in_float32_and_right_padding_are_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    model = with_methods(tiny("llama"))
    model.generate(tokens(1, 8), max_new_tokens=3, do_sample=False)
    assert "computes in torch.float32" in decoding_of(model).refused
    with pytest.raises(Unsupported, match="padded on the left"):
        left_padding(tokens(1, 4), torch.tensor([[1, 1, 1, 0]]))
    assert made[0] == 0


def test_a_model_travels_after_it_has_generated() -> None:
    model = model_of("llama")
    want = model.generate(tokens(1, 8), max_new_tokens=3, do_sample=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(
            with_methods(other).generate(tokens(1, 8), max_new_tokens=3, do_sample=False), want
        )
