#!/usr/bin/env bash
# What needs two GPUs: launches on their operands' device, several ranks. In one call; the table comes last.
#   benchmarks/gpu_two.sh [FOLDER]      logs go to FOLDER, default ./outputs
#   CPU=1 benchmarks/gpu_two.sh         a trial without GPUs: the tests are collected, none runs
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-outputs}
mkdir -p "$out"
export PYTHONPATH=src PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
run=(-m pytest -m multi --timeout 200 -rfE)
[ -n "${CPU:-}" ] && run+=(--collect-only)
for room in kernels models training; do
    timeout 300 "$python" "${run[@]}" "tests/$room" > "$out/multi_$room.log" 2>&1
    echo "$room: exit $?, $(tail -n 1 "$out/multi_$room.log")" | tee -a "$out/multi_table.txt.new"
done
mv "$out/multi_table.txt.new" "$out/multi_table.txt"
echo
cat "$out/multi_table.txt"
