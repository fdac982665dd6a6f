"""Triton kernels to machine code, on a machine without a GPU."""

from __future__ import annotations

from typing import Any

from fewbits.kernels.launch.jit import CompileCase

ARCHITECTURES = (80, 89, 90, 100, 120)


def build(case: CompileCase, capability: int) -> Any:
    """What Triton compiles of ``case`` for that compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    assert list(case.signature) == names, (
        f"{case.kernel.__name__}: the signature must name the arguments in order"
    )
    attrs = {(names.index(a),): [["tt.divisibility", 16]] for a in case.aligned}
    source = ASTSource(case.kernel, dict(case.signature), dict(case.constants), attrs)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": case.num_warps}
    )
