"""Which tile a kernel takes: measured here, shipped, the rule's; and `fewbits bench tune`, which measures."""

from __future__ import annotations

import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fewbits.bench import sweeps as sweeps_module
from fewbits.bench import tune as tune_module
from fewbits.bench.measure import Quantiles
from fewbits.bench.sweeps import Sweep, Widths, sweeps
from fewbits.bench.tune import chosen, main, timed
from fewbits.errors import Unsupported
from fewbits.kernels.decoder.gated_lora_backward_triton import SAFE_TILE
from fewbits.kernels.launch import tuning
from fewbits.kernels.launch.jit import RowTile
from tests.kernels.machine_code import ARCHITECTURES

pytest.importorskip("triton")
RULE = RowTile(1, 4096, 4)
HERE: Any = types.SimpleNamespace(
    is_cuda=True, device=torch.device("cuda", 0)
)  # stands for a tensor on a GPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A GPU's name and capability, and an empty cache folder."""
    facts = types.SimpleNamespace(name="NVIDIA H200", capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: facts.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: facts.capability)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    tuning.tiles_of.cache_clear()
    yield facts
    tuning.tiles_of.cache_clear()


def another_process() -> None:
    tuning.tiles_of.cache_clear()


def test_every_architecture_has_a_table() -> None:
    assert set(tuning.SHIPPED) == set(ARCHITECTURES)


def test_a_cpu_takes_the_rule() -> None:
    assert tuning.tile_for("rmsnorm_forward", (4096, 2), torch.empty(0), RULE) is RULE


def test_shipped_for_the_architecture(gpu: Any) -> None:
    assert tuning.tile_for("gated_lora", (16,), HERE, SAFE_TILE) == (64, 64, 4, 16, 3)
    another_process()
    gpu.capability = (10, 0)
    assert tuning.tile_for("gated_lora", (16,), HERE, SAFE_TILE) is SAFE_TILE


def test_what_was_measured_is_found_by_a_later_process_on_the_same_gpu_only(gpu: Any) -> None:
    path = tuning.keep(0, {"rmsnorm_forward 4096 2": (2, 4096, 8)})
    assert path is not None and path.is_file()
    tuning.keep(0, {"rope 64": (16, 2, 4)})  # beside what is there
    another_process()
    found = tuning.tile_for("rmsnorm_forward", (4096, 2), HERE, RULE)
    assert found == RowTile(2, 4096, 8) and isinstance(found, RowTile)
    assert tuning.tile_for("rmsnorm_forward", (2048, 2), HERE, RULE) is RULE
    assert set(tuning.measured(0)) == {"rmsnorm_forward 4096 2", "rope 64"}
    another_process()
    gpu.name = "NVIDIA B200"
    assert tuning.tile_for("rmsnorm_forward", (4096, 2), HERE, RULE) is RULE


@pytest.mark.parametrize(
    "text", ["{", "", "[]", "5", "null", "\udcff", "[" * 100_000, '{"rope 64": 5}', '{"rope 64": ["x"]}',
             '{"rope 64": [-1, 2, 4]}', '{"rope 64": [1e400, 2, 4]}', '{"rope 64": []}', '{"rope 64": {}}'],
)  # fmt: skip
def test_a_damaged_table_is_left_out_with_a_warning(gpu: Any, text: str) -> None:
    path = tuning.keep(0, {"rope 64": (16, 2, 4)})
    assert path is not None
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match="is damaged"):
        assert tuning.measured(0) == {}


@pytest.mark.parametrize("tile", [(2,), (2, 4096, 8, 1), (0, 4096, 8), (2, 4096, 0)])
def test_a_tile_of_another_kind_gives_way_to_the_rule(gpu: Any, tile: tuple[int, ...]) -> None:
    tuning.keep(0, {"rmsnorm_forward 4096 2": tile})
    assert tuning.tile_for("rmsnorm_forward", (4096, 2), HERE, RULE) is RULE


