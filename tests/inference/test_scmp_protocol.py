"""A bundle of scmp_llm on a model, against their protocol written apart: the same loss to the bit."""

from __future__ import annotations

import json

import pytest
import torch
import transformers.models.llama.modeling_llama as host

from fewbits import sc_matmul
from fewbits.inference.evaluate import TextWindows, Window
from fewbits.inference.stochastic.evaluation import EvalSetting, Ledger, evaluate_setting
from fewbits.recipes.scmp_bundles import read_bundle
from tests.models.tiny import tiny, tokens

OPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qk", "av")
LADDER, CUTS, GATE, T = (96, 64, 32), (0.6, 0.35), 0.3 + 2.0 * 0.25, 140  # more keys than a chunk has


def lengths(metric: torch.Tensor) -> list[int]:
    place = (metric - metric.min()) / (metric.max() - metric.min())
    found = []
    for value in place:
        band = next((n for t, n in zip(CUTS, LADDER, strict=False) if value >= torch.tensor(t)), LADDER[-1])
        found.append(128 if value > torch.tensor(GATE) else band)
    return found


def by_length(a: torch.Tensor, b: torch.Tensor, rows: list[int], chunk_d: int) -> torch.Tensor:
    y = torch.empty(len(a), len(b))
    for length in set(rows):
        at = [i for i, n in enumerate(rows) if n == length]
        y[at] = sc_matmul(
            a[at], b.contiguous(), stoc_len=length, chunk_d=chunk_d, halve_bipolar_stoc_len=True, n_masks=64
        )
    return y


def their_attention(module, q, k, v, mask, scaling, **_):
    _, H, S, D = q.shape
    of_q = lengths(q.reshape(-1, D).abs().amax(-1))
    shared = H // k.shape[1]
    scores = [by_length(q[0, h], k[0, h // shared], of_q[h * S : (h + 1) * S], 0) for h in range(H)]
    weights = (torch.stack(scores)[None] * scaling + mask).softmax(-1)
    of_p = lengths(weights.reshape(-1, S).abs().amax(-1))
    out = [by_length(weights[0, h], v[0, h // shared].T, of_p[h * S : (h + 1) * S], 0) for h in range(H)]
    return torch.stack(out, 1)[None], None


def test_a_bundle_gives_their_loss(tmp_path, monkeypatch):
    stats = {"thresholds": list(CUTS), "metric_mean": 0.3, "metric_std": 0.25}
    table = {"stoc_len_levels": list(LADDER), "operator_defaults": dict.fromkeys(OPS, stats)}
    wrapper = {
        "type": "AdaptiveMPConfig",
        "stoc_len_levels": list(LADDER),
        "escape_gate_k": 2.0,
        "escape_stoc_len": 128,
        "threshold_table_path": "table.json",
    }
    (tmp_path / "table.json").write_text(json.dumps(table))
    (tmp_path / "wrapper.json").write_text(json.dumps(wrapper))
    config = read_bundle(tmp_path / "wrapper.json", num_layers=2)
    ids = tokens(1, T)[0]
    text = TextWindows(ids, [Window(0, 1, T)], None, 0, T, T)  # a block: the first token is not scored
    model = tiny("llama", max_position_embeddings=256)
    ours = evaluate_setting(model, text, EvalSetting("bundle", config), Ledger(None), facts={}, batch_size=1)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = _linear(module)
    monkeypatch.setattr(host, "eager_attention_forward", their_attention)
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, :-1].float()
    theirs = float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
    assert ours["nll"] == pytest.approx(theirs / (T - 1), rel=1e-12) and ours["tokens"] == T - 1


def _linear(module: torch.nn.Linear):
    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = by_length(rows, module.weight.detach(), lengths(rows.abs().amax(-1)), 128)
        return y.view(*x.shape[:-1], -1)

    return forward
