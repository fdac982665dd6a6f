"""Attention: every backend against the definition, forward and gradient; and the definition against
transformers' own masks."""

from __future__ import annotations

from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from fewbits.errors import BadInput, Unsupported
from fewbits.nn import attention_backends
from fewbits.nn.attention import attention, attention_ref, choose_attention
from fewbits.nn.attention_backends import BACKENDS, Pattern, make_block_mask, visible
from fewbits.nn.segments import Segments

CPU = torch.device("cpu")
LENGTHS = [7, 1, 24, 30, 2]  # of 2 x 32 tokens; no segment crosses the rows


def operands(B, S, H, K, D, *, device="cpu", dtype=torch.float64, seed=0):
    """q, k, v as strided views of one buffer, and a gradient of the output."""
    g = torch.Generator().manual_seed(seed)
    qkv = torch.randn(B, S, H + 2 * K, D, generator=g, dtype=torch.float64).to(device, dtype)
    q, k, v = (t.transpose(1, 2).requires_grad_() for t in qkv.split([H, K, K], 2))
    return q, k, v, torch.randn(B, S, H, D, generator=g, dtype=torch.float64).to(device, dtype)


def with_gradients(function, q, k, v, dy, **options):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = function(q, k, v, **options)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dy))


def run(backend, q, k, v, scale=None, causal=True, window=None, soft_cap=None, segments=None):
    """One backend, whatever would be chosen."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return BACKENDS[backend](q, k, v, Pattern(scale, causal, window, soft_cap, segments))


def definition(q, k, v, scale=None, causal=True, window=None, soft_cap=None, segments=None):
    """Token by token and head by head, from the formula."""
    B, H, S, D = q.shape
    scale = D**-0.5 if scale is None else scale
    rows = [(b * S, b * S + S) for b in range(B)] if segments is None else segments.bounds()
    out = torch.empty(B, S, H, D, dtype=q.dtype)
    for (start, end), h in product(rows, range(H)):
        b, g = start // S, h * k.shape[1] // H
        for i in range(start, end):
            low = start if window is None else max(start, i - window + 1)
            high = i + 1 if causal else end if window is None else min(end, i + window)
            at = slice(low - b * S, high - b * S)
            scores = scale * (k[b, g, at] @ q[b, h, i - b * S])
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[b, i - b * S, h] = scores.softmax(0) @ v[b, g, at]
    return out


OPTIONS = [
    {"scale": scale, "causal": causal, "window": window, "soft_cap": cap, "segments": lengths}
    for causal, window, cap, lengths, scale in product(
        (True, False), (None, 5, 100), (None, 3.0), (None, LENGTHS), (None, 0.3)
    )
    if scale is None or window == 5
]


def name_of(options):
    return "-".join(f"{k}={v}" for k, v in options.items() if v is not None and k != "segments") + (
        "-packed" if options["segments"] else ""
    )


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_the_reference_is_the_formula(options):
    q, k, v, _ = operands(2, 32, 4, 2, 8)
    options = {**options, "segments": options["segments"] and Segments.from_lengths(options["segments"])}
    with torch.no_grad():
        torch.testing.assert_close(
            attention_ref(q, k, v, **options), definition(q, k, v, **options), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("H, K, D", [(4, 2, 8), (3, 3, 16), (6, 1, 5)])
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_what_a_cpu_takes_equals_the_reference(options, H, K, D):
    q, k, v, dy = operands(2, 32, H, K, D, seed=H)
    options = {**options, "segments": options["segments"] and Segments.from_lengths(options["segments"])}
    ours = with_gradients(attention, q, k, v, dy, **options)
    want = with_gradients(attention_ref, q, k, v, dy, **options)
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window, soft_cap, packed", list(product((None, 40), (None, 5.0), (False, True))))
def test_flex_equals_the_reference(window, soft_cap, packed):
    """Uncompiled, forward only: that is what torch has on a CPU. More than one block, and no whole ones."""
    q, k, v, _ = operands(2, 170, 4, 2, 16, dtype=torch.float32)
    segments = Segments.from_lengths([100, 1, 69, 170]) if packed else None
    options = {"window": window, "soft_cap": soft_cap, "segments": segments}
    q, k, v = (t.detach() for t in (q, k, v))
    ours = run("flex", q, k, v, **options)
    torch.testing.assert_close(ours, attention_ref(q, k, v, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_more_kinds_of_flex_attention_than_torch_compiles_of_its_own(monkeypatch):
    """After 8 it computes uncompiled, or fails; here reaching that limit is an error."""
    import torch._dynamo

    make = attention_backends._flex_attention.__wrapped__
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled = make(True)
    monkeypatch.setattr(attention_backends, "_flex_attention", lambda _: compiled)
    torch.compiler.reset()
    kinds = product((torch.float32, torch.bfloat16), (1, 2), (None, 5), (None, 5.0))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for dtype, K, window, cap in kinds:
            q, k, v, _ = operands(1, 8, 2, K, 16, dtype=dtype)
            q, k, v = (t.detach() for t in (q, k, v))
            ours = run("flex", q, k, v, window=window, soft_cap=cap)
            want = attention_ref(q, k, v, window=window, soft_cap=cap)
            torch.testing.assert_close(ours, want, rtol=2e-2, atol=2e-2)
    torch.compiler.reset()


@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
@pytest.mark.parametrize("lengths", [[640], [128, 512], [3, 125, 129, 40, 343], [1] * 640, [500, 77]])
def test_block_masks_list_exactly_the_blocks_that_are_seen(lengths, window):
    segments = Segments.from_lengths(lengths)
    T = segments.total_tokens
    mask = make_block_mask(T, window, segments.starts())
    blocks = -(-T // 128)
    padded = torch.zeros(blocks * 128, blocks * 128, dtype=torch.bool)
    padded[:T, :T] = visible(T, Pattern(1.0, True, window, None, None), CPU, segments.starts())
    tiles = padded.view(blocks, 128, blocks, 128).transpose(1, 2)
    listed, full = (
        torch.zeros(blocks, blocks, dtype=torch.bool),
        torch.zeros(blocks, blocks, dtype=torch.bool),
    )
    for to, count, indices in (
        (listed, mask.kv_num_blocks, mask.kv_indices),
        (full, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for row in range(blocks):
            to[row, indices[0, 0, row, : count[0, 0, row]].long()] = True
    assert torch.equal(listed | full, tiles.any(-1).any(-1)) and not (listed & full).any()
    complete = tiles.all(-1).all(-1)
    assert not (full & ~complete)[: T // 128].any() and torch.equal(full[: T // 128], complete[: T // 128])


def test_block_masks_are_made_once_for_all_layers_of_a_batch():
    q, k, v, _ = operands(1, 64, 2, 2, 8, dtype=torch.float32)
    segments = Segments.from_lengths([40, 24])
    q, k, v = (t.detach() for t in (q, k, v))
    run("flex", q, k, v, segments=segments)
    first = attention_backends._MASKS[segments.cu_seqlens][None]
    again = Segments.from_keywords(segments.keywords(), 64)
    run("flex", q, k, v, segments=again)
    assert attention_backends._MASKS[segments.cu_seqlens][None] is first


@pytest.mark.parametrize("poison", [float("nan"), 1e30, float("inf")])
@pytest.mark.parametrize("window, soft_cap", [(None, None), (5, None), (None, 3.0)])
def test_rows_do_not_see_their_neighbours(poison, window, soft_cap):
    q, k, v, dy = operands(2, 32, 4, 2, 8, dtype=torch.float32)
    segments = Segments.from_lengths(LENGTHS)
    options = {"window": window, "soft_cap": soft_cap, "segments": segments}
    want = with_gradients(attention, q, k, v, dy, **options)
    q, k, v = (t.detach().clone() for t in (q, k, v))
    for t in (q, k, v):
        t[0, :, 8:32] = poison  # the third segment
    got = with_gradients(attention, q, k, v, dy, **options)
    for a, b, at in zip(got, want, (1, 2, 2, 2), strict=True):
        a, b = (t.movedim(at, 1).flatten(0, 1) for t in (a, b))
        clean = [*range(8), *range(32, 64)]
        assert torch.equal(a[clean], b[clean])


def transformers_mask(config, sliding, positions, length):
    from transformers import masking_utils

    make = masking_utils.create_sliding_window_causal_mask if sliding else masking_utils.create_causal_mask
    return make(
        config=config,
        inputs_embeds=torch.zeros(1, length, 4),
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )


@pytest.mark.parametrize("window", [1, 2, 5, 23, 24, 25])
@pytest.mark.parametrize("packed", [False, True])
def test_windows_and_segments_are_those_of_transformers(window, packed):
    from tests.models.tiny import tiny_config

    config = tiny_config("mistral", sliding_window=window)
    config._attn_implementation = "eager"
    lengths = [5, 1, 18] if packed else [24]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    for sliding in (True, False):
        theirs = transformers_mask(config, sliding, positions, 24)[0, 0] == 0
        pattern = Pattern(1.0, True, window if sliding else None, None, None)
        ours = visible(24, pattern, CPU, Segments.from_lengths(lengths).starts() if packed else None)
        assert torch.equal(ours, theirs)


def test_bad_input_is_refused():
    q, k, v, _ = operands(2, 8, 4, 2, 8)
    with pytest.raises(BadInput, match="K a divisor of H"):
        attention(q, k[:, :1].expand(2, 3, 8, 8), v[:, :1].expand(2, 3, 8, 8))
    with pytest.raises(BadInput, match="padding, too"):
        attention(q, k, v, segments=Segments.from_lengths([8, 7]))
    with pytest.raises(Unsupported, match="does not do soft_cap"):
        run("sdpa", q, k, v, soft_cap=2.0)
    with pytest.raises(Unsupported, match="does not do causal"):
        run("flex", q, k, v, causal=False)


HOPPER, TURING = (9, 0), (7, 5)


@pytest.mark.parametrize(
    "capability, dtype, head_dim, windowed, capped, packed, name, reason",
    [
        (None, torch.float32, 64, False, False, False, "sdpa", "CPU"),
        (None, torch.float32, 64, True, False, True, "sdpa", "one segment after another"),
        (None, torch.float32, 64, False, True, False, "reference", "CPU"),
        (HOPPER, torch.bfloat16, 128, False, False, False, "sdpa", "plain"),
        (HOPPER, torch.bfloat16, 128, False, False, True, "varlen", "packed rows"),
        (HOPPER, torch.bfloat16, 128, True, False, True, "varlen", "packed rows and a sliding window"),
        (HOPPER, torch.bfloat16, 256, True, True, True, "flex", "capped"),
        (HOPPER, torch.float32, 128, False, False, True, "sdpa", "no kernel for float32"),
        (HOPPER, torch.bfloat16, 264, True, False, False, "sdpa", "heads of 264"),
        (HOPPER, torch.float16, 100, True, False, False, "sdpa", "heads of 100"),
        (TURING, torch.float16, 64, False, False, True, "sdpa", "capability 8.0"),
        (TURING, torch.float16, 64, False, True, True, "reference", "capability 8.0"),
    ],
)
def test_the_choice(monkeypatch, capability, dtype, head_dim, windowed, capped, packed, name, reason):
    from fewbits.nn import attention as module

    monkeypatch.setattr(module, "_is_found", lambda package: False)
    choice = module._choose(capability, dtype, head_dim, windowed, capped, packed)
    assert choice.name == name and choice.name in BACKENDS and reason in choice.reason


def test_installed_packages_are_taken_and_called(monkeypatch):
    """Stand-ins with the packages' signatures: the arguments arrive, the window counts the token itself."""
    import sys

    from fewbits.nn import attention as module

    calls = []

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        calls.append(options)
        own = Segments(cu_q, max_q, q.shape[0])
        window = options["window_size"][0] + 1 or None
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = attention_ref(
            q,
            k,
            v,
            scale=options["softmax_scale"],
            window=window,
            soft_cap=options.get("softcap"),
            segments=own,
        )
        return (out[0], None)

    package = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    monkeypatch.setattr(module, "_is_found", lambda package: True)
    assert module._choose(HOPPER, torch.bfloat16, 128, False, False, True).name == "flash3"
    assert module._choose((8, 0), torch.bfloat16, 128, False, False, True).name == "varlen"
    assert module._choose(HOPPER, torch.bfloat16, 128, False, True, False).name == "flash2"
    q, k, v, _ = operands(2, 32, 4, 2, 8)
    for backend, options in (
        ("flash3", {"window": 5, "segments": Segments.from_lengths(LENGTHS)}),
        ("flash3", {}),
        ("flash2", {"soft_cap": 3.0, "window": 9}),
    ):
        ours = run(backend, q, k, v, **options)
        torch.testing.assert_close(ours, attention_ref(q, k, v, **options))
    assert [call["window_size"] for call in calls] == [(4, 0), (-1, -1), (8, 0)]
    assert all(call["causal"] for call in calls)


