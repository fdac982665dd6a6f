"""nn.DataParallel around a fused model: refused in one sentence, before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import replicate as replicate_module

from fewbits.decoder.fuse import fuse, unfuse
from fewbits.errors import Unsupported
from tests.models.test_fused import adapted, loss_and_gradients
from tests.models.tiny import tokens

replicate = replicate_module.replicate if hasattr(replicate_module, "replicate") else replicate_module


@pytest.fixture
def replicas_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own replication, with two "devices" that are both the CPU: copies through autograd."""
    import sys

    module = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(module, "_get_device_index", lambda device, _: device)
    monkeypatch.setattr(
        module,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [
            [t.detach() if detach else t.view_as(t) for t in tensors] for _ in devices
        ],
    )


@pytest.mark.parametrize("part", ["", "base_model.model", "base_model.model.model.layers.0"])
@pytest.mark.usefixtures("replicas_on_a_cpu")
def test_copies_of_a_fused_model_are_refused(part: str) -> None:
    model, ids = adapted("llama"), tokens(2, 12)
    fuse(model)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if part.endswith("0"):
        batch = {"hidden_states": torch.ones(1, 4, 64)}
    copies = replicate(model.get_submodule(part), [0, 1])
    for copy in copies:
        with pytest.raises(Unsupported, match=r"nn\.DataParallel .* start one process for each GPU"):
            copy(**batch)


@pytest.mark.usefixtures("replicas_on_a_cpu")
def test_copies_of_a_model_that_is_not_fused_learn_the_same() -> None:
    """Packed weights and adapters are found in the copies as any parameter is; `unfuse` leaves no hook."""
    model, ids = adapted("llama"), tokens(2, 12)
    loss, need = loss_and_gradients(model, ids)
    before = [dict(m._forward_pre_hooks) for m in model.modules()]
    fuse(model)
    unfuse(model)
    assert [dict(m._forward_pre_hooks) for m in model.modules()] == before
    model.zero_grad()
    copies: list[nn.Module] = replicate(model, [0, 1])
    losses = [copy(input_ids=row[None], labels=row[None]).loss for copy, row in zip(copies, ids, strict=True)]
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(torch.stack(losses).mean(), loss)
    for name, parameter in model.named_parameters():
        if name in need:
            torch.testing.assert_close(parameter.grad, need[name], rtol=1e-4, atol=1e-6)


@pytest.mark.multi
def test_data_parallel_on_two_gpus() -> None:
    model, ids = adapted("llama").cuda(), tokens(2, 12).cuda()
    fuse(model)
    with pytest.raises(Unsupported, match="start one process for each GPU"):
        nn.DataParallel(model, [0, 1])(input_ids=ids, labels=ids)
