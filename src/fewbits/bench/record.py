"""The row: a number with its conditions and its command."""

from __future__ import annotations

import csv
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from fewbits.bench.measure import Peaks, Quantiles
from fewbits.bench.problem import Case
from fewbits.device import describe
from fewbits.errors import BadInput
from fewbits.kernels.launch.jit import triton


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What holds for every row of one run.

    Attributes:
        gpu: the device's name.
        sm_mhz: clock of its multiprocessors just after the measurement.
        driver: version.
        torch: version.
        triton: version.
        commit: the commit of fewbits that ran.
        date: day, UTC.
        command: what to type to get this row again.
        packages: other packages that matter, as "transformers 5.23.0; peft 0.21.2".
    """

    gpu: str
    sm_mhz: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str
    command: str
    packages: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of benchmarks/results.csv: a figure, and how far it moved while it was taken.

    Attributes:
        op: the kernel, or the experiment.
        part: forward, backward, ...; or which of the experiment's figures' subjects this is.
        variant: "fewbits" or a peer.
        format: number format or dtype.
        M, N, K: shape of the operation; None for an experiment.
        metric: what was measured, such as "time" or "evaluation loss".
        unit: its unit.
        low, value, high: of a time the 20 %, 50 %, 80 % quantiles; over seeds the least, mean and largest.
        bytes_moved, flops: what the operation cannot do without.
        peak_share: the floor over the time. The floor is bytes_moved at the rate of a copy in the same run or
            the flops at that of cuBLAS's large products, whichever takes longer (bytes alone in rows of the
            commits before d57a533).
        ratio: value over fewbits' value in the same run; above 1 is slower than fewbits, or more.
    """

    op: str
    part: str
    variant: str
    format: str
    M: int | None = None
    N: int | None = None
    K: int | None = None
    metric: str
    unit: str
    low: float
    value: float
    high: float
    bytes_moved: int | None = None
    flops: int | None = None
    peak_share: float | None = None
    ratio: float | None = None


COLUMNS = [f.name for f in (*fields(Row), *fields(Conditions))]


def rows_of(case: Case, times: dict[str, Quantiles], peaks: Peaks | None) -> list[Row]:
    """One row for each variant of a case."""
    ours = times["fewbits"].p50 if "fewbits" in times else None
    rows = []
    for variant, (p20, p50, p80) in times.items():
        share = peaks.floor_s(case) / (p50 * 1e-6) if peaks else None
        rows.append(
            Row(
                op=case.op, part=case.part, variant=variant, format=case.format, M=case.M, N=case.N, K=case.K,
                metric="time", unit="us", low=round(p20, 2), value=round(p50, 2), high=round(p80, 2),
                bytes_moved=case.bytes_moved, flops=case.flops,
                peak_share=None if share is None else round(share, 3),
                ratio=None if ours is None else round(p50 / ours, 3),
            )
        )  # fmt: skip
    return rows


def conditions(
    device: torch.device, *, command: str, commit: str | None = None, packages: tuple[str, ...] = ()
) -> Conditions:
    """Read the conditions of this run; call it right after measuring, while the clocks are up.

    Args:
        device: the device that was measured.
        command: what was typed.
        commit: the commit, where there is no git checkout to ask.
        packages: names of installed packages whose versions belong in the row.

    Raises:
        BadInput: no commit was given and git knows none.
    """
    sm_mhz, driver = _nvidia_smi(device)
    return Conditions(
        gpu=describe(device).name if device.type == "cuda" else f"CPU {platform.machine()}",
        sm_mhz=sm_mhz,
        driver=driver,
        torch=torch.__version__,
        triton=triton.__version__ if triton else "",
        commit=commit or _commit(),
        date=datetime.now(UTC).date().isoformat(),
        command=command,
        packages="; ".join(f"{name} {version(name)}" for name in packages),
    )


def append(path: Path, rows: list[Row], run: Conditions) -> None:
    """Add rows to a CSV file, which gets its header if it is new.

    Raises:
        BadInput: the file has other columns.
    """
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as file:
            header = next(csv.reader(file), [])
        if header != COLUMNS:
            raise BadInput(f"{path} has other columns than these rows: name a new file.")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row) | asdict(run))


def _nvidia_smi(device: torch.device) -> tuple[str, str]:
    """Clock and driver; empty where there is nothing to ask."""
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return "", ""
    uuid = torch.cuda.get_device_properties(device).uuid
    query = [
        program,
        "-i",
        f"GPU-{uuid}",
        "--query-gpu=clocks.sm,driver_version",
        "--format=csv,noheader,nounits",
    ]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().split(", ")
    return (answer[0], answer[1]) if len(answer) == 2 else ("", "")


def _commit() -> str:
    git = shutil.which("git")
    query = [git or "git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    here = Path(__file__).parent
    done = subprocess.run(query, cwd=here, capture_output=True, text=True, check=False) if git else None
    if done is None or done.returncode:
        raise BadInput(
            "this copy of fewbits is no git checkout, so a row would not say what ran: give --commit HASH."
        )
    return done.stdout.strip()
