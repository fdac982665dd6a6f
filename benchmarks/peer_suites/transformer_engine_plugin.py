"""A pytest plugin that runs Transformer Engine's own ``tests/pytorch`` over `fewbits.te`, on a CPU too.

* ``transformer_engine`` is `fewbits.te`, by its own `as_transformer_engine`. A name that it lacks, and all of
  the C++ module ``transformer_engine_torch``, is a stand-in: a test that calls one is skipped, and the reason
  names it.
* Without a GPU the device "cuda" means the CPU; what only a GPU has (streams, graphs, events) skips the test.
* Products of 16 bits sum in float32, unless ``--torch-halves`` leaves them as a CPU has them.
* ``--every N`` runs each N-th test of a file; ``--budget S`` begins no test after S seconds.

At the end of each file's run one line of JSON says what became of the tests: see README.md beside this file.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peer_suites import transformer_engine_attention as theirs
from torch.overrides import TorchFunctionMode

import fewbits.te as te
from fewbits.formats.base import Packed
from fewbits.te import drop_in, support
from fewbits.te.arithmetic.float4 import Float4
from fewbits.te.arithmetic.scaling import updated_scale
from fewbits.te.products import product
from fewbits.te.tensors.operand import Operand

_RUNNING = {"test": False}
_STARTED = time.monotonic()
_OUTCOMES: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
_REASONS: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)


class _Missing(type):
    """The class of stand-ins: classes, so that tests may use them in isinstance and as bases."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if _RUNNING["test"]:
            pytest.skip(f"reaches into {cls.__name__}")
        return args[0] if len(args) == 1 and callable(args[0]) else cls

    def __iter__(cls) -> Any:
        return iter(())

    def __getitem__(cls, key: Any) -> Any:
        return _missing(f"{cls.__name__}[{key}]")

    def __setitem__(cls, key: Any, value: Any) -> None:
        """A switch of something that is not here."""

    def __int__(cls) -> int:
        return -1

    def __lt__(cls, other: Any) -> bool:
        return True

    __le__ = __lt__

    def __gt__(cls, other: Any) -> bool:
        return False

    __ge__ = __gt__

    def __bool__(cls) -> bool:
        return False


_TYPES = {
    torch.uint8: te.DType.kByte,
    torch.float8_e4m3fn: te.DType.kFloat8E4M3,
    torch.float8_e5m2: te.DType.kFloat8E5M2,
    torch.int32: te.DType.kInt32,
    torch.float32: te.DType.kFloat32,
    torch.float16: te.DType.kFloat16,
    torch.bfloat16: te.DType.kBFloat16,
}
_SLOTS = ("INPUT", "WEIGHT", "OUTPUT")
_FORWARD = SimpleNamespace(
    **{
        f"GEMM{n}_{kind}": 3 * n - 3 + i
        for n in (1, 2, 3)
        for i, kind in enumerate(("INPUT", "WEIGHT", "OUTPUT"))
    }
)
_BACKWARD = SimpleNamespace(
    **{f"GRAD_{kind}{n}": 2 * n - 2 + i for n in (1, 2, 3) for i, kind in enumerate(("OUTPUT", "INPUT"))}
)
# Inner names that tests use as words only.
_KNOWN = {
    "TE_DType": _TYPES,
    "TE_DType_To_Torch": {ours: theirs for theirs, ours in _TYPES.items()},
    "QuantizedTensorStorage": type("QuantizedTensorStorage", (), {}),  # a base of their references
    "FusedAttnBackend": theirs.BACKENDS,
    "QKVLayouts": tuple(f"{kind}_{kind}_{kind}" for kind in ("sbhd", "bshd", "thd")),
    "attention_mask_func": lambda scores, mask: scores.masked_fill(mask, -10000.0),
    "gpu_autocast_ctx": lambda enabled=True: torch.autocast("cuda", enabled=enabled),
    "is_in_onnx_export_mode": lambda: False,
    "restore_from_saved": lambda objects, saved: objects,
    "general_gemm": lambda *args, **words: _general_gemm(*args, **words),
    "UNSAFE_PICKLE_EXTRA_STATE_ENV": "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE",
    "convert_thd_to_bshd": theirs.convert_thd_to_bshd,
    "convert_bshd_to_thd": theirs.convert_bshd_to_thd,
    "FP8FwdTensors": _FORWARD,
    "FP8FwdTensorIdx": _FORWARD,
    "FP8BwdTensors": _BACKWARD,
    "FP8BwdTensorIdx": _BACKWARD,
    "_default_sf_compute": lambda amax, scale, largest, margin: updated_scale(amax, scale, largest, margin),
    "get_cudnn_version": lambda: (9, 99, 0),
    "is_module_grouped_tensor_path_supported": lambda recipe, dtype: _has_grouped_path(recipe, dtype),
    "is_non_tn_fp8_gemm_supported": lambda: True,
    "init_method_normal": lambda sigma: lambda tensor: torch.nn.init.normal_(tensor, 0.0, sigma),
    "scaled_init_method_normal": lambda sigma, layers: (
        lambda tensor: torch.nn.init.normal_(tensor, 0.0, sigma / (2.0 * layers) ** 0.5)
    ),
}


