"""The launcher in Python, for machines where the C one cannot be compiled. Twenty times slower to start.

Run as a script, without fewbits on its path: ``launch.py SHIM ARGUMENTS``, with the shim that was called.
It does what `c/launcher.c` does, but for holding back what a tool prints.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys

LIGHT = {
    *("-E", "-M", "-MM", "--version", "-V", "-dumpversion", "-dumpmachine", "-dumpfullversion", "-###"),
    *("--dryrun", "-dryrun", "--help", "-h", "--list-gpu-arch", "--list-gpu-code", "--preprocess"),
}
GONE = "fewbits build: its controller is gone, so this build has stopped; start it again.\n"


def has_launchers(folder: str) -> bool:
    """Whether a folder of the PATH is one of ours."""
    return "/tools/" in folder and os.path.isdir(f"{folder}/.real")  # noqa: PTH112


def leave_our_folders_out(words: list[str]) -> None:
    """Take our folders from the PATH, but for nvcc, as the compilers that it starts are stages of their own.

    A wrapper that runs the next compiler of its own name would find us, and we would run it, for ever.
    """
    for word in words:
        if word.startswith("-"):
            break
        if os.path.basename(word) == "nvcc":  # noqa: PTH119
            return
    if "PATH" in os.environ:
        folders = os.environ["PATH"].split(os.pathsep)
        os.environ["PATH"] = os.pathsep.join(folder for folder in folders if not has_launchers(folder))


def on_path(name: str) -> str:
    """A tool that is given by its name: past our own folders, as it would look for itself there."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if not has_launchers(folder) and os.access(f"{folder}/{name}", os.X_OK):
            return f"{folder}/{name}"
    return name


def tool_of(shim: str, args: list[str]) -> tuple[str, list[str]]:
    """The real tool, and its arguments."""
    folder, name = os.path.split(shim)
    if name == "fewbits-launch":
        shim, args = args[0], args[1:]
        folder, name = os.path.split(shim)
        if not folder:
            shim = on_path(name)
            folder = os.path.dirname(shim)  # noqa: PTH120 - this script starts for every compilation
    link = os.path.join(folder, ".real", name)  # noqa: PTH118
    return (os.readlink(link) if os.path.islink(link) else shim), args  # noqa: PTH114, PTH115


def run_folder(shim: str) -> str:
    """The folder of the run that we belong to, by the environment or by an ancestor's process id."""
    if os.environ.get("FEWBITS_BUILD"):
        return os.environ["FEWBITS_BUILD"]
    root, pid = shim.rpartition("/tools/")[0], os.getppid()
    while root and pid > 1:
        if os.path.exists(f"{root}/runs/{pid}"):  # noqa: PTH110
            return f"{root}/runs/{pid}"
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            pid = int(file.read().rpartition(")")[2].split()[1])
    return ""


def connect(folder: str) -> socket.socket:
    """A connection to the controller."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    link.connect(f"/proc/self/fd/{place}/sock")
    os.close(place)
    return link


def start(tool: str, args: list[str], order: list[str]) -> int:
    """Start the tool in a group of its own, as the order says."""
    if len(order) > 5 and order[5] != "0":
        args = order[6 : 6 + int(order[5])]
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    cap, (soft, hard) = int(order[1]), resource.getrlimit(resource.RLIMIT_DATA)
    if cap and (soft == resource.RLIM_INFINITY or soft > cap):
        resource.setrlimit(resource.RLIMIT_DATA, (cap, hard))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(order[2] or "0")
    if order[3]:
        before = os.environ.get("LD_PRELOAD")
        os.environ.update(LD_PRELOAD=f"{order[3]}:{before}" if before else order[3], FEWBITS_PAGER=order[4])
    try:
        os.execv(tool, [tool, *args])
    except OSError as error:
        sys.stderr.write(f"fewbits build: cannot run {tool}: {error.strerror}\n")
    os._exit(127)


def hear(link: socket.socket) -> list[str]:
    """The fields of the next order."""
    data = link.recv(1 << 18)
    if not data:
        sys.stderr.write(GONE)
        sys.exit(1)
    return [os.fsdecode(field) for field in data.split(b"\0")]


def obey(link: socket.socket, tool: str, args: list[str], order: list[str]) -> int:
    """Run the tool until the controller is content; its code, or minus the signal that ended it."""
    code = 0
    while order[0].startswith("R"):
        pid = start(tool, args, order)
        signals: list[int] = []

        def on_signal(number: int, _: object, pid: int = pid, received: list[int] = signals) -> None:
            received.append(number)
            with contextlib.suppress(OSError):
                os.killpg(pid, number)
                os.killpg(pid, signal.SIGCONT)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, on_signal)
        link.send(f"S {pid}".encode())
        _, status, used = os.wait4(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        times = f"{used.ru_maxrss} {int(used.ru_utime * 1e6)} {int(used.ru_stime * 1e6)}"
        link.send(f"E {code} {times} -1 -1 {signals[0] if signals else 0}".encode())
        order = hear(link)
    if len(order) > 3 and order[3]:
        sys.stderr.write(order[3])
    return int(order[1]) if len(order) > 1 and order[1] else code


def main(argv: list[str]) -> int:
    """The whole of it."""
    shim, args = argv[0], argv[1:]
    leave_our_folders_out(argv)
    tool, args = tool_of(shim, args)
    folder = "" if not args or LIGHT & set(args) else run_folder(shim)
    if folder:
        try:
            link = connect(folder)
        except OSError:
            sys.stderr.write(GONE)
            return 1
        link.send(b"H%d %s" % (os.getppid(), os.fsencode(tool)))
        order = hear(link)
        if order[0] == "X":
            sys.stdout.write(order[2])
            sys.stderr.write(order[3])
            return int(order[1])
        if order[0].startswith("R"):
            code = obey(link, tool, args, order)
            return code if code >= 0 else 128 - code
    os.execvp(tool, [tool, *args])
    return 127


def undo_coercion() -> None:
    """Python adds LC_CTYPE to its environment in the C locale, which would change the tool's messages."""
    with open("/proc/self/environ", "rb") as file:  # noqa: PTH123
        variables = file.read().split(b"\0")
    if os.environ.get("LC_CTYPE") == "C.UTF-8" and not any(e.startswith(b"LC_CTYPE=") for e in variables):
        del os.environ["LC_CTYPE"]


if __name__ == "__main__":
    undo_coercion()
    sys.exit(main(sys.argv[1:]))
