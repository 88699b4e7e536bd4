"""Runs a Python program many times in processes that have torch, torch_npu and Stable-Baselines3 imported already.

Importing them takes seconds, a run of the program on the simulated NPU a fraction of one. So this server imports them
once, without touching the device, and forks a process for each case. The child takes on the case's environment,
working directory and files and then executes the program as `__main__`; the exit of a process that has taken the
device, and everything that torch_npu does then, is the interpreter's own.

    python forkserver.py FD     FD: one end of a SOCK_SEQPACKET pair

A request is a JSON object (see Case) with four file descriptors: stdin, stdout, stderr and a pipe to which the server
writes the child's PID and, when it has ended, its wait status, a line each. The server ends at the end of file.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import termios
import threading
import types
from typing import Any

PR_SET_PDEATHSIG = 1


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Forks until the end of file. Returns the case in each child and None in the server."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: dict[int, int] = {}  # PID: the pipe for its status
    server = os.getpid()

    while True:
        ready, _, _ = select.select([control, wake_read], [], [])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(wake_read, 4096):
                    pass
            for child in list(children):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    report(children[pid], status)
                    os.close(children.pop(pid))
        if control in ready:
            request, files, _, _ = socket.recv_fds(control, 1 << 20, 4)
            if not request:
                break
            stdin, stdout, stderr, pipe = files
            pid = os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != server:
                    os._exit(1)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGHUP, signal.SIG_DFL)
                os.setsid()
                for number, file in enumerate((stdin, stdout, stderr)):
                    os.dup2(file, number)
                control.close()
                for file in {*files, *children.values(), wake_read, wake_write}:
                    os.close(file)
                return dict(json.loads(request))
            children[pid] = pipe
            for file in (stdin, stdout, stderr):
                os.close(file)
            report(pipe, pid)

    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def report(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, b"%d\n" % number)


def run(case: dict[str, Any]) -> None:
    """Executes case["script"] as `python3 SCRIPT ARGUMENTS` would."""
    os.chdir(case["cwd"])
    os.environ.clear()
    os.environ.update(case["env"])
    if case["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the controlling terminal of the session that was begun above
    for name, limit in case["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))

    script = os.path.abspath(case["script"])
    sys.argv = [case["script"], *case["args"]]
    sys.path[0] = os.path.dirname(script)
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    with open(script, encoding="utf-8") as file:
        source = file.read()
    try:
        exec(compile(source, script, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as end:
        if type(end.code) not in (int, types.NoneType):
            raise
        leave(end.code or 0)
    leave(0)


def leave(code: int) -> None:
    """Ends a process that has not touched the device without taking all of torch down, which takes longer than a run.

    A supervisor started from a shell has nothing of torch to take down either. What is registered to run at the exit
    runs. In a process that has taken the device the interpreter ends as it always does.
    """
    if not sys.modules["torch"].npu.is_initialized():
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):  # then the interpreter says so at its own end
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit(code & 0xFF)
    sys.exit(code)


if __name__ == "__main__":
    for name in ("torch", "torch_npu", "stable_baselines3"):  # in the program's order
        importlib.import_module(name)
    if sys.modules["torch"].npu.is_initialized():
        sys.exit("importing touched the device: forked children could not use it")
    sys.stdout.flush()  # what the imports printed is not the children's to print again
    sys.stderr.flush()
    gc.collect()
    gc.freeze()
    case = serve(socket.socket(fileno=int(sys.argv[1])))
    if case is not None:
        run(case)
