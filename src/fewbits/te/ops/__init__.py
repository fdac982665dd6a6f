"""Operations to be put together in a `Sequential`: the names of `transformer_engine.pytorch.ops`.

Each operation is computed by its definition, one after the other, with gradients by autograd. Transformer
Engine may fuse neighbours; here nothing is fused, and registering a fusion is refused. Imports the modules of
`fewbits.te` and is imported by none of them. Begin with `operation.py`, then `sequential.py`.
"""

from __future__ import annotations

from fewbits.te.ops.activation import GEGLU as GEGLU
from fewbits.te.ops.activation import GELU as GELU
from fewbits.te.ops.activation import GLU as GLU
from fewbits.te.ops.activation import QGEGLU as QGEGLU
from fewbits.te.ops.activation import QGELU as QGELU
from fewbits.te.ops.activation import ClampedSwiGLU as ClampedSwiGLU
from fewbits.te.ops.activation import ReGLU as ReGLU
from fewbits.te.ops.activation import ReLU as ReLU
from fewbits.te.ops.activation import ScaledClampedQGeGLU as ScaledClampedQGeGLU
from fewbits.te.ops.activation import ScaledSiTUGLU as ScaledSiTUGLU
from fewbits.te.ops.activation import ScaledSReLU as ScaledSReLU
from fewbits.te.ops.activation import ScaledSwiGLU as ScaledSwiGLU
from fewbits.te.ops.activation import SiLU as SiLU
from fewbits.te.ops.activation import SiTUGLU as SiTUGLU
from fewbits.te.ops.activation import SReGLU as SReGLU
from fewbits.te.ops.activation import SReLU as SReLU
from fewbits.te.ops.activation import SwiGLU as SwiGLU
from fewbits.te.ops.linear import BasicLinear as BasicLinear
from fewbits.te.ops.linear import Bias as Bias
from fewbits.te.ops.linear import GroupedLinear as GroupedLinear
from fewbits.te.ops.linear import Linear as Linear
from fewbits.te.ops.operation import BasicOperation as BasicOperation
from fewbits.te.ops.operation import FusedOperation as FusedOperation
from fewbits.te.ops.operation import FusibleOperation as FusibleOperation
from fewbits.te.ops.operation import OperationContext as OperationContext
from fewbits.te.ops.operation import register_backward_fusion as register_backward_fusion
from fewbits.te.ops.operation import register_forward_backward_fusion as register_forward_backward_fusion
from fewbits.te.ops.operation import register_forward_fusion as register_forward_fusion
from fewbits.te.ops.sequential import Sequential as Sequential
from fewbits.te.ops.simple import AddExtraInput as AddExtraInput
from fewbits.te.ops.simple import AllGather as AllGather
from fewbits.te.ops.simple import AllReduce as AllReduce
from fewbits.te.ops.simple import ConstantScale as ConstantScale
from fewbits.te.ops.simple import Dropout as Dropout
from fewbits.te.ops.simple import Identity as Identity
from fewbits.te.ops.simple import L2Normalization as L2Normalization
from fewbits.te.ops.simple import LayerNorm as LayerNorm
from fewbits.te.ops.simple import MakeExtraOutput as MakeExtraOutput
from fewbits.te.ops.simple import Quantize as Quantize
from fewbits.te.ops.simple import ReduceScatter as ReduceScatter
from fewbits.te.ops.simple import Reshape as Reshape
from fewbits.te.ops.simple import RMSNorm as RMSNorm
