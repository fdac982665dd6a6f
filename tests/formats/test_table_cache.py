"""Tables that are kept are plain tensors where they belong, whatever was going on when they were made."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fewbits
from fewbits.formats import table_cache
from fewbits.formats.codebook import NF4, NF4_DQ, Codebook, scale_codes
from fewbits.formats.stochastic import Stochastic
from fewbits.formats.streams import product_tables
from fewbits.formats.tables import midpoints, pairs_table, table
from fewbits.kernels.codec.codebook_tables import codebook_tables, thresholds
from fewbits.kernels.optimizer import adamw
from fewbits.kernels.stochastic import lookup, nibbles
from fewbits.nn import attention_backends

TABLES = (table, midpoints, pairs_table, scale_codes, adamw._guesses, adamw._kernel_tables, adamw._constants)
X = torch.linspace(-3, 3, 4 * 512).view(4, -1)


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    for made in TABLES:
        made.cache_clear()
    yield
    for made in TABLES:
        made.cache_clear()


@pytest.mark.parametrize("format", [NF4, NF4_DQ], ids=lambda f: f.name)
@pytest.mark.parametrize("mode", ["fake", "make_fx", "inference", "default device"])
def test_a_format_works_after_whatever_came_first(format: Codebook, mode: str) -> None:
    if mode == "fake":
        with FakeTensorMode():
            assert format.quantize(torch.empty(4, 512)).codes.shape[0] == 4
    elif mode == "make_fx":
        graph = make_fx(lambda x: format.quantize(x).codes, tracing_mode="fake")(X)
        assert torch.equal(graph(X), format.quantize(X).codes)
    elif mode == "inference":
        with torch.inference_mode():
            format.quantize(X)
    else:
        with torch.device("meta"):
            format.quantize(X).dequantize()
    packed = format.quantize(X)
    assert all(type(part) is Tensor and part.device.type == "cpu" for part in packed.parts.values())
    assert (packed.dequantize(torch.float32) - X).abs().max() < 0.6
    assert not table(NF4.values, X.device).is_inference()


def test_tables_of_kernels_under_another_default_device() -> None:
    options, cpu = Stochastic(), torch.device("cpu")
    with torch.device("meta"):
        made = [*adamw._kernel_tables(cpu).values(), *adamw._constants(0.9, 0.99, 1e-8, 0.1, cpu)]
        made += [scale_codes(cpu), product_tables(options.streams, (0,), cpu)]
        for module in (lookup, nibbles):
            made += module.tables_of(options, (options.streams.length,), 64, cpu) or ()
    assert {x.device.type for x in made if isinstance(x, Tensor)} == {"cpu"}


class Pair(NamedTuple):
    one: Tensor
    other: Tensor | None


def test_the_least_recently_used_go_first_and_the_latest_stays() -> None:
    calls = []

    @table_cache.keep_tables(maxsize=3, max_bytes=4000)
    def made(n: int) -> Pair:
        calls.append(n)
        return Pair(torch.zeros(n, dtype=torch.uint8), None)

    for n in (1000, 2000, 1000, 1500, 1000, 2000):  # 2000 has to go for 1500
        made(n)
    assert calls == [1000, 2000, 1500, 2000]
    made(9000)
    made(9000)
    assert calls[4:] == [9000]
    for n in (1, 2, 3, 4, 1):
        made(n)
    assert calls[5:] == [1, 2, 3, 4, 1]


class OnAGpu(Tensor):
    """A tensor that says it lies on a GPU, whose kernels run later."""

    is_cuda = True
    device = torch.device("cuda", 1)


@dataclass(frozen=True)
class Held:
    """As a class of ours may hold tensors: a cache has to find them."""

    length: int
    inner: Tensor
    function: Callable[[], None] = lambda: None


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda x: x,
        lambda x: Pair(torch.zeros(1), x),
        lambda x: {"a": [x]},
        lambda x: Held(3, x),
    ],
    ids=["tensor", "tuple", "mapping", "object"],
)
def test_nobody_gets_a_table_before_its_stream_has_written_it(
    wrapped: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream that makes it is waited for, once; a second thread waits too, and its stream need not."""
    begun, written = threading.Event(), threading.Event()
    waited, results = list[object](), list[object]()

    class Stream:
        def synchronize(self) -> None:
            begun.set()
            assert written.wait(20)

    def stream_of(device: object) -> Stream:
        waited.append(device)
        return Stream()

    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)

    @table_cache.keep_tables()
    def make(length: int) -> object:
        return wrapped(torch.zeros(length).as_subclass(OnAGpu))

    threads = [threading.Thread(target=lambda: results.append(make(4)), daemon=True) for _ in range(2)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    threads[1].join(0.05)
    assert not results
    written.set()
    for thread in threads:
        thread.join(20)
    assert results[0] is results[1]
    assert waited == [OnAGpu.device]


def test_what_is_kept_for_attention_is_waited_for_too() -> None:
    cpu = torch.device("cpu")
    segments, kept = attention_backends._uniform(2, 5, cpu), attention_backends._plain_block_mask(256, 9, cpu)
    assert [x is segments.cu_seqlens for x in table_cache._tensors(segments)] == [True]
    places = {x.data_ptr() for x in table_cache._tensors(kept)}
    names = (
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
        "q_num_blocks",
        "q_indices",
    )
    assert places >= {getattr(kept.mask, name).data_ptr() for name in names} | {kept.starts.data_ptr()}


@pytest.mark.gpu
def test_cuda_another_stream_reads_a_table_that_was_just_made() -> None:
    @table_cache.keep_tables()
    def make(length: int) -> Tensor:
        torch.cuda._sleep(100_000_000)
        return torch.arange(length, device="cuda").square()

    for length in (1000, 2000, 3000):
        with torch.cuda.stream(torch.cuda.Stream()):
            make(length)
        with torch.cuda.stream(torch.cuda.Stream()):
            copied = make(length).clone()
        torch.cuda.synchronize()  # the test's own copy below is on a third stream
        assert torch.equal(copied.cpu(), torch.arange(length).square())


# Functions, a model without memory, and what NVRTC and the driver give.
NOT_TENSORS = {
    "attention_backends.py:_flex_attention",
    "attention_backends.py:_capped",
    "loss.py:_uncompiled",
}
NOT_TENSORS |= {"model_shapes.py:_kept", "nvrtc.py:*"}


def test_no_other_cache_holds_tensors() -> None:
    """A plain cache whose result is annotated as tensors, tables or masks would hold them; or as anything.

    A cached property ends with its object, which one thread and stream use.
    """
    found = set()
    for path in Path(fewbits.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            if {f"{path.name}:{node.name}", f"{path.name}:*"} & NOT_TENSORS:
                continue
            decorators = [ast.unparse(d) for d in node.decorator_list]
            cached = any(d.startswith(("lru_cache", "cache")) and d != "cached_property" for d in decorators)
            returns = ast.unparse(node.returns) if node.returns else "Any"
            if cached and re.search(r"\bAny$|Tensor|Tables|Mask|Segments|Callable", returns):
                found.add(f"{path.name}:{node.name}")
    assert found == set()


def test_a_captured_step_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph reads the table that the steps before it read; a copy to a GPU could not be captured."""
    made = []

    @table_cache.keep_tables()
    def squares(n: int) -> Tensor:
        made.append(n)
        return torch.arange(n) ** 2

    first = squares(4)
    monkeypatch.setattr(table_cache, "_is_captured", lambda: True)
    assert squares(4) is first and made == [4]
    assert squares(5) is not squares(5) and made == [4, 5, 5]


def test_tables_are_float32_under_another_default_dtype() -> None:
    """transformers builds a model under its own default dtype while a thread of ours loads kernels."""
    device, values = torch.device("cpu"), NF4.values
    expected = codebook_tables(values, device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        thresholds.cache_clear()
        order, fifteen, sixteen = codebook_tables(values, device)
    finally:
        torch.set_default_dtype(before)
    assert order == expected[0] and fifteen.dtype == sixteen.dtype == torch.float32
    assert torch.equal(fifteen, expected[1]) and torch.equal(sixteen, expected[2])
