"""TRL's GRPO trainer over a packed model: rollouts through generate and through batches that live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits import FastLanguageModel
from fewbits.models.fast import with_methods
from fewbits.models.generation import step as decode_step
from tests.models.emulated import on_a_cpu
from tests.models.loading import save_tiny
from tests.models.test_live_batch import alone, model_of, rows

trl = pytest.importorskip("trl")
Dataset = pytest.importorskip("datasets").Dataset

TEXTS = [f"{a} and {b} make " for a in range(4) for b in range(4)]


class Watched:
    """A reward that looks at each rollout: were its tokens the likeliest of the model as it is now?"""

    __name__ = "watched"

    def __init__(self) -> None:
        self.model: Any = None
        self.rollouts: list[Any] = []
        self.behind: list[float] = []

    def __call__(self, prompt_ids: Any = None, completion_ids: Any = None, **given: Any) -> list[float]:
        tokenizer = self.model.fewbits_tokenizer
        self.rollouts.append(completion_ids)
        training = self.model.training
        self.model.eval()
        for prompt, made in zip(given["prompts"], completion_ids, strict=True):
            ids = torch.tensor([[*tokenizer(prompt)["input_ids"], *made]])
            with torch.no_grad():
                logits = self.model(ids).logits[0, -len(made) - 1 : -1].float()
            chosen = logits.gather(-1, torch.tensor(made)[:, None]).squeeze(-1)
            self.behind.append(float(((logits.amax(-1) - chosen) / logits.std(-1)).max()))
        self.model.train(training)
        return [float(i % 2) for i in range(len(completion_ids))]


@pytest.mark.parametrize("living", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rollouts_come_of_the_newest_adapters(
    living: bool, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly greedy, at a learning rate that changes the texts; over decoding's kernels by definition."""
    on_a_cpu(monkeypatch)
    steps: list[int] = []
    real = decode_step.DecodeStep.advance
    monkeypatch.setattr(
        decode_step.DecodeStep, "advance", lambda self: (steps.append(self.batch), real(self))[1]
    )
    made: list[int] = []
    real_init = decode_step.DecodeStep.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        made.append(1)
        real_init(self, *args, **options)

    monkeypatch.setattr(decode_step.DecodeStep, "__init__", init)
    save_tiny(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    if fused:
        from fewbits import fuse

        fuse(model)
    model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=64)
    watched = Watched()
    options = {"use_transformers_continuous_batching": living} if living else {}
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=watched,
        train_dataset=Dataset.from_list([{"prompt": text} for text in TEXTS]),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=6,
            temperature=0.01,
            max_steps=3,
            learning_rate=0.05,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            seed=1,
            **options,
        ),
    )
    watched.model = trainer.model
    trainer.model.fewbits_tokenizer = tokenizer
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora_B" in n}
    trainer.train()
    assert len(watched.rollouts) == 3 and max(watched.behind) < 0.2
    hooks = trainer.model.get_input_embeddings()._forward_hooks
    assert len(hooks) <= 1  # one a step would be added
    assert living or len(made) == 1  # trainers' hooks between two rollouts cost no new step
    assert steps and any(
        not torch.equal(p, before[n]) for n, p in trainer.model.named_parameters() if n in before
    )
    first, *_, last = ([tuple(made) for made in rollout] for rollout in watched.rollouts)
    assert set(first) != set(last)


def test_generate_batch_is_transformers_own_in_words_and_results() -> None:
    from transformers import GenerationConfig

    model = model_of("llama")
    prompts = [list(row.ids) for row in rows(4)]
    config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=[5, 9, 40], pad_token_id=0)
    found = model.generate_batch(prompts, generation_config=config)
    assert list(found) == ["req_0", "req_1", "req_2", "req_3"]
    for row, output in zip(rows(4), found.values(), strict=True):
        assert output.generated_tokens == alone(model, row, {"generation_config": config})
        assert output.prompt_ids == list(row.ids) and output.is_finished()
    assert model.generate_batch([]) == {}
    config.num_return_sequences, config.do_sample = 2, True
    torch.manual_seed(2)
    first = model.generate_batch(prompts[:2], generation_config=config)
    torch.manual_seed(2)
    again = model.generate_batch(prompts[:2], generation_config=config)
    assert list(first) == ["req_0", "req_0__child#0", "req_1", "req_1__child#0"]
    made = [output.generated_tokens for output in first.values()]
    assert made == [output.generated_tokens for output in again.values()]
    assert made[0] != made[1] and made[2] != made[3]


def test_a_paged_cache_asks_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' generate hands such a call to generate_batch; it does not come back."""
    model = with_methods(model_of("qwen3"))
    ids = torch.tensor([list(rows(1)[0].ids)])
    want = type(model).generate(model, ids, max_new_tokens=5, do_sample=False)
    found = model.generate(ids, max_new_tokens=5, do_sample=False, cache_implementation="paged")
    assert found.flatten().tolist() == want[0].tolist()
