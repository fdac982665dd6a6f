"""What the ranks of tests/training/test_shared_generation.py run: texts of a model that they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

import fewbits
from fewbits.errors import BadInput, Unsupported
from fewbits.models.fast import with_methods
from fewbits.models.generation.live.answers import Report, answers
from fewbits.models.generation.live.rows import Row
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.step import DecodeStep
from fewbits.recipes.recipe import LoRA
from fewbits.training.ranks.tensor_parallel import tensor_parallel
from tests.models.emulated import count_steps, on_a_cpu
from tests.models.loading import tokenizer
from tests.models.tiny import tiny, tokens

# wide enough for blocks of 64 along half of the columns
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "dtype": torch.bfloat16}


def build(family: str, recipe: str | None, *, adapted: bool = False, fused: bool = False) -> Any:
    """A whole model of random weights, the same in every process."""
    model = tiny(family, **SIZES)
    if recipe:
        fewbits.convert(model, recipe)
    model.requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    if adapted:
        adapters = fewbits.get_peft_model(model, LoRA(r=4))
        torch.manual_seed(0)
        for name, parameter in adapters.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    if fused:
        fewbits.fuse(model)
    return with_methods(model).eval()


def shared(model: Any) -> Any:
    """The same with its layers cut for this process."""
    tensor_parallel(model, init_device_mesh("cpu", (distributed.get_world_size(),)))
    return model


def prompts(rows: int) -> dict[str, Tensor]:
    """The first is padded on the left."""
    ids = tokens(rows, 11, seed=rows)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def texts(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case tokens, logits and how they came about."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        on_a_cpu(patch)
        steps = count_steps(patch)
        for case in cases:
            steps[0] = 0
            model = shared(build(**case["model"]))
            torch.manual_seed(distributed.get_rank())  # each would draw another token
            words = {"max_new_tokens": 12, **case["words"]}
            if "kv_cache" not in words:  # which nobody is given back
                words |= {"return_dict_in_generate": True, "output_logits": True}
            out = model.generate(**prompts(case["rows"]), **words)
            state = decoding_of(model)
            found.append(
                {
                    "text": getattr(out, "sequences", out),
                    "logits": torch.stack(out.logits, 1) if hasattr(out, "logits") else None,
                    "steps": steps[0],
                    "said": sorted(state.said),
                    "step": isinstance(state.step, DecodeStep),
                    "launches": getattr(state.step, "launches", 0),
                    "heads": None if state.step is None else state.step.keys[0].shape[1],
                }
            )
    return found


def loaded(folder: str, recipe: str | None) -> dict[str, Any]:
    """The model of a folder through the public face, and texts of it."""
    with pytest.MonkeyPatch.context() as patch:
        on_a_cpu(patch)
        model, own = fewbits.load_shared_model(folder, recipe=recipe, on_gpu=False)
        ids = own("a b", return_tensors="pt").input_ids
        text = model.generate(ids, max_new_tokens=8, do_sample=False)
        says = fewbits.generate(model, own, "a b", fewbits.Sampling(temperature=0, max_new_tokens=8))
        state = decoding_of(model)
        return {
            "text": text,
            "says": says.text,
            "bytes": sum(p.nbytes for p in model.model.layers.parameters()),
            "step": isinstance(state.step, DecodeStep),
            "said": sorted(state.said),
            "trains": any(p.requires_grad for p in model.parameters()),
        }


def guessed() -> Tensor:
    """A text with guesses by look-up."""
    with pytest.MonkeyPatch.context() as patch:
        on_a_cpu(patch)
        model = shared(build("llama", "qlora_nf4"))
        ids = tokens(1, 8).repeat(1, 2)
        text: Tensor = model.generate(ids, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=3)
        assert decoding_of(model).together is not None, decoding_of(model).said
        return text


def different() -> list[str]:
    """What is said where ranks are called with different things; the same call is right afterwards."""
    from transformers import GenerationConfig, LogitsProcessorList, TextStreamer, TopKLogitsWarper

    with pytest.MonkeyPatch.context() as patch:
        on_a_cpu(patch)
        model, rank = shared(build("llama", "qlora_nf4")), distributed.get_rank()
        same, greedy, said = tokens(1, 9), {"max_new_tokens": 5, "do_sample": False}, []
        calls: list[tuple[Tensor, dict[str, Any]]] = [
            (tokens(1, 9, seed=rank), greedy),
            (tokens(1, 9 + rank), greedy),
            (same, {**greedy, "max_new_tokens": 5 + rank}),
            (same[:, : 9 * rank], greedy),  # one of them is empty
            (same, {"generation_config": GenerationConfig(max_new_tokens=5, top_k=3 + rank)}),
            (same, {**greedy, "num_beams": 2, "attention_mask": torch.ones_like(same) if rank else None}),
        ]
        for ids, words in calls:
            with pytest.raises(BadInput) as caught:
                model.generate(ids, **words)
            said.append(str(caught.value))
        with pytest.raises(Unsupported, match="decode greedily"):
            model.generate(same, max_new_tokens=5, do_sample=True, use_cache=False)
        words = {**greedy, "logits_processor": LogitsProcessorList([TopKLogitsWarper(3)])}
        streamer = TextStreamer(tokenizer()) if rank else None
        assert model.generate(same, **words, streamer=streamer).shape == (1, 14)
        return said


def with_two_adapters() -> Any:
    """A whole model in float16, whose rounding leaves few ties, with two adapters of their own targets."""
    model = tiny("llama", **{**SIZES, "dtype": torch.float16})
    fewbits.convert(model, "qlora_nf4")
    model.requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    adapted = fewbits.get_peft_model(model, LoRA(r=4))
    adapted.add_adapter("other", LoraConfig(r=8, target_modules=["q_proj", "down_proj", "gate_proj"]))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return with_methods(adapted, model).eval()


def by_row(names: list[list[str]], words: list[dict[str, Any]]) -> list[Tensor]:
    """Texts whose rows have adapters of their own, by steps of decoding."""
    with pytest.MonkeyPatch.context() as patch:
        on_a_cpu(patch)
        model = shared(with_two_adapters())
        found = []
        for chosen, more in zip(names, words, strict=True):
            asked = {"max_new_tokens": 10, "do_sample": False, "adapter_names": chosen, **more}
            found.append(model.generate(**prompts(len(chosen)), **asked))
            state = decoding_of(model.get_base_model())
            assert isinstance(state.step, DecodeStep) and not state.said, state.said
        return found


def many() -> tuple[str, list[list[int]]]:
    """Several texts, which join no batch that lives."""
    with pytest.MonkeyPatch.context() as patch:
        on_a_cpu(patch)
        model, report = shared(build("llama", "qlora_nf4")), Report()
        rows = [Row(i, tuple(tokens(1, 5 + i)[0].tolist()), i) for i in range(3)]
        words = {"max_new_tokens": 6, "do_sample": False}
        found = {text.row.index: text.tokens for text in answers(model, rows, words, report=report)}
        return f"{report.way}: {report.reason}", [found[i] for i in range(3)]