def _has_grouped_path(recipe: Any, dtype: torch.dtype) -> bool:
    """What Transformer Engine documents for one parameter of all experts on compute capability 9.0."""
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    return recipe is None or recipe.float8_current_scaling() or recipe.float8_block_scaling()


def _missing(name: str) -> Any:
    return _Missing(name, (), {})


class _StandIn(ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _KNOWN:
            return _KNOWN[name]
        return getattr(te, name) if name == "DType" else _missing(f"{self.__name__}.{name}")


class _ReferenceFinder:
    """Transformer Engine's own references of its formats, in plain torch, from the checkout of the tests."""

    names = ("gemm", "reference_current_scaling", "reference_nvfp4", "reference_utils")
    package = "transformer_engine.pytorch.custom_recipes"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, last = name.rpartition(".")
        known = {self.package: self.names, theirs.PACKAGE: theirs.FILES}
        if last not in known.get(package, ()):
            return None
        place = Path.cwd().parents[1].joinpath(*package.split("."), f"{last}.py")
        return importlib.util.spec_from_file_location(name, place) if place.exists() else None


class _StandInFinder:
    """Whatever else of Transformer Engine, or of libraries its tests want, is asked for."""

    names = ("transformer_engine", "transformer_engine_torch", "nvdlfw_inspect", "nvtx")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] in self.names:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _CpuForCuda(TorchFunctionMode):
    """The device "cuda" means the CPU.

    Attributes:
        widens: `_SLOW_IN_HALF` run in float32. A test that wants two ways to one gradient bit-equal needs
            them as they are: autograd's own products are not reached.
    """

    def __init__(self, widens: bool) -> None:
        super().__init__()
        self.widens = widens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"], integers=True)
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if func == torch.Tensor.is_cuda.__get__:
            return not args[0].is_meta
        if name == "to":
            args = tuple(_cpu(a) for a in args)
        if self.widens and name in _SLOW_IN_HALF and any(_is_half(a) for a in args):
            half = next(a.dtype for a in args if _is_half(a))
            args = tuple(a.float() if _is_half(a) else a for a in args)
            kwargs = {k: a.float() if _is_half(a) else a for k, a in kwargs.items()}
            return func(*args, **kwargs).to(half)
        return func(*args, **kwargs)


# A CPU multiplies numbers of 16 bits slowly, and sums the gradients of a norm's parameters, and losses, in
# bfloat16, up to 10 % from their value in float64. As on a GPU, these sum in float32 and round once.
_SLOW_IN_HALF = (
    "bmm",
    "baddbmm",
    "matmul",
    "__matmul__",
    "linear",
    "scaled_dot_product_attention",
    "layer_norm",
    "cross_entropy",
)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


class _Stream:
    """The one stream of a CPU."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Any arguments."""

    def wait_stream(self, other: Any) -> None:
        """Nothing runs beside anything."""

    wait_event = record_event = synchronize = lambda self, *a, **k: None


