#!/usr/bin/env bash
# The first kernel on a GPU, in one call: its tests, then its times beside its peers; the short table comes last.
#   benchmarks/gpu_first.sh COMMIT [FOLDER]     rows go to FOLDER/results.csv, default ./outputs
set -euo pipefail
cd "$(dirname "$0")/.."
commit=${1:?which commit is this?}
out=${2:-outputs}
mkdir -p "$out"
rm -f "$out/results.csv"
export PYTHONPATH=src PYTHONUNBUFFERED=1
python3 -m pytest -m gpu tests/kernels/test_rmsnorm.py tests/test_device.py tests/bench > "$out/tests.log" 2>&1 ||
    { tail -60 "$out/tests.log"; exit 1; }
tail -1 "$out/tests.log"
python3 -m fewbits.bench tune --dry-run 2>&1 | tee "$out/sweep.log"
python3 -m fewbits.bench kernels --op rmsnorm --record "$out/results.csv" --commit "$commit"
