"""Steps by a model's own modules over fixed places, as a GPU records them; here they run as they are."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import fewbits
from fewbits import FastLanguageModel
from fewbits.errors import NotFinite, Unsupported
from fewbits.models.fast import with_methods
from fewbits.models.generation import loop, model_step, prompt_graph, step_experts
from fewbits.models.generation.loop import decoding_of
from fewbits.models.generation.model_step import HostReads, ModelStep, why_no_model_step
from fewbits.models.generation.packed_cache import PackedCache
from fewbits.nn.experts import QuantizedExperts
from tests.models.emulated import on_a_cpu
from tests.models.hybrids import HYBRIDS, hybrid
from tests.models.mixtures import MIXTURES, mixture
from tests.models.tiny import FAMILIES, tiny, tokens
from tests.models.unwritten import UNFUSED, unwritten

GREEDY = {"do_sample": False, "max_new_tokens": 14}


def one_of(names: tuple[str, ...], quick: str) -> list[Any]:
    """All of them, of which one says it quickly."""
    return [pytest.param(name, marks=() if name == quick else pytest.mark.slow) for name in names]


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Everything but the question whether there is a GPU; the number of texts of each step taken."""
    real, advance = why_no_model_step, ModelStep.advance

    def without_the_gpu(model: Any) -> str:
        reason = real(model)
        return "" if reason == "the model is not on one GPU" else reason

    taken: list[int] = []

    def counted(self: ModelStep) -> Tensor:
        taken.append(self.batch)
        return advance(self)

    monkeypatch.setattr(loop, "why_no_model_step", without_the_gpu)
    monkeypatch.setattr(ModelStep, "advance", counted)
    return taken


def ready(model: Any) -> Any:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return with_methods(model)


def padded(length: int = 20, rows: int = 3) -> dict[str, Tensor]:
    """Prompts, all but the second padded on the left."""
    ids = tokens(rows, length, seed=length)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[2:, : length - 1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def same_as_transformers(model: Any, **words: Any) -> None:
    """One loop, calls of other lengths, fewer texts and more of them."""
    for given in (padded(), padded(9), padded(26, rows=2), padded(9, rows=1), padded(12, rows=4)):
        asked = {**GREEDY, **given, **words}
        torch.manual_seed(0)
        need = type(model).generate(model, **asked)
        torch.manual_seed(0)
        assert torch.equal(model.generate(**asked), need)


@pytest.mark.parametrize("family", one_of(FAMILIES, "gemma2"))
def test_known_families_give_the_tokens_of_transformers(family: str, steps: list[int]) -> None:
    """Sandwich norms, soft caps, windows of 16 tokens that every text outgrows."""
    model = ready(tiny(family))
    same_as_transformers(model)
    assert steps == [3] * 26 + [2] * 13 + [1] * 13 + [4] * 13
    assert not decoding_of(model).refused and decoding_of(model).apart < 1e-3


@pytest.mark.parametrize("family", one_of(UNFUSED, "stablelm"))
def test_families_that_run_unfused_give_the_tokens_of_transformers(family: str, steps: list[int]) -> None:
    model = ready(unwritten(family))
    same_as_transformers(model)
    assert len(steps) == 65, decoding_of(model).refused


@pytest.mark.parametrize("family", one_of(MIXTURES, "mixtral"))
def test_mixtures_of_experts(family: str, steps: list[int]) -> None:
    """Whatever transformers' own loop does: a step has a way of its own, and the configuration its word."""
    model = ready(mixture(family))
    model.config.output_router_logits = False  # with which transformers' own loop refuses padding
    for way in ("batched_mm", "eager", "grouped_mm"):
        model.set_experts_implementation(way)
        same_as_transformers(model)
        assert len(steps) == 65, decoding_of(model).refused
        assert model.config._experts_implementation == way
        del steps[:]
        loop._STATES.pop(model)


def test_a_step_that_is_recorded_under_autocast_casts_weights_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autocast's copies go when its block ends; a graph would read them in the next one, or outside of it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    model = ready(tiny("gemma2"))
    weights = {id(p) for p in model.model.layers.parameters() if p.dim() == 2}
    cast: set[int] = set()

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cast.update(id(x) for x in args if "_to_copy" in str(func) and id(x) in weights)
            return func(*args, **(kwargs or {}))

    def watched(device: torch.device) -> Any:
        cast.clear()
        return Casts()

    monkeypatch.setattr(model_step, "no_waits", watched)
    need = type(model).generate(model, tokens(1, 9), **GREEDY)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(tokens(1, 9), **GREEDY)
    step = decoding_of(model).step
    assert cast == weights and torch.is_autocast_cache_enabled()
    assert torch.equal(model.generate(tokens(1, 9), **GREEDY), need)
    assert step is not None and decoding_of(model).step is not step


def experts_of(model: Any) -> Any:
    return next(m for m in model.modules() if hasattr(m, "is_transposed"))


@pytest.mark.parametrize("family", one_of(MIXTURES, "gpt_oss"))
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_experts_by_every_way_are_the_same(family: str, rows: int) -> None:
    """All for all, those that are hit, and transformers' loop; also where an expert is chosen by nobody."""
    experts = experts_of(mixture(family))
    config, count = experts.config, experts.down_proj.shape[0]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=generator)
    chosen = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(rows)])
    weights = torch.rand(rows, 2, generator=generator)
    config._experts_implementation = "eager"
    with torch.no_grad():
        need = experts(x, chosen, weights)
        torch.testing.assert_close(step_experts._all_experts(experts, x, chosen, weights), need)
        with step_experts.experts_without_the_host(experts), HostReads(x.device):
            assert config._experts_implementation == "fewbits_step"
            ours = experts(x, chosen, weights)
    torch.testing.assert_close(ours, need)
    assert config._experts_implementation == "eager"


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_an_expert_that_nobody_chose_may_overflow(family: str) -> None:
    """It computes rows that are not its own, in float16 perhaps to infinity; these count for nothing."""
    experts = experts_of(mixture(family)).half()
    x, chosen = (
        torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).half(),
        torch.tensor([[0, 1]] * 2),
    )
    weights = torch.full((2, 2), 0.5, dtype=torch.float16)
    with torch.no_grad():
        experts.down_proj[3].fill_(6e4)
        experts.gate_up_proj[3].fill_(6e3)
        need = experts(x, chosen, weights)
        ours = step_experts._all_experts(experts, x, chosen, weights)
        assert not experts(x, chosen + 2, weights).isfinite().all()
    torch.testing.assert_close(ours, need)


