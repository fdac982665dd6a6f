"""Sequences of calls around ``generate`` with decoding's own kernels, by their definitions on a CPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import fewbits
from fewbits.models.fast import FastLanguageModel, with_methods
from fewbits.models.generation import loop as decode_generate
from fewbits.models.generation import step as decode_step
from fewbits.models.generation.loop import decoding_of
from tests.models.emulated import count_steps, on_a_cpu
from tests.models.tiny import tiny, tokens

ROUNDING = 0.03


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the question whether there is a GPU."""
    on_a_cpu(monkeypatch)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens the steps made so far."""
    return count_steps(monkeypatch)


def model_of(**changes: Any) -> Any:
    model = tiny("llama", dtype=torch.bfloat16, **changes)
    fewbits.convert(model, "qlora_nf4")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return with_methods(model)


def greedy(model: Any, ids: Tensor, length: int = 6, **asked: Any) -> Any:
    return model.generate(ids, max_new_tokens=length, do_sample=False, **asked)


def own(model: Any, ids: Tensor, length: int = 6, **asked: Any) -> Any:
    """What transformers' own loop makes."""
    return type(model).generate(model, ids, max_new_tokens=length, do_sample=False, **asked)


def second(model: Any, ids: Tensor) -> int:
    """The second of the different tokens that the model says."""
    text = greedy(model, ids, 16)[0, ids.shape[1] :].tolist()
    return int(next(token for token in text if token != text[0]))


def apart(model: Any, ids: Tensor) -> float:
    """The relative difference of the step's last logits to those of the model for the same text."""
    text = greedy(model, ids, 3)[:, :-1]
    step = decoding_of(model).step
    assert step is not None, decoding_of(model).refused
    with torch.no_grad():
        logits = model(input_ids=text).logits[:, -1].float()
    return float((step.logits - logits).norm() / logits.norm())


def test_inference_mode_first_and_then_none(made: list[int]) -> None:
    model = fewbits.get_peft_model(model_of(), r=4, target_modules="all-linear")
    with torch.inference_mode():
        model.generate(tokens(1, 8), max_new_tokens=3)
    assert apart(model, tokens(1, 8)) < ROUNDING
    with torch.inference_mode():
        model.generate(tokens(1, 8), max_new_tokens=3)
    assert made[0] == 6


def test_what_a_call_leaves_open_the_models_config_says(made: list[int]) -> None:
    from transformers import GenerationConfig
    from transformers.generation import GenerateDecoderOnlyOutput

    model, ids = model_of(), tokens(1, 8)
    config = {"max_new_tokens": 8, "do_sample": False}
    model.generation_config.num_beams = 3
    beams = type(model).generate(model, ids, generation_config=GenerationConfig(**config))
    assert torch.equal(model.generate(ids, generation_config=GenerationConfig(**config)), beams)
    model.generation_config.num_beams, model.generation_config.return_dict_in_generate = None, True
    out = model.generate(ids, generation_config=GenerationConfig(**config))
    assert isinstance(out, GenerateDecoderOnlyOutput) and made[0] == 7
    model.generate(ids, generation_config=GenerationConfig(return_dict_in_generate=False, **config))
    assert made[0] == 14


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_learned_prompts_are_read(kind: str, made: list[int]) -> None:
    import peft

    model, ids = model_of(), tokens(1, 8)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    learned = peft.get_peft_model(model, config).to(torch.bfloat16)
    for parameter in learned.prompt_encoder.parameters():
        torch.manual_seed(0)
        parameter.data.normal_(std=5)
    ours = greedy(learned, ids)
    del model.generate
    assert torch.equal(ours, greedy(learned, ids)) and made[0] == 0


def test_code_from_outside_is_not_called_for_a_text_that_has_ended(made: list[int]) -> None:
    """Grammars and prefix functions have no answer there."""
    model, ids = model_of(), tokens(1, 8)
    end = second(model, ids)

    def allowed(_: int, text: Tensor) -> list[int]:
        assert end not in text[ids.shape[1] :].tolist(), "called after the end"
        return list(range(96))

    class Processor:
        def __call__(self, text: Tensor, scores: Tensor) -> Tensor:
            allowed(0, text[0])
            return scores

    for asked in ({"prefix_allowed_tokens_fn": allowed}, {"logits_processor": [Processor()]}):
        before = made[0]
        ours = greedy(model, ids, 30, eos_token_id=end, **asked)
        assert torch.equal(ours, own(model, ids, 30, eos_token_id=end, **asked)) and made[0] > before


def test_two_calls_at_once_do_not_share_a_cache() -> None:
    model = model_of()
    prompts = [tokens(1, 8, seed=3), tokens(1, 12, seed=4)]
    wanted = [[f(model, ids, 24).tolist() for f in (greedy, own)] for ids in prompts]
    both, found = threading.Barrier(2), [Tensor(), Tensor()]

    def run(i: int) -> None:
        both.wait()
        found[i] = greedy(model, prompts[i], 24)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(out.tolist() in want for out, want in zip(found, wanted, strict=True))


