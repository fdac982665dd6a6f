"""A pytest plugin that runs the suites of PEFT and TRL over packed bases, without the hub.

* ``--base nf4`` or ``--base int8``: whatever model a test gives to PEFT has its plain linears packed first,
  the same way each time; ``--base plain`` leaves it as it is, which is the peer alone, and
  ``--base nf4-decoded`` makes it plain linears of the rounded numbers, which is the peer alone over those.
* ``--layers fewbits``: configurations of LoRA go through `fewbits.lora_config`'s registration, so that our
  layers are put over linears; ``--layers peft`` leaves PEFT's own.
* Names on the hub stand for tiny random models, built once a session from a config of the family in the name.

Only the process of the tests is changed. See README.md beside this file for the commands.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_suites.compare import is_open
from peer_suites.hub import serve_names
from peer_suites.packed import keep_merges, leave_stored_whole, pack_model, wrap_peft
from peer_suites.record import Recorder, read

_TRAINERS = pytest.StashKey[bool]()


def pytest_addoption(parser: Any) -> None:
    """The plugin's options."""
    group = parser.getgroup("fewbits")
    bases = ("plain", "nf4", "int8", "nf4-decoded", "int8-decoded")
    group.addoption("--base", choices=bases, default="plain")
    group.addoption("--layers", choices=("peft", "fewbits"), default="peft")
    group.addoption("--every", type=int, default=1, help="of PEFT's tests of LoRA, only each n-th")
    group.addoption("--record", type=Path, help="write each test's outcome there, one line of JSON a test")
    group.addoption("--resume", action="store_true", help="keep the record, and run what it lacks")
    group.addoption(
        "--unrounded-merges", action="store_true", help="multiply by what a merge had before rounding"
    )
    group.addoption(
        "--ignored-states",
        action="store_true",
        help="tests' FSDP1 leaves stored weights whole, as docs/ says",
    )
    group.addoption("--failed-in", type=Path, help="only the tests that failed in this record, unexplained")


def pytest_configure(config: Any) -> None:
    """Before any module of tests is imported."""
    folder = Path(tempfile.mkdtemp(prefix="peer-suites-"))
    serve_names(folder, lambda model: _pack_loaded(config, model))
    _stand_in_for_names()
    notes: dict[str, Any] = {}
    if config.getoption("--record"):
        recorder = Recorder(config.getoption("--record"), notes, keep=config.getoption("--resume"))
        config.pluginmanager.register(recorder)
    keep_merges(notes, config.getoption("--unrounded-merges"))
    if config.getoption("--base") != "plain" or config.getoption("--layers") != "peft":
        wrap_peft(config.getoption("--base"), config.getoption("--layers") == "fewbits")


def _pack_loaded(config: Any, model: Any) -> None:
    """Pack a loaded model, for tests of trainers: those list its parameters before PEFT sees it."""
    from fewbits.families.catalog import SPECS
    from fewbits.models.loading.in_memory import convert

    base = config.getoption("--base")
    if base == "plain" or not config.stash.get(_TRAINERS, False):
        return
    if base in ("nf4", "int8") and model.config.model_type in SPECS and "CausalLM" in type(model).__name__:
        convert(model, {"nf4": "qlora_nf4", "int8": "int8"}[base])
    else:
        pack_model(model, base)


def _stand_in_for_names() -> None:
    """Let TRL's tests of another version be imported: a test that uses a private name that is gone skips."""
    try:
        modules = [importlib.import_module(f"trl.{name}") for name in ("import_utils", "trainer.sft_trainer")]
    except ImportError:
        return

    def stand_in(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("is_"):
            return lambda *args, **kwargs: False
        return lambda *args, **kwargs: pytest.skip(f"this TRL has no {name}")

    for module in modules:
        module.__getattr__ = stand_in  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Of PEFT's parametrised tests, those of LoRA; the other methods share their functions."""
    import peft

    config.stash[_TRAINERS] = any("_trainer.py" in item.nodeid for item in items)
    _pack_when_built(items, config.getoption("--base"))
    if config.getoption("--ignored-states"):
        for module in {getattr(item, "module", None) for item in items} - {None}:
            if hasattr(module, "FSDP"):
                module.FSDP = leave_stored_whole(module.FSDP)
    kept = list(items)
    if any("test_custom_models" in item.nodeid or "test_decoder_models" in item.nodeid for item in items):
        kept = [item for item in items if _is_of_lora(item, peft.LoraConfig)][:: config.getoption("--every")]
    if config.getoption("--failed-in"):
        rows = read(config.getoption("--failed-in"))
        failed = {test for test, row in rows.items() if row["outcome"] == "failed" and is_open(row)}
        kept = [item for item in items if item.nodeid in failed]
    if config.getoption("--resume"):
        done = read(config.getoption("--record"))
        kept = [item for item in kept if item.nodeid not in done]
    chosen = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept


def _pack_when_built(items: list[Any], base: str) -> None:
    """Pack what the tests' own classes build, before a test compares with it."""

    def packed(build: Any) -> Any:
        @functools.wraps(build)
        def packed_build(*args: Any, **kwargs: Any) -> Any:
            model = build(*args, **kwargs)
            pack_model(model, base)
            return model

        return packed_build

    for module in {getattr(item, "module", None) for item in items} - {None}:
        for kind in list(vars(module).values()):
            if (
                isinstance(kind, type)
                and issubclass(kind, torch.nn.Module)
                and kind.__module__ == module.__name__
            ):
                kind.__init__ = _packing(kind, base)
    for owner in {getattr(item, "cls", None) for item in items} - {None}:
        kind = getattr(owner, "transformers_class", None)
        if kind is not None and not getattr(kind, "_packs", False):
            kind.from_pretrained, kind._packs = packed(kind.from_pretrained), True
        if hasattr(owner, "resolve_model_cls"):
            owner.resolve_model_cls = packed(owner.resolve_model_cls)


def _packing(kind: type, base: str) -> Any:
    """The ``__init__`` of a model that a module of tests defines; the outermost one packs at its end."""
    init = kind.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def packed_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self) is kind:
            pack_model(self, base)

    return packed_init


def _is_of_lora(item: Any, kind: type) -> bool:
    if hasattr(item, "callspec") and "config_cls" in item.callspec.params:
        return item.callspec.params["config_cls"] is kind
    return "lora" in item.name.lower()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