@pytest.mark.parametrize("kind", [None, {"keys": "int8", "newest": 3, "group": 32, "first": 2}])
def test_a_prompt_that_is_not_finite_spoils_no_later_call(kind: Any, steps: list[int]) -> None:
    """Its keys and values stand where later texts are shorter; hidden ones count zero times NaN."""
    model = ready(tiny("gemma2", head_dim=32, layer_types=["full_attention"] * 2))
    asked = {**GREEDY, "kv_cache": kind}
    need = model.generate(tokens(1, 5), **asked)
    count = len(steps)
    assert count
    vectors = model.get_input_embeddings()(tokens(1, 30, seed=3)).detach()
    vectors[0, 12] = torch.nan
    with pytest.raises(NotFinite):
        model.generate(inputs_embeds=vectors, **asked)
    del steps[:]
    assert torch.equal(model.generate(tokens(1, 5), **asked), need) and len(steps) == count


def test_another_way_that_was_chosen_stays() -> None:
    experts = experts_of(mixture("mixtral"))
    for name in ("deepgemm", "batched_mm"):
        experts.config._experts_implementation = name
        with step_experts.experts_without_the_host(experts):
            assert experts.config._experts_implementation == name


@pytest.mark.parametrize("family", one_of(("mixtral", "qwen3_moe", "gpt_oss"), "mixtral"))
def test_packed_experts_with_adapters_and_kept_values(family: str, steps: list[int]) -> None:
    """A graph reads no decoded weights that somebody keeps; the keeping goes on; adapters change."""
    model = mixture(family)
    model.config.output_router_logits = False
    fewbits.convert(model, "qlora_nf4")
    adapted = fewbits.get_peft_model(ready(model), r=4, target_modules="all-linear").eval()
    packed = [m for m in model.modules() if isinstance(m, QuantizedExperts)]
    assert packed
    before = None
    for turn in range(3):
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
        for module in packed:
            module.keep_values(turn > 0)
        same_as_transformers(model)
        assert len(steps) == 65 * (turn + 1), decoding_of(model).refused
        assert all(module.keeps_values == (turn > 0) for module in packed)
        step = decoding_of(model).step
        assert isinstance(step, ModelStep) and (before is None or step.run().shape == before.shape)
        if turn:
            for module in packed:
                module.kept.clear()
            with torch.no_grad():
                step.run()
            assert not any(module.kept for module in packed)
        before = step.run()


