"""A plain kernel under Triton's interpreter: ends with an error where this Triton and numpy do not match.

It has what fewbits' kernels ask of the interpreter and nothing of theirs: a loop whose end is an argument or
is read from memory (Triton 3.6 fails from numpy 2.4 on), a mask that a scalar condition has part in (Triton
3.9 makes it int32, which its own load refuses), sums over an axis, a product of tiles.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _probe_kernel(x_ptr, y_ptr, count_ptr, n, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = (columns < n)[None, :] & (start < n)
        tile = tl.load(x_ptr + rows[:, None] * n + columns[None, :], mask=mask, other=0.0)
        total += tl.dot(tile, tl.trans(tile))
    sums = tl.sum(total, axis=1)
    for i in range(tl.load(count_ptr)):
        sums += i
    tl.store(y_ptr + rows, sums)


def main() -> None:
    torch.manual_seed(0)
    x, y, count = torch.randn(16, 40), torch.empty(16), torch.tensor([3])
    _probe_kernel[(1,)](x, y, count, 40, BLOCK=16)
    torch.testing.assert_close(y, (x @ x.T).sum(1) + 3, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
