"""The mixes: which tensor gets which type, against what llama.cpp's quantiser gave the same models."""

from __future__ import annotations

import pytest

from fewbits.errors import BadInput
from fewbits.export.gguf_types import Sizes, method_named, type_of

SIXTEEN = Sizes(num_layers=16, num_heads_per_kv=4, head_is_tied=False)


def kinds(tensor: str, method: str, sizes: Sizes = SIXTEEN) -> str:
    found = [
        type_of(f"blk.{i}.{tensor}.weight", (256, 512), method, sizes)[0] for i in range(sizes.num_layers)
    ]
    return "".join(kind[1] for kind in found)


def test_q4_k_m_gives_half_of_the_value_and_down_projections_six_bits() -> None:
    assert kinds("ffn_down", "q4_k_m") == kinds("attn_v", "q4_k_m") == "6644644644644666"
    assert kinds("attn_q", "q4_k_m") == "4" * 16
    assert type_of("output.weight", (96, 256), "q4_k_m", SIXTEEN) == ("Q6_K", None)
    assert type_of("token_embd.weight", (96, 256), "q4_k_m", SIXTEEN) == ("Q4_K", None)


def test_a_tied_embedding_is_the_output_head() -> None:
    tied = Sizes(16, 4, True)
    assert type_of("token_embd.weight", (96, 256), "q4_k_m", tied) == ("Q6_K", None)
    assert type_of("token_embd.weight", (96, 192), "q4_k_m", tied) == ("Q8_0", None)


def test_rows_that_do_not_divide_fall_back_and_say_so() -> None:
    name = "blk.3.attn_q.weight"
    assert type_of(name, (64, 192), "q4_k_m", SIXTEEN) == ("Q5_0", "Q4_K")
    assert type_of(name, (64, 192), "q5_k_m", SIXTEEN) == ("Q5_1", "Q5_K")
    assert type_of(name, (64, 192), "q6_k", SIXTEEN) == ("Q8_0", "Q6_K")
    assert type_of(name, (64, 192), "q2_k", SIXTEEN) == ("Q4_0", "Q2_K")
    assert type_of(name, (64, 172), "q8_0", SIXTEEN) == ("F16", "Q8_0")
    assert type_of("blk.3.attn_norm.weight", (192,), "q4_k_m", SIXTEEN) == ("F32", None)


def test_methods_have_the_names_of_other_programs() -> None:
    assert method_named("Q4_K_M") == method_named("quantized") == "q4_k_m"
    with pytest.raises(BadInput, match="q4_k_m"):
        method_named("q4_k_xl")