def test_a_window_as_long_as_the_rows_is_none():
    assert choose_attention(CPU, torch.float32, 64, window=512, seq_len=512) == choose_attention(
        CPU, torch.float32, 64
    )
    q, k, v, _ = operands(2, 32, 4, 2, 8)
    assert torch.equal(attention(q, k, v, window=32), attention(q, k, v))


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"soft_cap": 3.0}], ids=str)
def test_one_compiled_graph_gives_the_same(options):
    q, k, v, dy = operands(2, 32, 4, 2, 8, dtype=torch.float32)
    compiled = torch.compile(partial(attention, **options), backend="aot_eager", fullgraph=True)
    ours, want = (with_gradients(f, q, k, v, dy) for f in (compiled, partial(attention, **options)))
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b)


GPU_CASES = [
    ("sdpa", {}),
    ("varlen", {}),
    ("varlen", {"window": 100}),
    ("varlen", {"packed": True}),
    ("varlen", {"packed": True, "window": 100, "scale": 0.2}),
    ("sdpa", {"packed": True, "window": 100}),
    ("reference", {"packed": True, "soft_cap": 5.0}),
]
FLEX_CASES = [  # each is compiled
    ("flex", {"soft_cap": 5.0}, 256),
    ("flex", {"packed": True, "soft_cap": 5.0, "window": 100}, 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend, options, D", [(*case, D) for case in GPU_CASES for D in (64, 96, 128, 256)] + FLEX_CASES
)
def test_cuda_backends_equal_the_reference(backend, options, D):
    """Both round to bfloat16 at their ends; the probabilities, too, are rounded once before the product."""
    q, k, v, dy = operands(2, 384, 8, 2, D, device="cuda", dtype=torch.bfloat16)
    options = dict(options)
    if options.pop("packed", False):
        options["segments"] = Segments.from_lengths([100, 1, 283, 130, 254], device="cuda")
    ours = with_gradients(partial(run, backend), q, k, v, dy, **options)
    want = with_gradients(attention_ref, *(t.float() for t in (q, k, v, dy)), **options)
    for a, b in zip(ours, want, strict=True):
        assert (a.float() - b).norm() <= 1e-2 * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("window", [None, 100])
def test_cuda_rows_do_not_see_their_neighbours(poison, window):
    q, k, v, dy = operands(1, 512, 8, 2, 128, device="cuda", dtype=torch.bfloat16)
    segments = Segments.from_lengths([100, 130, 282], device="cuda")
    want = with_gradients(attention, q, k, v, dy, window=window, segments=segments)
    q, k, v = (t.detach().clone(memory_format=torch.preserve_format) for t in (q, k, v))
    for t in (q, k, v):
        t[:, :, 100:230] = poison
    got = with_gradients(attention, q, k, v, dy, window=window, segments=segments)
    for a, b, at in zip(got, want, (1, 2, 2, 2), strict=True):
        a, b = (t.movedim(at, 0) for t in (a, b))
        assert torch.equal(a[:100], b[:100]) and torch.equal(a[230:], b[230:])


@pytest.mark.gpu
@pytest.mark.parametrize("packed, window", [(False, None), (True, None), (True, 64), (False, 64)])
def test_one_compiled_graph_gives_the_same_on_a_gpu(packed, window):
    q, k, v, dy = operands(1, 256, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
    cu = Segments.from_lengths([100, 156], device="cuda").cu_seqlens

    def call(q, k, v):
        return attention(q, k, v, window=window, segments=Segments(cu, 192, 256) if packed else None)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for a, b in zip(*(with_gradients(f, q, k, v, dy) for f in (compiled, call)), strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()


@pytest.mark.gpu
def test_new_lengths_compile_nothing_and_wait_for_nothing():
    from torch._dynamo.utils import counters

    q, k, v, dy = operands(1, 1024, 8, 2, 64, device="cuda", dtype=torch.bfloat16)

    def step(lengths, **options):
        segments = Segments.from_lengths([*lengths, 1024 - sum(lengths)], device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            with_gradients(attention, q, k, v, dy, segments=segments, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for options in ({}, {"window": 64}, {"soft_cap": 5.0}):
        torch.cuda.synchronize()
        segments = Segments.from_lengths([600, 424], device="cuda")
        with_gradients(attention, q, k, v, dy, segments=segments, **options)
        before = counters["stats"]["unique_graphs"]
        for lengths in ([5, 700], [100] * 5, [1, 2, 3, 4, 900]):
            step(lengths, **options)
        assert counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("around", ["fake", "inference", "another device"])
def test_a_block_mask_that_was_made_elsewhere_is_good_for_training(around: str) -> None:
    """Those of rows without segments are kept, for all layers and batches."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    pattern = attention_backends.Pattern(1.0, True, None, None, None)
    cpu = torch.device("cpu")
    attention_backends._plain_block_mask.cache_clear()
    modes = {"fake": FakeTensorMode, "inference": torch.inference_mode}
    with modes.get(around, lambda: torch.device("meta"))():
        attention_backends._block_mask(pattern, 256, cpu)
    mask = attention_backends._block_mask(pattern, 256, cpu)
    assert type(mask.kv_num_blocks) is torch.Tensor and mask.kv_num_blocks.device == cpu
    assert not mask.kv_num_blocks.is_inference()
    q = torch.randn(1, 2, 256, 16)
    assert attention_backends.flex(q, q, q, pattern).isfinite().all()
    assert attention_backends._block_mask(pattern, 256, cpu) is mask
