"""`fewbits.te.ops`: operations beside their formulas, sequences, channels, and operations of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fewbits.te as te
from fewbits.errors import BadInput, Unsupported
from fewbits.te import ops, recipe

RECIPES = (
    recipe.DelayedScaling,
    recipe.Float8CurrentScaling,
    recipe.Float8BlockScaling,
    recipe.MXFP8BlockScaling,
)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def gradients(y: Tensor, dy: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, leaves, dy))


@pytest.mark.parametrize("kind", RECIPES, ids=lambda k: k.__name__)
@pytest.mark.parametrize("shape", [(7, 48), (2, 3, 48)], ids=str)
def test_a_linear_is_that_of_the_modules(kind: Any, shape: tuple[int, ...]) -> None:
    module = te.Linear(48, 33, device="cpu")
    op = ops.Linear(48, 33, device="cpu")
    op.weight.data.copy_(module.weight), op.bias.data.copy_(module.bias.data.normal_())
    for _ in range(3):  # delayed scaling's histories go on
        x, dy = leaf(*shape), torch.randn(*shape[:-1], 33)
        with te.autocast(enabled=True, recipe=kind()):
            expected = module(x)
        need = gradients(expected, dy, x, module.weight, module.bias)
        with te.autocast(enabled=True, recipe=kind()):
            y = op(x)
        assert torch.equal(y, expected)
        for a, b in zip(gradients(y, dy, x, op.weight, op.bias), need, strict=True):
            assert torch.equal(a, b)
        assert not torch.equal(y, F.linear(x, op.weight, op.bias))


def test_a_linears_entries_and_its_parameters() -> None:
    op = ops.Linear(16, 32, device="cpu", dtype=torch.bfloat16)
    assert [name for name in op.state_dict() if "extra" not in name] == [
        "basic_ops.0.weight",
        "basic_ops.1.bias",
    ]
    op.weight = torch.nn.Parameter(torch.ones(32, 16, dtype=torch.bfloat16))
    assert op.basic_ops[0].weight is op.weight and op(torch.ones(1, 16)).eq(16).all()
    bare = ops.Linear(16, 32, bias=False, device="cpu")
    assert bare.bias is None and len(list(bare.parameters())) == 1
    with pytest.raises(BadInput, match="bias=False"):
        bare.bias = torch.nn.Parameter(torch.ones(32))


def test_delayed_scaling_goes_through_a_checkpoint() -> None:
    x = torch.randn(16, 32)
    model = ops.Sequential(ops.Linear(32, 32, device="cpu"), ops.GELU(), ops.Linear(32, 16, device="cpu"))
    for _ in range(2):
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=4)):
            model(3 * x).sum().backward()
    other = ops.Sequential(ops.Linear(32, 32, device="cpu"), ops.GELU(), ops.Linear(32, 16, device="cpu"))
    other.load_state_dict(model.state_dict())
    results = []
    for m in (model, other):
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=4)):
            results.append(m(x))
    assert torch.equal(*results)
    scale = other[0].basic_ops[0].get_quantizer("forward", 1).scale
    assert scale != 1 and scale == model[0].basic_ops[0].get_quantizer("forward", 1).scale
    assert other[0].basic_ops[0].num_quantizers("forward") == 2


def _quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _halves(gate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: gate(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


def _clamped(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    a, b = a.clamp(max=2.0), b.clamp(-2.0, 2.0)
    return a * torch.sigmoid(1.5 * a) * (b + 0.5)


def _situ(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return 3 * torch.tanh(a / 3) * torch.sigmoid(a) * 20 * torch.tanh(b / 20)


FORMULAS: list[tuple[ops.BasicOperation, Callable[[Tensor], Tensor]]] = [
    (ops.GELU(), _gelu),
    (ops.QGELU(), _quick),
    (ops.ReLU(), lambda x: x.clamp(min=0)),
    (ops.SReLU(), lambda x: x.clamp(min=0) ** 2),
    (ops.SiLU(), lambda x: x * torch.sigmoid(x)),
    (ops.GLU(), _halves(torch.sigmoid)),
    (ops.GEGLU(), _halves(_gelu)),
    (ops.QGEGLU(), _halves(_quick)),
    (ops.ReGLU(), _halves(lambda x: x.clamp(min=0))),
    (ops.SReGLU(), _halves(lambda x: x.clamp(min=0) ** 2)),
    (ops.SwiGLU(), _halves(lambda x: x * torch.sigmoid(x))),
    (ops.ClampedSwiGLU(limit=2.0, alpha=1.5, glu_linear_offset=0.5), _clamped),
    (ops.SiTUGLU(beta1=3.0, beta2=20.0), _situ),
    (ops.ConstantScale(0.3), lambda x: 0.3 * x),
    (ops.L2Normalization(), lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()),
    (ops.Reshape((-1, 4)), lambda x: x.reshape(-1, 4)),
    (ops.Identity(), lambda x: x),
]


@pytest.mark.parametrize("case", FORMULAS, ids=lambda c: type(c[0]).__name__)
def test_operations_beside_their_formulas(case: Any) -> None:
    op, formula = case
    x = (3 * torch.randn(5, 12)).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, expected = op(x), formula(wide)
    dy = torch.randn_like(y)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradients(y, dy, x)[0].double(), gradients(expected, dy.double(), wide)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_gates_and_lines_in_turns(turn: int) -> None:
    gates, lines = torch.randn(4, 6), torch.randn(4, 6)
    pieces = [p for pair in zip(gates.split(turn, 1), lines.split(turn, 1), strict=True) for p in pair]
    for kind in (ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU):
        expected = kind()(torch.cat([gates, lines], 1))
        assert torch.equal(kind(glu_interleave_size=turn)(torch.cat(pieces, 1)), expected)
    with pytest.raises(BadInput, match="multiple of 10"):
        ops.SwiGLU(glu_interleave_size=5)(torch.randn(2, 12))


@pytest.mark.parametrize(
    ("op", "inner"),
    [
        (ops.ScaledSwiGLU(), ops.SwiGLU()),
        (ops.ScaledSReLU(), ops.SReLU()),
        (ops.ScaledSiTUGLU(beta1=2.0), ops.SiTUGLU(beta1=2.0)),
        (ops.ScaledClampedQGeGLU(glu_interleave_size=2), ops.ClampedSwiGLU(glu_interleave_size=2)),
    ],
    ids=lambda o: type(o).__name__,
)
def test_activations_times_a_number_for_each_row(op: Any, inner: Any) -> None:
    x, scales = leaf(5, 8), leaf(5)
    y, expected = op(x, scales), inner(x) * scales[:, None]
    dy = torch.randn_like(y)
    torch.testing.assert_close(y, expected)
    for a, b in zip(gradients(y, dy, x, scales), gradients(expected, dy, x, scales), strict=True):
        torch.testing.assert_close(a, b)


def test_an_activation_may_keep_its_input_rounded() -> None:
    x, dy = leaf(6, 8), torch.randn(6, 8)
    y = ops.GELU(cache_quantized_input=True)(x)
    assert torch.equal(y, ops.GELU()(x))
    (dx,) = gradients(y, dy, x)
    rounded = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)(x.detach()).dequantize()
    other = rounded.requires_grad_()
    torch.testing.assert_close(dx, gradients(ops.GELU()(other), dy, other)[0])
    assert not torch.equal(dx, gradients(ops.GELU()(x), dy, x)[0])


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centred", [False, True])
def test_norms(kind: str, centred: bool) -> None:
    op = getattr(ops, kind)(24, zero_centered_gamma=centred, device="cpu")
    module = getattr(te, kind)(24, zero_centered_gamma=centred, device="cpu")
    x, dy = leaf(3, 5, 24), torch.randn(3, 5, 24)
    assert torch.equal(op(x), module(x)) and list(op.state_dict()) == list(module.state_dict())
    assert torch.equal(gradients(op(x), dy, op.weight)[0], gradients(module(x), dy, module.weight)[0])


def test_quantize_rounds_what_it_is_asked_to() -> None:
    for forward in (False, True):
        for backward in (False, True):
            x, dy = leaf(16, 32), torch.randn(16, 32)
            op = ops.Quantize(forward=forward, backward=backward)
            with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()):
                y = op(x)
            y.backward(dy)
            assert isinstance(y, te.QuantizedTensor) is forward
            assert torch.equal(y.detach() + 0, x.detach()) is not forward
            assert torch.equal(x.grad + 0, dy) is not backward
    assert op(x) is x  # outside of autocast


def test_further_inputs_and_outputs() -> None:
    model = ops.Sequential(
        ops.MakeExtraOutput(),
        ops.ConstantScale(2.0),
        torch.nn.Identity(),
        ops.AddExtraInput(),
        ops.Bias(8, device="cpu"),
        ops.MakeExtraOutput(),
        ops.AddExtraInput(in_place=True),
    )
    x, first, second = leaf(3, 8), leaf(3, 8), leaf(3, 8)
    before = second.detach().clone()
    y, copy, middle = model(x, first, second)
    bias = model[4].bias
    assert torch.equal(copy, x) and torch.equal(middle, 2 * x + first + bias)
    torch.testing.assert_close(y, middle + before)
    assert y.data_ptr() == second.data_ptr()
    dy = torch.randn(3, 8)
    dx, d_first, d_second = gradients(y, dy, x, first, second)
    assert torch.equal(dx, 2 * dy) and torch.equal(d_first, dy) and torch.equal(d_second, dy)
    with pytest.raises(BadInput, match="none was given"):
        model(x, first)
    with pytest.raises(BadInput, match="1 more"):
        model(x, first, second, second)


def test_channels_lead_from_one_operation_to_another() -> None:
    def parts(to_caller: bool) -> tuple[Any, Any]:
        keep = ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=to_caller)
        return keep, ops.AddExtraInput().set_extra_input_channel(0, "residual")

    x = torch.randn(4, 8)
    for to_caller in (False, True):
        keep, add = parts(to_caller)
        y = ops.Sequential(keep, ops.ConstantScale(3.0), add)(x)
        torch.testing.assert_close(y[0] if to_caller else y, 4 * x)
        with pytest.raises(RuntimeError, match="already captured its channel routing"):
            add.set_extra_input_channel(0, None)
    keep, add = parts(False)
    with pytest.raises(BadInput, match="no producer"):
        ops.Sequential(add, keep)(x)
    with pytest.raises(IndexError, match="out of range"):
        ops.Identity().set_extra_input_channel(0, "a")
    with pytest.raises(BadInput, match="non-empty"):
        ops.AddExtraInput().set_extra_input_channel(0, "")
    twice = [ops.MakeExtraOutput().set_extra_output_channel(0, "a") for _ in range(2)]
    with pytest.raises(BadInput, match="two outputs"):
        ops.Sequential(*twice)(x)


def test_a_sequential_is_a_list() -> None:
    modules: list[Any] = [ops.Identity(), torch.nn.Identity(), ops.Identity(), ops.ReLU()]
    model = ops.Sequential(*modules)
    model.insert(1, new := ops.GELU())
    modules.insert(1, new)
    del model[0], modules[0]
    model += [extra := torch.nn.ReLU()]
    modules.append(extra)
    model[-2] = modules[-2] = ops.SiLU()
    assert model.pop(0) is modules.pop(0)
    assert list(model) == modules and len(model) == 4 and list(model[1:3]) == modules[1:3]
    assert list(model + ops.Sequential(new)) == [*modules, new] and len(model) == 4
    assert len(set(model._modules)) == 4
    with pytest.raises(IndexError):
        model[4]
    named = ops.Sequential({"a": ops.Identity(), "b": ops.ReLU()})
    assert isinstance(named.b, ops.ReLU)


class _Scale(ops.BasicOperation):
    """A number that is learned, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        ctx.save_for_backward(self.scale, input_)
        return self.scale * input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        scale, x = ctx.saved_tensors
        return scale * grad_output, ((x * grad_output).sum(),)