def test_a_criterion_that_generates_itself_leaves_the_cache_alone(made: list[int]) -> None:
    from transformers import StoppingCriteria

    model, ids = model_of(), tokens(1, 8)

    class Asks(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
            greedy(model, tokens(1, 5, seed=8), 2)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    want = greedy(model, ids)
    assert torch.equal(greedy(model, ids, stopping_criteria=[Asks()]), want) and made[0] == 10


def test_a_replaced_activation_is_seen() -> None:
    model, ids = model_of(), tokens(2, 8)
    greedy(model, ids)
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.ReLU()
    assert torch.equal(greedy(model, ids), own(model, ids))
    assert "apart from the model's own" in decoding_of(model).refused


def test_dropout_while_training_is_no_lasting_refusal(made: list[int]) -> None:
    model = model_of()
    peft_model = fewbits.get_peft_model(model, r=4, lora_dropout=0.5, target_modules="all-linear")
    greedy(peft_model.train(), tokens(1, 8))
    assert made[0] == 0
    greedy(peft_model.eval(), tokens(1, 8))
    assert made[0] == 5


def test_positions_and_masks_of_the_caller(made: list[int]) -> None:
    model, ids = model_of(), tokens(2, 8)
    apart_positions = torch.tensor([[0, 1, 2, 3, 20, 21, 22, 23]]).expand(2, -1)
    longer = torch.ones(2, 10, dtype=torch.long)
    for asked in ({"position_ids": apart_positions}, {"attention_mask": longer}):
        assert torch.equal(greedy(model, ids, **asked), own(model, ids, **asked))
    assert made[0] == 0
    greedy(model, ids, position_ids=torch.arange(8)[None].expand(2, -1))
    assert made[0] == 5


@pytest.mark.parametrize("criteria", [None, []])
def test_stop_strings_find_their_tokenizer(criteria: Any, made: list[int]) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {chr(33 + i): i for i in range(96)}
    inner = Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    model, ids = model_of(), tokens(1, 8)
    stop = tokenizer.decode([second(model, ids)])
    asked = {"stop_strings": [stop], "tokenizer": tokenizer, "stopping_criteria": criteria}
    before = made[0]
    ours = greedy(model, ids, 20, **asked)
    assert torch.equal(ours, own(model, ids, 20, **asked)) and ours.shape[1] < 24 and made[0] > before


def test_without_memory_for_the_cache_transformers_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model, ids = model_of(), tokens(1, 8)
    with monkeypatch.context() as patch:
        patch.setattr(decode_generate, "DecodeStep", full)
        assert torch.equal(greedy(model, ids), own(model, ids))
    assert not decoding_of(model).refused
    assert apart(model, ids) < ROUNDING


def test_a_fused_model_that_trains_between_calls_has_a_step(made: list[int]) -> None:
    """As GRPO does; `FastLanguageModel.get_peft_model` fuses on a GPU."""
    model = fewbits.get_peft_model(model_of(), r=4, target_modules="all-linear")
    fewbits.fuse(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, ids = torch.optim.SGD(trained, lr=0.5), tokens(2, 8)
    before = []
    for _ in range(3):
        FastLanguageModel.for_inference(model)
        assert apart(model, ids) < ROUNDING
        step: Any = decoding_of(model).step
        before.append(step.logits.clone())
        FastLanguageModel.for_training(model, "unsloth")
        greedy(model, ids, 3)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert made[0] == 12 and not torch.equal(before[0], before[2])


def test_layers_of_another_build_are_transformers_own() -> None:
    """Also after a call that had a step: kernels would write beyond their buffers."""

    class Half(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    model, ids = model_of(), tokens(1, 8)
    greedy(model, ids)
    model.model.layers[1].mlp = Half()
    assert torch.equal(greedy(model, ids), own(model, ids))
    assert "gate_proj" in decoding_of(model).refused

    model = with_methods(tiny("llama", dtype=torch.bfloat16))
    model.generation_config.eos_token_id = None
    for part in (model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj):
        part.weight.data = part.weight.data[:96].contiguous()
    model.model.layers[0].mlp.down_proj.weight.data = model.model.layers[0].mlp.down_proj.weight.data[:, :96]
    want = own(model, ids)
    assert torch.equal(greedy(model, ids), want)
    model.model.layers[0].mlp.up_proj.weight.data = torch.zeros(97, 64, dtype=torch.bfloat16)
    assert decode_step.why_not(model) == "the model is not on one GPU"
    with pytest.raises(decode_step.Unsupported, match="not of the sizes"):
        decode_step.DecodeStep(model, batch=1, room=16)
    model.model.norm.weight.placements = ()  # as FSDP2's have
    assert "sharded over several processes" in decode_step.why_not(model)
