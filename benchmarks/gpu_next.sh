#!/usr/bin/env bash
# What waits for GPUs, in one call of five minutes on four H200s; the table comes last.
#   benchmarks/gpu_next.sh COMMIT [FOLDER]     logs and rows go to FOLDER, default ./outputs
#   PEERS=/folder/of/packages ...              where Unsloth, torchao and bitsandbytes are, if they are not installed
# Three lanes run side by side: the first GPU, the second, and the last two. A stage that fails or runs out of time is
# named in the table and stops nothing. No row may be published from a run whose tests failed.
set -uo pipefail
cd "$(dirname "$0")/.."
commit=${1:?which commit is this?}
out=${2:-outputs}
mkdir -p "$out/fsdp" "$out/peer"
rm -f "$out/table.txt"
export PYTHONPATH=src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
python=${PYTHON:-python3}
peers=(env "PYTHONPATH=src${PEERS:+:$PEERS}")
marked=("$python" -m pytest -q -p no:cacheprovider --timeout 100 -rfE --ignore tests/models/test_trl.py)
folders=(tests/kernels tests/nn tests/models tests/inference tests/training)

stage() { # NAME SECONDS COMMAND...: a log, and a line of the table
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    timeout "$limit" "$@" > "$out/$name.log" 2>&1
    code=$?
    printf '%-14s exit %-4s from %4s for %4s s  %s\n' "$name" "$code" "$began" "$((SECONDS - began))" \
        "$(tail -n 1 "$out/$name.log" | cut -c1-150)" >> "$out/table.txt"
}

steps() { # the 8B step beside the peers: what docs/training-speed.md only chains from two runs
    local shape=llama-3.1-8b
    stage train 280 "${peers[@]}" "$python" -m fewbits.bench train --shape $shape --batch 4x2048 --peers none \
        --configs unsloth:nf4,ours:nf4@36,torchao:fp8,ours:nf4-fp8-head,ours:nf4-fp8,unsloth:nf4-gc \
        --also "$shape 1x8192 unsloth:nf4,ours:nf4-fp8-head" --also "$shape 4x2048 ours:fp8-head,ours:bf16-fp8-head" \
        --also "qwen3-1.7b 4x2048 torchao:full-fp8,ours:full-fp8-head" --together 4 --limit 270 \
        --out "$out/train" --record "$out/rows_train.csv" --commit "$commit"
}

stochastic() { # products, decoding; then every test that needs one GPU
    stage products 80 "$python" benchmarks/stochastic_h200.py
    stage decode 110 "$python" benchmarks/stochastic_decode.py --out "$out/rows_decode.csv" --commit "$commit"
    stage tests 100 "${marked[@]}" -m gpu "${folders[@]}"
}

several() { # 70B shapes on two GPUs, and every test that needs two
    stage fsdp 80 torchrun --nproc-per-node 2 --master-port 29621 benchmarks/multi_gpu.py fsdp --batches 1x2048,4x2048 \
        --keep --steps 4 --warm-up 2 --out "$out/fsdp" --record "$out/rows_fsdp.csv" --commit "$commit"
    stage peer 60 "${peers[@]}" torchrun --nproc-per-node 2 --master-port 29622 benchmarks/multi_gpu.py peer \
        --engines fsdp2 --batches 1x2048 --steps 4 --warm-up 2 --out "$out/peer" --record "$out/rows_peer.csv" --commit "$commit"
    stage two_gpus 90 "$python" benchmarks/stochastic_two_gpus.py --bf16 --out "$out/rows_two_gpus.csv" --commit "$commit"
    stage multi 120 "${marked[@]}" -m multi "${folders[@]}"
}

(export CUDA_VISIBLE_DEVICES=0 && steps) &
(export CUDA_VISIBLE_DEVICES=1 && stochastic) &
(export CUDA_VISIBLE_DEVICES=2,3 && several) &
wait
sort "$out/table.txt"