@pytest.mark.parametrize("family", one_of(HYBRIDS, "lfm2"))
def test_hybrids_are_refused(family: str, steps: list[int]) -> None:
    """They keep states that are no keys and values by position; transformers' loop has them as ever."""
    model = ready(hybrid(family))
    assert why_no_model_step(model) not in ("", "the model is not on one GPU")
    ids = tokens(2, 12)
    assert torch.equal(model.generate(ids, **GREEDY), type(model).generate(model, ids, **GREEDY))
    assert not steps


def test_what_users_pass(steps: list[int]) -> None:
    """Drawn tokens, processors, ends, several answers, streamers: all of it is transformers' own."""
    model, given = ready(tiny("gemma2")), padded()
    same_as_transformers(model, do_sample=True, temperature=0.8, top_k=20, num_return_sequences=2)
    same_as_transformers(model, repetition_penalty=1.5, no_repeat_ngram_size=2, bad_words_ids=[[7], [9]])
    free = type(model).generate(model, **given, **GREEDY)
    same_as_transformers(model, eos_token_id=int(free[0, 25]))
    assert set(steps) == {6, 4, 2, 8, 3, 1}

    class Streamer:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.seen.append(-1)

    ours, theirs = Streamer(), Streamer()
    model.generate(given["input_ids"][1:2], **GREEDY, streamer=ours)
    type(model).generate(model, given["input_ids"][1:2], **GREEDY, streamer=theirs)
    assert ours.seen == theirs.seen and ours.seen[-1] == -1


def test_inference_mode_and_back() -> None:
    model, ids = ready(tiny("gemma2")), tokens(2, 20)
    with torch.inference_mode():
        first = model.generate(ids, **GREEDY)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **GREEDY), first)
        with torch.inference_mode():
            assert torch.equal(model.generate(ids, **GREEDY), first)


def test_scores_and_caches_come_back() -> None:
    model, ids = ready(tiny("gemma3_text")), tokens(2, 20)
    asked = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours, theirs = model.generate(ids, **asked), type(model).generate(model, ids, **asked)
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert ours.past_key_values.get_seq_length() == 33


def test_another_room_and_more_texts_are_another_step_and_fewer_are_not() -> None:
    model = ready(unwritten("stablelm"))
    state = decoding_of(model)
    model.generate(tokens(4, 20), **GREEDY)
    step = state.step
    for rows, length in ((1, 7), (3, 90), (4, 2)):
        model.generate(tokens(rows, length), **GREEDY)
        assert state.step is step
    model.generate(tokens(5, 7), **GREEDY)
    assert state.step is not step


@pytest.mark.parametrize("recipe", one_of(("qlora_nf4", "int8", "qlora_nf4_fp8"), "qlora_nf4_fp8"))
@pytest.mark.parametrize("family", one_of(("gemma2", "phi3"), "gemma2"))
def test_packed_weights_and_adapters_with_their_newest_values(family: str, recipe: str) -> None:
    """One step for all values of an adapter; products in 16 bits, as kernels of a step have them."""
    model = tiny(family)
    fewbits.convert(model, recipe)
    adapted = fewbits.get_peft_model(ready(model), r=4, target_modules="all-linear").eval()
    state, ids = decoding_of(model), tokens(2, 20)
    before, step = None, None
    for _ in range(3):
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.2)
        tokens_of_it = adapted.generate(ids, **GREEDY)
        if recipe != "qlora_nf4_fp8":
            assert torch.equal(tokens_of_it, type(model).generate(model, ids, **GREEDY))
        assert before is None or not torch.equal(tokens_of_it, before)
        assert isinstance(state.step, ModelStep) and state.step is (step or state.step)
        before, step = tokens_of_it, state.step
    with adapted.disable_adapter():
        plain = adapted.generate(ids, **GREEDY)
        assert not torch.equal(plain, before) and state.step is not step


