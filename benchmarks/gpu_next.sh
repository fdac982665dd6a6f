#!/usr/bin/env bash
# What no GPU has run yet, in one call of at most nine minutes; the table comes last.
#   benchmarks/gpu_next.sh COMMIT [FOLDER]     logs and rows go to FOLDER, default ./outputs
#   CPU=1 benchmarks/gpu_next.sh COMMIT        a trial of the script itself, without a GPU
# A stage that fails or runs out of time is named in the table and stops nothing. No row of results.csv may be
# published from a run whose tests failed.
set -uo pipefail
cd "$(dirname "$0")/.."
commit=${1:?which commit is this?}
out=${2:-outputs}
mkdir -p "$out"
rm -f "$out/results.csv" "$out/table.txt"
export PYTHONPATH=src PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

stage() { # NAME SECONDS COMMAND...: its last lines, and a line of the table
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    local left=$((530 - began)) code=skipped
    if [ "$left" -ge 10 ]; then
        timeout $((limit < left ? limit : left)) "$@" > "$out/$name.log" 2>&1
        code=$?
    else
        echo "no time was left" > "$out/$name.log"
    fi
    echo "== $name: exit $code after $((SECONDS - began)) s"
    tail -n 12 "$out/$name.log"
    printf '%-16s exit %-4s %4s s  %s\n' "$name" "$code" "$((SECONDS - began))" "$(tail -n 1 "$out/$name.log")" >> "$out/table.txt"
}

# 1. Kernels written or changed without a GPU: RMSNorm's backward pass and its mixed dtypes, low_rank_add's stages,
#    gated tiles and the kernel that adds shares, q/k/v after their product, float32 adapters of high rank,
#    stochastic kernels, gradient codec; fused layers under autocast.
tests="tests/kernels/test_rmsnorm_rows.py tests/kernels/test_rmsnorm.py tests/kernels/test_low_rank_add.py
    tests/kernels/test_gated_activation.py tests/kernels/test_gated_lora_backward.py
    tests/kernels/test_lora_reduce.py tests/kernels/test_qkv_epilogue.py tests/kernels/test_fake_quantize.py
    tests/kernels/test_matmul_stochastic.py tests/kernels/test_stochastic_codes.py
    tests/kernels/test_stochastic_emulated.py tests/kernels/test_stochastic_thermometer.py
    tests/kernels/test_quantize_stochastic.py tests/kernels/test_gradient_codec.py
    tests/models/test_fused_autocast.py tests/bench/test_bench.py"
marks=(-m gpu)
device=cuda
size=()
layers=32
if [ -n "${CPU:-}" ]; then
    marks=(-m "not gpu and not multi and not slow" -k opcheck)
    device=cpu
    size=(--max-size 32)
    layers=1
fi
# shellcheck disable=SC2086
stage tests 150 "$python" -m pytest "${marks[@]}" $tests

# 2. The first step, with an empty cache of kernels and with a warm one; a length not seen before.
trial=()
[ "$device" = cpu ] && trial=(--tiny)
stage first_bf16 60 "$python" benchmarks/first_step.py --device "$device" "${trial[@]}"
stage first_float8 60 "$python" benchmarks/first_step.py --device "$device" --float8 "${trial[@]}"

# 3. Times of the ops that have no row yet, beside their floors; rows go to results.csv.
for op in gated_lora_backward low_rank_add qkv_epilogue lora_reduce quantize_float8 matmul_float8 linear_cross_entropy \
    quantize fake_quantize adamw matmul_stochastic; do
    stage "op_$op" 25 "$python" -m fewbits.bench kernels --op "$op" --device "$device" "${size[@]}" --rounds 3 \
        --record "$out/results.csv" --commit "$commit"
done

# 4. New kernels beside what they replaced; 32 layers of quantisation-aware training; where a step's time goes.
stage variants 40 "$python" benchmarks/kernel_variants.py --device "$device"
stage qat_step 75 "$python" benchmarks/qat_step.py --fused --layers "$layers" --formats int4_g32 --device "$device" "${trial[@]}"
bench=("$python" -m fewbits.bench train --peers none --profile --record "$out/results.csv" --commit "$commit")
[ "$device" = cpu ] && bench+=(--device cpu --shape tiny --batch 2x16 --steps 1 --warm-up 1 --layers 1)
stage train 100 "${bench[@]}" --configs ours:nf4@36,ours:nf4-fp8 --together 2

# 5. The longest sequence takes longer than what is left here; alone, in a call of its own:
#    python3 -m fewbits.bench train --longest --configs ours:nf4@offload --peers none --limit 540
echo
cat "$out/table.txt"