def _operand_of_theirs(self: Any, x: Any, *, rows: bool, columns: bool) -> Operand:
    """What one of Transformer Engine's reference quantisers makes of x (M, K), for products of ours."""
    theirs_only = sys.modules.get(f"{_ReferenceFinder.package}.reference_nvfp4")
    if theirs_only is None or not isinstance(self, theirs_only.NVFP4QuantizerRef):
        pytest.skip(f"reaches into {type(self).__name__}")
    self.rowwise_usage, self.columnwise_usage = rows, columns
    q = self.quantize(x.detach())

    def packed(codes: Any, scales: Any, amax: Any, shape: tuple[int, int]) -> Packed:
        kind = Float4(name="nvfp4", by_row=amax.numel() > 1, scale_bound=float(self.nvfp4_e4m3_max))
        amax = amax.reshape(-1, 1) if kind.by_row else amax.reshape(1)
        parts = {"codes": codes.view(torch.uint8), "scales": scales.to(torch.float8_e4m3fn), "amax": amax}
        return Packed(kind, shape, x.dtype, parts)

    M, K = x.shape
    return Operand(
        packed(q.data, q.scale, q.global_amax_row, (M, K)) if rows else None,
        packed(q.data_t, q.scale_t, q.global_amax_col, (K, M)) if columns else None,
    )


class _Saved:
    """Rows that the backward pass keeps as codes, by the names that tests read there."""

    _columnwise_data = None

    def __init__(self, rows: Packed) -> None:
        self.rows, self._rowwise_data = rows, rows.codes

    def dequantize(self, dtype: Any = None) -> torch.Tensor:
        return self.rows.dequantize(dtype or self.rows.dtype)

    def size(self, axis: int) -> int:
        return self.rows.shape[axis]


def _general_gemm(a: Any, b: Any, *, out_dtype: Any, layout: str, bias: Any = None, **words: Any) -> tuple:
    """Their product of plain tensors, a and b as in Fortran: b (M, N) times a (N, K), or b^T times a."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or layout not in ("NN", "NT"):
        pytest.skip("reaches into cpp_extensions.general_gemm")
    if layout == "NN":
        return (product.product(b, a.t(), out_dtype), None, None, None)
    db = None if bias is None else b.sum(0, dtype=torch.float32).to(out_dtype)
    return (product.product(a.t(), b.t(), out_dtype).t(), db, None, None)


def _name_what_a_product_does() -> None:
    """Let the node of a product say by their names what its settings are: tests read them there."""
    ours = product._Product.forward

    def forward(ctx: Any, x: Any, plans: Any, sizes: Any, *parameters: Any) -> Any:
        plan = plans[0]
        ctx.backward_override, ctx.grad_output_quantizer = plan.override, plan.gradient
        ctx.fp8 = plan.input is not None and plan.override is None
        ctx.reduce_and_update_bwd_fp8_tensors = plan.after_backward is not None and plan.override is None
        if plan.override is not None:
            ctx.grad_output_quantizer = None  # which then is not asked
        y = ours(ctx, x, plans, sizes, *parameters)
        if plan.override == "dequantized":
            kept = product._rebuild(ctx.to_save, ctx.plans)
            kept = [_Saved(rows) if isinstance(rows, Packed) else rows for rows in kept]
            ctx.tensor_objects = kept[::2] + kept[1::2]
            if len(plans) == 1:  # after a norm they read more, and then call C++'s: never reached otherwise
                ctx.tensor_objects += [None, None, torch.ones(x.shape[-1]), kept[0], *torch.zeros(2, 1)]
        return y

    product._Product.forward = staticmethod(forward)
    te.LayerNormLinear.bwd_ln_sm_margin = 0  # an argument of C++'s norm, which tests call with it


def _cpu(device: Any, integers: bool = False) -> Any:
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return "cpu" if integers and isinstance(device, int) and not isinstance(device, bool) else device


def _stand_in_for_a_gpu(widens: bool) -> None:
    def needs_gpu(name: str) -> Any:
        def skip(self: Any, *args: Any, **kwargs: Any) -> None:
            pytest.skip(f"needs a GPU: torch.cuda.{name}")

        return type(name, (), {"__init__": skip})  # a class, for type hints

    nothing = (
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
        "set_device",
    )
    for name in nothing:
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    # torch.manual_seed calls manual_seed_all, so that one must not call it back
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    torch.cuda.is_available = lambda: True
    support._EMULATION.set(True)  # the chip that is pretended lacks MXFP8 and NVFP4
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda *a: (9, 0)
    torch.cuda.is_bf16_supported = lambda *a, **k: True
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = (
        lambda *a, **k: torch.get_rng_state(),
        lambda state, *a, **k: torch.set_rng_state(state),
    )
    torch.cuda.memory_allocated = torch.cuda.max_memory_allocated = lambda *a, **k: 0
    torch.cuda.device = lambda *a, **k: contextlib.nullcontext()
    for name in ("Event", "graph", "CUDAGraph"):
        setattr(torch.cuda, name, needs_gpu(name))
    # all work of a CPU is in order: one stream, on which nothing need wait
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *a, **k: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda *a, **k: SimpleNamespace(
        multi_processor_count=1, total_memory=2**35, major=9, minor=0, name="a CPU"
    )
    plain = torch.autocast.__init__
    torch.autocast.__init__ = lambda self, device_type, *a, **k: plain(self, _cpu(device_type), *a, **k)
    support.get_device_compute_capability = lambda: (9, 0)
    te.get_device_compute_capability = support.get_device_compute_capability
    _CpuForCuda(widens).__enter__()


def pytest_addoption(parser: Any) -> None:
    """The plugin's options."""
    group = parser.getgroup("fewbits")
    group.addoption("--every", type=int, default=1, help="each n-th test of a file")
    group.addoption("--budget", type=float, default=0.0, help="seconds after which no test begins")
    group.addoption("--torch-halves", action="store_true", help="products of 16 bits as a CPU has them")
    group.addoption("--rows", type=Path, help="append one line of JSON a file there")


