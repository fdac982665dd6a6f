"""`as_transformer_engine`, and accelerate's FP8 through its Transformer Engine backend, on a CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import types

import pytest
import torch

import fewbits.te as te
from fewbits.errors import Unsupported


def test_their_imports_find_ours_until_it_is_undone() -> None:
    assert importlib.util.find_spec("transformer_engine") is None
    with te.as_transformer_engine() as stand_in:
        import transformer_engine.pytorch as theirs
        from transformer_engine.common.recipe import DelayedScaling, Format
        from transformer_engine.pytorch.fp8 import check_mxfp8_support
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

        assert theirs.Linear is te.Linear and issubclass(te.Linear, TransformerEngineBaseModule)
        assert DelayedScaling is te.recipe.DelayedScaling and Format is te.recipe.Format
        assert check_mxfp8_support() == (True, "") or torch.cuda.is_available()
        assert importlib.metadata.version("transformer-engine") == "2.20.0"
        with pytest.raises(AttributeError, match="has no Nonesuch"):
            theirs.Nonesuch  # noqa: B018
        with pytest.raises(ImportError):
            importlib.import_module("transformer_engine.jax")
        with pytest.raises(Unsupported, match="already stands"):
            te.as_transformer_engine()
    stand_in.undo()
    assert importlib.util.find_spec("transformer_engine") is None
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("transformer-engine")


def test_the_real_one_and_ours_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    with pytest.raises(Unsupported, match="cannot be mixed"):
        te.as_transformer_engine()


def test_importing_fewbits_loads_none_of_it() -> None:
    code = "import fewbits, sys; sys.exit('fewbits.te' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_accelerate_trains_in_fp8_unchanged() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TERecipeKwargs, has_transformer_engine_layers

    with te.as_transformer_engine():
        AcceleratorState._reset_state(True)  # a trainer of another test in this process may have left one
        try:
            handler = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=4, amax_compute_algo="max")
            accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 16)
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer = accelerator.prepare(model, optimizer)
            assert has_transformer_engine_layers(model)
            first = next(m for m in model.modules() if isinstance(m, te.Linear))
            x, target = torch.randn(64, 32), torch.randn(64, 16)
            losses = []
            for _ in range(20):
                loss = torch.nn.functional.mse_loss(model(x).float(), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[-1] < 0.6 * losses[0]
            assert first.fp8_meta["recipe"].amax_history_len == 4
            assert first.fp8_meta["scaling_fwd"].scale[0] != 1  # quantised, by delayed scaling
        finally:
            AcceleratorState._reset_state(True)