def test_an_operation_of_ones_own() -> None:
    op = _Scale()
    model = ops.Sequential(ops.Identity(), op, ops.GELU())
    x, dy = leaf(3, 4), torch.randn(3, 4)
    y, expected = model(x), ops.GELU()(op.scale * x)
    assert torch.equal(y, expected)
    for a, b in zip(gradients(y, dy, x, op.scale), gradients(expected, dy, x, op.scale), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(NotImplementedError, match="neither"):
        ops.BasicOperation()(x)
    with pytest.raises(Unsupported, match="fusions"):
        ops.register_forward_fusion(lambda *a, **k: [])


@pytest.mark.parametrize("scaled", [False, True])
def test_grouped_linear(scaled: bool) -> None:
    op = ops.GroupedLinear(3, 8, 12, device="cpu", scale_bias=scaled)
    for i in range(3):
        getattr(op, f"bias{i}").data.normal_()
    sizes, x, numbers = torch.tensor([4, 0, 3]), leaf(7, 8), leaf(7)
    y = op(x, sizes, numbers) if scaled else op(x, sizes)
    pieces, scales = x.split(sizes.tolist()), numbers.split(sizes.tolist())
    expected = torch.cat(
        [
            F.linear(p, getattr(op, f"weight{i}")) + getattr(op, f"bias{i}") * (s[:, None] if scaled else 1)
            for i, (p, s) in enumerate(zip(pieces, scales, strict=True))
        ]
    )
    dy, leaves = torch.randn_like(y), [x, op.weight0, op.bias2, *([numbers] if scaled else [])]
    torch.testing.assert_close(y, expected)
    for a, b in zip(gradients(y, dy, *leaves), gradients(expected, dy, *leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_dropout() -> None:
    op, x = ops.Dropout(0.4), torch.ones(200, 100)
    y = op(x)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.6).item()}
    assert abs(y.eq(0).float().mean() - 0.4) < 0.02  # 5.8 standard deviations
    assert op.eval()(x) is x


def test_the_drop_in_finds_them() -> None:
    with te.as_transformer_engine():
        import transformer_engine.pytorch.ops as theirs
        from transformer_engine.pytorch.ops.basic import GELU

        assert theirs.Sequential is ops.Sequential and GELU is ops.GELU
        from transformer_engine.pytorch.ops.basic.l2normalization import L2Normalization

        layer = te.MultiheadAttention(32, 2, qk_norm_type="L2Normalization", device="cpu")
        assert isinstance(layer.q_norm, L2Normalization)
