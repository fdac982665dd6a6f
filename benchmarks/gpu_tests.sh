#!/usr/bin/env bash
# Every test that needs GPUs, and the stochastic products' rows, in one call on four H200s: seven minutes by the limits
# of its stages, which ran one by one and never as a whole. The table comes last.
#   benchmarks/gpu_tests.sh COMMIT [FOLDER]     logs and rows go to FOLDER, default ./outputs
# Two lanes run side by side: those that need one GPU and the stochastic products on the first, those that
# need two, one after the other (runs over NCCL must not share GPUs), on the last two. A stage that fails or runs out of
# time is named in the table and stops nothing. No row may be published from a run whose tests failed.
set -uo pipefail
cd "$(dirname "$0")/.."
commit=${1:?which commit is this?}
out=${2:-outputs}
mkdir -p "$out"
rm -f "$out/table.txt"
export PYTHONPATH=src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
python=${PYTHON:-python3}
marked=("$python" -W ignore -m pytest -o addopts= --import-mode=importlib -v -p no:cacheprovider -rfE --tb=short)
folders=(tests/kernels tests/nn tests/models tests/inference tests/bench tests/formats tests/test_device.py)

stage() { # NAME SECONDS COMMAND...: a log, and a line of the table
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    timeout "$limit" "$@" > "$out/$name.log" 2>&1
    code=$?
    printf '%-14s exit %-4s from %4s for %4s s  %s\n' "$name" "$code" "$began" "$((SECONDS - began))" \
        "$(tail -n 1 "$out/$name.log" | cut -c1-150)" >> "$out/table.txt"
}

alone() {
    stage tests 130 "${marked[@]}" -m gpu --timeout 60 "${folders[@]}" tests/training --ignore tests/models/test_trl.py
    stage products 90 "$python" benchmarks/stochastic/stochastic_h200.py
    stage rows 60 "$python" -m fewbits.bench kernels --op stochastic_rows,stochastic_codes --record "$out/rows.csv" --commit "$commit"
}

several() {
    stage runs 200 "${marked[@]}" -m multi --timeout 100 tests/training/test_several_gpus.py
    stage multi 200 "${marked[@]}" -m multi --timeout 60 "${folders[@]}" tests/training/test_gradient_communication_gpu.py \
        tests/training/test_fsdp_gpu.py --ignore tests/models/test_trl.py
}

(export CUDA_VISIBLE_DEVICES=0 && alone) &
(export CUDA_VISIBLE_DEVICES=2,3 && several) &
wait
sort "$out/table.txt"
