"""Whether a package has a wheel for this machine, asked of pip: it knows the indices that are set up."""

from __future__ import annotations

import json
import re

from fewbits.doctor.host import Host
from fewjobs.finding import Finding

TIMEOUT_S = 60.0
_NO_ANSWER = re.compile(
    r"Retrying|NewConnectionError|ConnectTimeout|Temporary failure|name resolution|Max retries|SSLError|"
    r"Network is unreachable|ReadTimeout|Could not fetch|ProxyError|connection broken",
    re.IGNORECASE,
)


def wheel(host: Host, package: str) -> Finding:
    """Look for a wheel; nothing is installed, built, or downloaded beyond what pip needs to see it."""
    name = f"wheel of {package}"
    done = host.run(
        *(host.python, "-m", "pip", "--disable-pip-version-check", "--no-input"),
        *("--retries", "1", "--timeout", "15", "install", "--dry-run", "--ignore-installed"),
        *("--only-binary=:all:", "--no-deps", "--quiet", "--report", "-", "--", package),
        timeout_s=TIMEOUT_S,
    )
    if done is None or "No module named pip" in done.err:
        return Finding(name, "note", "pip is not here to ask", "", "python -m ensurepip")
    if done.timed_out or (done.code and _NO_ANSWER.search(done.err)):
        return Finding(
            name,
            "note",
            "unknown: pip reaches no package index",
            "Without one nobody can tell which wheels exist.",
            "Ask again where there is a network, or with PIP_INDEX_URL or PIP_FIND_LINKS set.",
        )
    if done.code == 0 and (file := _found(done.out)) is not None:
        return Finding(name, "ok", file)
    if "Invalid requirement" in done.err:
        return Finding(
            name, "warning", f"{package!r} is not a package's name", "", "Write it as name or name==1.2"
        )
    return Finding(
        name,
        "warning",
        "there is none for this Python, system and architecture",
        "pip would build it from source, which for a CUDA library takes hours and many gigabytes.",
        "Look among the project's own releases and for another Python or CUDA version before building; if "
        "you build, see what the memory finding says.",
    )


def _found(report: str) -> str | None:
    try:
        items = json.loads(report[report.index("{") :])["install"]
        file = str(items[0]["download_info"]["url"]).split("#")[0].rsplit("/", 1)[-1]
        metadata = items[0]["metadata"]
    except (ValueError, LookupError, TypeError):
        return None
    return f"{metadata['name']} {metadata['version']}: {file}"
