"""Generated programs, each in a process with limits of time, memory and files.

    python -I eval/sandbox.py 42 < program.py        exit status 42 if the program comes to its end

A program may read files, since it imports modules. It may not write or remove any, start a process, or open a connection: Python refuses
these to it by an audit hook. This guards against mistakes of a model. It is no wall against a program that means harm: run code of a
model that you do not trust on a machine that you can lose.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

SECONDS, CPU_SECONDS = 20, 10
"""By the clock, which other processes share, and of the processor."""
MEMORY = 2**30
"""Bytes of address space."""
REFUSED = ("os.", "shutil.", "socket.", "subprocess.", "ctypes.", "pty.", "fcntl.", "signal.", "urllib.", "http.", "ftplib.", "webbrowser.")
ALLOWED = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr"}
"""Events of the audit hook: all that begin so are refused, but for those that only look."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def ends(program: str, seconds: float = SECONDS) -> bool:
    """Whether a program comes to its end, within the limits and without an error. One that calls `os._exit` does not know the status."""
    status = random.randrange(2, 128)
    with tempfile.TemporaryDirectory() as empty, contextlib.suppress(subprocess.TimeoutExpired):
        command, quiet = [sys.executable, "-I", os.path.abspath(__file__), str(status)], subprocess.DEVNULL
        found = subprocess.run(
            command, input=program.encode(), stdout=quiet, stderr=quiet, cwd=empty, env={}, timeout=seconds, start_new_session=True
        )
        return found.returncode == status
    return False  # the time was over


def all_end(programs: Sequence[str]) -> list[bool]:
    """`ends` of each, as many at a time as there are processors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(ends, programs))


def refuse(event: str, arguments: tuple) -> None:
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
    if writes or event.startswith(REFUSED) and event not in ALLOWED:
        raise PermissionError(f"{event} is refused to generated code")


def main() -> None:
    status = int(sys.argv.pop())
    program = compile(sys.stdin.read(), "<generated>", "exec")
    limits = {resource.RLIMIT_CPU: CPU_SECONDS, resource.RLIMIT_AS: MEMORY, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    sys.addaudithook(refuse)
    try:
        exec(program, {"__name__": "__main__"})
    except SystemExit:
        status = 1
    os._exit(status)


if __name__ == "__main__":
    main()