def pytest_configure(config: Any) -> None:
    """Before any module of tests is imported."""
    te.as_transformer_engine()
    ours = drop_in._View.__getattr__

    def or_missing(self: Any, name: str) -> Any:
        if name in _KNOWN:
            return _KNOWN[name]
        place = f"{self.__name__}.{name}"
        if place.removeprefix("transformer_engine.") in drop_in._PLACES:
            return importlib.import_module(place)
        try:
            return ours(self, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            try:
                known = place in sys.modules or name in _ReferenceFinder.names
                return importlib.import_module(place) if known else _missing(place)
            except ImportError:
                return _missing(place)

    drop_in._View.__getattr__ = or_missing
    _name_what_a_product_does()
    te.InferenceParams.cache_manager = SimpleNamespace(print_cache=lambda: None)  # which a test calls
    te.Quantizer.operand = _operand_of_theirs  # quantisers of ours have their own
    drop_in._View.__path__ = []  # so that the finder of stand-ins is asked for what is below a view
    sys.meta_path += [_ReferenceFinder(), _StandInFinder()]
    if not torch.cuda.is_available():
        _stand_in_for_a_gpu(not config.getoption("--torch-halves"))
    os.environ["NVTE_MASKED_SOFTMAX_FUSION"] = "0"  # their softmax in torch
    utils, backends = (importlib.import_module(f"{theirs.PACKAGE}.{name}") for name in ("utils", "backends"))
    theirs.put_beside_ours(utils, backends, _missing)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Take each n-th, and count all."""
    for item in items:
        _OUTCOMES[Path(item.fspath).name]["collected"] += 1
    items[:] = items[:: config.getoption("--every")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> Any:
    """A stand-in skips only while a test runs."""
    budget = item.config.getoption("--budget")
    if budget and time.monotonic() - _STARTED > budget:
        item.session.shouldstop = "the budget is spent"
    _RUNNING["test"] = True
    try:
        return (yield)
    finally:
        _RUNNING["test"] = False


def pytest_runtest_logreport(report: Any) -> None:
    """Count."""
    file = Path(report.fspath).name
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        _OUTCOMES[file][report.outcome] += 1
        if report.skipped:
            _REASONS[file]["skipped: " + str(report.longrepr[2]).removeprefix("Skipped: ")[:90]] += 1
        elif report.failed:
            text = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
            _REASONS[file]["failed: " + text.splitlines()[0][:110]] += 1


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported."""
    if report.failed:
        _REASONS[Path(report.nodeid).name][
            "not collected: " + str(report.longrepr).splitlines()[-1][:110]
        ] += 1


def pytest_sessionfinish(session: Any) -> None:
    """One line a file."""
    for file in {*_OUTCOMES, *_REASONS}:
        row = {"file": file, **_OUTCOMES[file], "reasons": dict(_REASONS[file].most_common(12))}
        target = session.config.getoption("--rows")
        if target:
            with target.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