def test_no_folder_keeps_nothing(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert tuning.keep(0, {"rope 64": (16, 2, 4)}) is None and tuning.measured(0) == {}


def sweep_of(run: Any, out: torch.Tensor, tiles: list[tuple[int, ...]]) -> Sweep:
    exact = torch.ones(2, 4)
    return Sweep("k", "k", 32, 1e-3, RULE, tiles, run, (out,), (exact,))


def test_a_wrong_tile_and_one_that_does_not_fit_are_not_timed() -> None:
    out = torch.empty(4, 4)
    ran = []

    def run(tile: RowTile) -> None:
        if tile.block_m == 3:
            raise RuntimeError("out of resource: shared memory")
        out[:2] = 2.0 if tile.block_m == 2 else 1.0
        if tile.block_m != 4:  # writes half of the rows
            out[2:] = 1.0
        ran.append(tile)

    sweep = sweep_of(run, out, [(2, 8, 4), (3, 8, 4), (4, 8, 4), (5, 8, 4)])
    times, refused = timed(sweep, lambda variant, repeats: [(variant()(), 1.0)[1]] * repeats, 1)
    assert list(times) == [tuple(RULE), (5, 8, 4)] and len(refused) == 3
    assert ran[-1] == RowTile(5, 8, 4)


def test_only_a_clear_winner_is_kept() -> None:
    sweep = sweep_of(None, torch.empty(0), [])
    rule = tuple(RULE)

    def us(value: float) -> Quantiles:
        return Quantiles(value - 1, value, value + 1)

    assert chosen(sweep, {rule: us(100.0), (2, 8, 4): us(90.0)}) == (2, 8, 4)
    assert chosen(sweep, {rule: us(100.0), (2, 8, 4): us(98.0)}) is None
    assert chosen(sweep, {rule: us(100.0), (2, 8, 4): Quantiles(80.0, 90.0, 110.0)}) is None
    assert chosen(sweep, {(2, 8, 4): us(98.0)}) == (2, 8, 4)
    assert chosen(sweep, {}) is None


@pytest.mark.interpret
def test_every_sweep_runs_the_kernel_that_it_names(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rule's tile; a value that is wrong or missing would show."""
    monkeypatch.setattr(sweeps_module, "_ROWS", 16)
    if kernel_device == "cpu":  # the interpreter multiplies bfloat16's bits
        monkeypatch.setattr(sweeps_module, "_DTYPE", torch.float16)
    widths = Widths(tokens=16, hidden=64, intermediate=64, heads=2, kv_heads=1, head=32)
    made = list(sweeps(widths, torch.device(kernel_device)))
    assert len({sweep.key for sweep in made}) == len(made) == 12
    for sweep in made:
        # the interpreter cuts off bits where a GPU rounds; E4M3 has 4 left
        cut = 2**-3 if kernel_device == "cpu" and sweep.outputs[0].element_size() == 1 else 0.0
        assert sweep.error(sweep.rule) <= sweep.tolerance + cut, sweep.title
        assert all(len(tile) == len(sweep.rule) for tile in sweep.tiles), sweep.title


def few_of(made: Any, *args: Any) -> Any:
    return (replace(sweep, tiles=sweep.tiles[:3]) for sweep in made(*args))


@pytest.mark.gpu
def test_it_tunes_this_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sweeps_module.WIDTHS, "8b", Widths(512, 1024, 2048, 16, 8, 64))
    tuning.tiles_of.cache_clear()
    some = partial(few_of, tune_module.sweeps)
    monkeypatch.setattr(tune_module, "sweeps", some)
    assert main(["--rounds", "1", "--op", "rmsnorm"]) == 0
    kept = tuning.measured(torch.cuda.current_device())
    assert tuning.tiles_of(torch.cuda.current_device()).items() >= kept.items()
    tuning.tiles_of.cache_clear()


def test_without_a_gpu_one_sentence_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(Unsupported, match="no GPU is here"):
        main([])