def test_kernels_that_are_refused_leave_the_modules(
    steps: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A float32 model has no kernels of a step; it is found when the step is made, once."""
    on_a_cpu(monkeypatch)
    model = ready(tiny("llama"))
    same_as_transformers(model)
    assert len(steps) == 65 and "float32" in decoding_of(model).no_kernels
    said = [record.message for record in caplog.records if "generate() decodes" in record.message]
    assert len(said) == 1 and "by a CUDA graph of the model's own modules: the model computes in" in said[0]


KINDS = ("int8", "fp8", "int4", "int8/bfloat16")


@pytest.mark.parametrize("kind", one_of(KINDS, "int4"))
@pytest.mark.parametrize("family", one_of(("gemma2", "phi3", "stablelm"), "gemma2"))
def test_keys_and_values_in_few_bits(family: str, kind: str, steps: list[int]) -> None:
    """The definition's numbers over places that stay: rings that turn, first tokens behind padding."""
    model = ready(unwritten(family) if family in UNFUSED else tiny(family))
    state = decoding_of(model)
    for newest, first in ((3, 2), (5, 0), (64, 4), (1, 1)):
        words = {"keys": kind.partition("/")[0], "values": kind.rpartition("/")[2]}
        cache = {**words, "newest": newest, "first": first}
        for given in (padded(), padded(9), padded(26, rows=2), padded(2, rows=1)):
            ours = model.generate(**GREEDY, **given, kv_cache=cache)
            assert isinstance(state.step, ModelStep) and state.step.packed, state.said
            before = len(steps)
            own = PackedCache(model.config, cache, padding=(given["attention_mask"] == 0).sum(-1))
            need = type(model).generate(model, **GREEDY, **given, past_key_values=own)
            assert torch.equal(ours, need) and len(steps) == before
    assert steps
    assert torch.equal(
        model.generate(**GREEDY, **padded()), type(model).generate(model, **GREEDY, **padded())
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_fused_model_of_inference(attention: str, steps: list[int]) -> None:
    """Prompts through fused nodes, tokens by the layers' own forward; nothing on the way asks the host."""
    model = ready(tiny("gemma3_text"))
    model.set_attn_implementation(attention)
    fewbits.fuse(model)
    FastLanguageModel.for_inference(model)
    same_as_transformers(model)
    assert len(steps) == 65, decoding_of(model).refused


class _Asks(nn.Module):
    """Looks at what it computes, as some routers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if bool(x.abs().max() >= 0) else x


class _Counts(nn.Module):
    """Adds what stands on the host and grows with each call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) + self.calls


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (_Asks, "_Asks asks the host for values (aten._local_scalar_dense.default)"),
        (_Counts, "one step over fixed places for its keys gives logits"),
    ],
)
def test_what_a_graph_would_get_wrong_is_refused(
    wrap: Any, said: str, steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = ready(tiny("gemma2")), tokens(2, 20)
    model.model.layers[1].mlp = wrap(model.model.layers[1].mlp)
    for _ in range(3):
        out = model.generate(ids, **GREEDY)
        assert out.shape == (2, 34)
    assert not steps and said in decoding_of(model).refused
    lines = [record.message for record in caplog.records if "transformers' own loop" in record.message]
    assert len({*lines}) == len(lines) <= 2 and any(said in line for line in lines)
    model.model.layers[1].mlp = model.model.layers[1].mlp.inner
    same_as_transformers(model)  # the model is another one now
    assert len(steps) == 65


def test_a_recording_that_fails_leaves_transformers_loop(
    steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = ready(tiny("gemma2")), tokens(2, 20)

    def fails(self: ModelStep) -> None:
        raise Unsupported("its modules cannot be recorded in a CUDA graph (operation not permitted).")

    monkeypatch.setattr(ModelStep, "record", fails)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **GREEDY), type(model).generate(model, ids, **GREEDY))
    assert (
        not steps and "cannot be recorded" in decoding_of(model).refused and decoding_of(model).step is None
    )


def test_a_model_is_not_kept_by_what_is_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step and its prompts' graphs go with it."""
    monkeypatch.setattr(prompt_graph, "_records", lambda model: True)
    model, ids = ready(tiny("gemma2")), tokens(2, 20)
    for _ in range(3):
        model.generate(ids, **GREEDY)
    state = decoding_of(model)
    assert isinstance(state.step, ModelStep) and state.prompts.graphs
    alive, step = ref(model), ref(state.step)
    del model, state
    gc.collect()
    assert alive() is None and step() is None


@pytest.mark.parametrize("length", [253, 255, 256])
def test_a_prompt_that_ends_beside_the_room_is_compared_inside_of_it(length: int, steps: list[int]) -> None:
    """Two tokens behind it are compared, also where one is asked for; a place beyond ends a GPU's process."""
    model = ready(tiny("gemma2", max_position_embeddings=1024))
    asked = {"do_sample": False, "max_new_tokens": 1}
    vectors = model.get_input_embeddings()(tokens(1, 30)).detach()
    vectors[0, 12] = torch.nan
    for fails in (False, True):
        loop._STATES.pop(model, None)
        if fails:  # a step that nothing was compared with
            with pytest.raises(NotFinite):
                model.generate(inputs_embeds=vectors, **GREEDY)
        ids = tokens(1, length)
        assert torch.equal(model.generate(ids, **asked), type(model).generate(model, ids, **asked))
        assert not decoding_of(model).refused and decoding_of(model).apart < 1e-3


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_end_where_the_context_does(family: str, steps: list[int]) -> None:
    model = ready(unwritten(family))
    for length in (127, 126, 120):
        loop._STATES.pop(model, None)
        asked = {"do_sample": False, "max_new_tokens": 128 - length}
        ids = tokens(2, length)
        assert torch.equal(model.generate(ids, **asked), type(model).generate(model, ids, **asked))
        assert not decoding_of(model).refused, decoding_of(model).refused


def test_a_choice_of_experts_that_turns_over_refuses_no_step(steps: list[int]) -> None:
    """In 16 bits rounding may choose another expert for a token: of one text here, of twelve."""
    model = mixture("mixtral").to(torch.bfloat16)
    model.config.output_router_logits = False
    fewbits.convert(model, "qlora_nf4")
    model = ready(model)
    worst = 0.0
    for seed in (1, 6):
        loop._STATES.pop(model, None)
        model.generate(tokens(3, 20, seed=seed), do_sample=False, max_new_tokens=3)
        assert not decoding_of(model).refused
        worst = max(worst, decoding_of(model).apart)
    assert worst < 0.02 and steps


def test_what_is_known_not_to_work() -> None:
    model = tiny("gemma2")
    assert why_no_model_step(model) == "the model is not on one GPU"
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert why_no_model_step(model) == "model.layers.0 has hooks, which a CUDA graph would not call"
    handle.remove()
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "depends on the length" in why_no_model_step(model)


def test_a_wait_is_found_and_numbers_of_the_host_are_not() -> None:
    x = torch.arange(4)
    with HostReads(x.device):
        assert (x + 1).shape == (4,)
        for wait in (lambda: bool(x[0]), lambda: x.nonzero(), lambda: x.unique(), lambda: x.sum().item()):
            with pytest.raises(Unsupported, match="asks the host for values"):
                wait()
    with HostReads(torch.device("meta")):
        assert x.sum().item() == 6


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "kind"),
    [("gemma2", None), ("gemma3_text", None), ("phi3", None), ("gemma2", "int4"), ("phi3", "int8/fp8")],
)
def test_a_graph_gives_the_tokens_of_the_plain_loop(family: str, kind: str | None) -> None:
    model = ready(tiny(family).cuda())
    for rows, length in ((3, 20), (1, 9), (2, 40), (3, 30)):
        ids, words = tokens(rows, length).cuda(), {}
        if kind:
            words = {"kv_cache": {"name": kind, "newest": 5}}
        own = {"past_key_values": PackedCache(model.config, words["kv_cache"])} if kind else {}
        ours = model.generate(ids, **GREEDY, **words)
        assert torch.equal(ours, type(model).generate(model, ids, **GREEDY, **own))
    step = decoding_of(model).step
    assert (
        isinstance(step, ModelStep) and sorted(step.graphs) == [1, 2, 3] and bool(step.packed) == bool(kind)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [(torch.float32, None), (torch.float16, None), (torch.bfloat16, None), (torch.bfloat16, "qlora_nf4")],
)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_graph_of_experts_gives_the_tokens_of_the_plain_loop(
    family: str, dtype: torch.dtype, recipe: str | None
) -> None:
    """By transformers' default and by ours; in 16 bits a text may part from the other at a tie."""
    model = mixture(family).to("cuda", dtype)
    model.config.output_router_logits = False
    if recipe:
        fewbits.convert(model, recipe)
    model = ready(model)
    for rows, length in ((3, 20), (1, 9), (6, 30)):
        ids = tokens(rows, length).cuda()
        ours, theirs = model.generate(ids, **GREEDY), type(model).generate(model, ids, **GREEDY)
        assert isinstance(decoding_of(model).step, ModelStep), decoding_of(model).refused
        assert float((ours == theirs).float().mean()) > (0.999 if dtype == torch.float32 else 0.8)


@pytest.mark.gpu
def test_a_wait_on_a_gpu_is_found_before_anything_is_recorded() -> None:
    model = ready(tiny("gemma2").cuda())
    model.model.layers[1].mlp = _Asks(model.model.layers[1].mlp)
    ids = tokens(2, 20).cuda()
    assert torch.equal(model.generate(ids, **GREEDY), type(model).generate(model, ids, **GREEDY))
    assert "asks the host" in decoding_of(model).refused
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.multinomial(torch.ones(3, device="cuda"), 1).item() in range(3)
