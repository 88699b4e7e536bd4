"""The runtime half of the simulated NPU: devices, memory, streams, errors, the trace, fault injection and npu-smi."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import support

H2H, H2D, D2H, D2D, DEFAULT = range(5)
PARAM_INVALID, NO_DEVICE_ID, NO_CONTEXT, WRONG_CONTEXT = 107000, 107001, 107002, 107003
OUT_OF_MEMORY, NO_DEVICE, NOT_SUPPORTED = 207001, 207004, 207000
AICORE_EXCEPTION, SYNC_TIMEOUT = 507015, 507046

# What every case below starts with. `acl` calls the library as torch_npu does: by the C ABI.
PRELUDE = """
import ctypes as c, os, sys, threading, time

lib = c.CDLL("libascendcl.so")
lib.aclGetRecentErrMsg.restype = lib.aclrtGetSocName.restype = lib.cannsim_version.restype = c.c_char_p

class Acl:
    def __getattr__(self, name):
        def call(*args):
            return getattr(lib, name)(*(c.c_size_t(a) if isinstance(a, int) else a for a in args))
        return call

    def out(self, name, *args, kind=c.c_void_p):
        "The value that a function stores through its first argument."
        value = kind()
        ok(getattr(self, name)(c.byref(value), *args))
        return value.value

acl = Acl()

def message():
    return (lib.aclGetRecentErrMsg() or b"").decode()

def ok(code):
    assert code == 0, (code, message())

def bad(code, expected, text=""):
    assert code == expected, (code, expected, message())
    said = message()
    assert text in said, said

def start(device=0):
    ok(acl.aclInit(None))
    ok(acl.aclrtSetDevice(device))

def malloc(size):
    return acl.out("aclrtMallocAlign32", size, 0)

def upload(data):
    device = malloc(len(data))
    ok(acl.aclrtMemcpy(device, len(data), data, len(data), 1))
    return device

def download(device, size):
    host = c.create_string_buffer(size)
    ok(acl.aclrtMemcpy(host, size, device, size, 2))
    return host.raw

def stream():
    return acl.out("aclrtCreateStreamWithConfig", 0, 3)

def copy_async(device, host, size, on):
    return acl.aclrtMemcpyAsync(host, size, device, size, 2, on)
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(simulator: Path, tmp_path: Path) -> dict[str, str]:
    """With a registry of this test's own, so that nobody else's processes are in its npu-smi."""
    variables = support.clean_environment()
    runtime = tmp_path / "run"
    runtime.mkdir()
    path = f"{simulator / 'bin'}{os.pathsep}{variables['PATH']}"
    return variables | {"LD_LIBRARY_PATH": str(simulator), "PATH": path, "XDG_RUNTIME_DIR": str(runtime)}


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    """Runs a case in a process of its own and returns it; it must succeed unless `code` says otherwise."""

    def run(body: str, code: int | None = 0, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(body)]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment | env, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert code is None or result.returncode == code, f"{result.returncode}\n{result.stdout}{result.stderr}"
        return result

    return run


@contextlib.contextmanager
def running(environment: dict[str, str], body: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A case that has printed `ready` and goes on."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        env=environment | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if line != "ready\n":
            process.kill()
            raise AssertionError(f"{line}{process.communicate()}")
        yield process
    finally:
        process.kill()
        process.communicate()


HOLD = """
start(int(os.environ.get("DEVICE", "0")))
memory = malloc(3 << 20)
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def smi(environment: dict[str, str], *args: str, code: int = 0, **env: str) -> str:
    result = subprocess.run(
        ["npu-smi", *args], env=environment | env, capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == code, f"{result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout


def trace(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Initialisation, devices, contexts


def test_says_what_it_is(run: Run) -> None:
    run("assert lib.cannsim_version()")


def test_calls_in_the_wrong_order(run: Run) -> None:
    run("""
        pointer, number = c.c_void_p(), c.c_int32()
        bad(acl.aclrtSetDevice(0), 100001, "aclInit")
        bad(acl.aclFinalize(), 100001)
        ok(acl.aclInit(None))
        bad(acl.aclInit(None), 100002)
        bad(acl.aclrtGetDevice(c.byref(number)), 107002)
        bad(acl.aclrtMallocAlign32(c.byref(pointer), 16, 0), 107002, "no device has been set")
        bad(acl.aclrtCreateStreamWithConfig(c.byref(pointer), 0, 3), 107002)
        bad(acl.aclrtSynchronizeDevice(), 107002)
        bad(acl.aclrtResetDevice(0), 107001)
        for device in (1, -1, 1000):
            bad(acl.aclrtSetDevice(c.c_int32(device)), 107001, f"no device {device}")
        ok(acl.aclrtSetDevice(0))
        assert acl.out("aclrtGetDevice", kind=c.c_int32) == 0
        ok(acl.aclrtResetDevice(0))
        bad(acl.aclrtMallocAlign32(c.byref(pointer), 16, 0), 107002)
        ok(acl.aclFinalize())
    """)


def test_a_thread_needs_a_device_of_its_own_unless_there_is_a_default(run: Run, tmp_path: Path) -> None:
    body = """
        ok(acl.aclInit(os.environ["CONFIG"].encode()))
        ok(acl.aclrtSetDevice(0))
        codes = []
        def work():
            pointer = c.c_void_p()
            codes.append(acl.aclrtMallocAlign32(c.byref(pointer), 16, 0))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print(codes[0])
    """
    plain, default = tmp_path / "acl.json", tmp_path / "default.json"
    plain.write_text('{"dump": {"dump_scene": "lite_exception"}}')
    default.write_text('{"dump": {"dump_scene": "lite_exception"}, "defaultDevice":{"default_device":"0"}}')
    assert run(body, CONFIG=str(plain)).stdout == "107002\n"
    assert run(body, CONFIG=str(default)).stdout == "0\n"
    assert "100003" in run(body, code=1, CONFIG=str(tmp_path / "missing.json")).stderr


@pytest.mark.parametrize(
    ("devices", "visible", "expected"),
    [
        ("1", None, "1"),
        ("4", None, "4"),
        ("0", None, "0"),
        ("4", "0", "1"),
        ("4", "1,3", "2"),
        ("4", "", "0"),
        ("4", "a", "0"),
        ("4", "0,a", "0"),
        ("4", "1,1", "0"),
        ("4", "1,0", "0"),
        ("4", "0,", "0"),
        ("4", "4", "0"),
        ("4", "-1", "0"),
        ("0", "0", "0"),
    ],
)
def test_visible_devices(run: Run, devices: str, visible: str | None, expected: str) -> None:
    env = {"CANNSIM_DEVICES": devices} | ({} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible})
    result = run(
        """
        count = c.c_uint32(99)
        code = acl.aclrtGetDeviceCount(c.byref(count))
        print(code, count.value)
        ok(acl.aclInit(None))
        bad(acl.aclrtSetDevice(count.value), 107001)
        """,
        **env,
    )
    # A list that leaves nothing is an error, as in CANN.
    code = NO_DEVICE if expected == "0" and visible is not None else 0
    assert result.stdout == f"{code} {expected}\n"


def test_versions_and_names(run: Run) -> None:
    body = """
        version, text = c.create_string_buffer(1024), c.create_string_buffer(256)
        ok(acl.aclsysGetCANNVersion(0, version))
        ok(acl.aclsysGetVersionStr(b"runtime", text))
        print(lib.aclrtGetSocName().decode(), version.value.decode(), text.value.decode())
        ok(acl.aclsysGetCANNVersion(7, version))
        print(version.value.decode())
        bad(acl.aclsysGetCANNVersion(8, version), 100000)
        bad(acl.aclsysGetVersionStr(b"nonsense", text), 100003, "nonsense")
    """
    assert run(body).stdout == "Ascend910B4-1 8.5.1 8.5.1\n25.5.1\n"
    changed = run(body, CANNSIM_SOC="Ascend910B1", CANNSIM_CANN_VERSION="8.1.RC1", CANNSIM_NPU_SMI="26")
    assert changed.stdout == "Ascend910B1 8.1.RC1 8.1.RC1\n26.0.rc1\n"


# Memory


def test_memory_that_was_not_handed_out_cannot_be_freed(run: Run) -> None:
    run("""
        start()
        device = malloc(4096)
        for wrong in (device + 32, device + 4096, id(acl), 0):
            bad(acl.aclrtFree(wrong), 107000)
        ok(acl.aclrtFree(device))
        bad(acl.aclrtFree(device), 107000)
        host = acl.out("aclrtMallocHost", 100)
        bad(acl.aclrtFree(host), 107000)
        bad(acl.aclrtFreeHost(host + 1), 107000)
        ok(acl.aclrtFreeHost(host))
        bad(acl.aclrtFreeHost(host), 107000)
        bad(acl.aclrtMallocAlign32(c.byref(c.c_void_p()), 0, 0), 107000)
    """)


def test_copies_go_where_they_say(run: Run) -> None:
    run("""
        start()
        data = os.urandom(100)
        device, other = upload(data), malloc(100)
        assert download(device, 100) == data
        assert download(device + 7, 93) == data[7:]
        ok(acl.aclrtMemcpy(other, 100, device, 100, 3))
        assert download(other, 100) == data
        host = c.create_string_buffer(100)
        ok(acl.aclrtMemcpy(host, 100, device, 100, 4))
        assert host.raw == data
        ok(acl.aclrtMemset(device, 100, 0x1F7, 50))
        assert download(device, 100) == b"\\xf7" * 50 + data[50:]
    """)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("acl.aclrtMemcpy(device, 100, host, 100, 0)", "the destination is a device address"),
        ("acl.aclrtMemcpy(host, 100, device, 100, 0)", "the source is a device address"),
        ("acl.aclrtMemcpy(host, 100, host, 100, 1)", "the destination is not 100 bytes of live device memory"),
        ("acl.aclrtMemcpy(device, 100, device, 100, 1)", "the source is a device address"),
        ("acl.aclrtMemcpy(device, 100, device, 100, 2)", "the destination is a device address"),
        ("acl.aclrtMemcpy(host, 100, host, 100, 2)", "the source is not"),
        ("acl.aclrtMemcpy(host, 100, device, 100, 3)", "the destination is not"),
        ("acl.aclrtMemcpy(device, 100, host, 100, 3)", "the source is not"),
        ("acl.aclrtMemcpy(device, 101, host, 101, 1)", "the destination is not 101 bytes"),
        ("acl.aclrtMemcpy(device + 1, 100, host, 100, 1)", "the destination is not"),
        ("acl.aclrtMemcpy(device, 99, host, 100, 1)", "100 bytes into room for 99"),
        ("acl.aclrtMemcpy(device, 100, host, 0, 1)", "0 bytes"),
        ("acl.aclrtMemcpy(None, 100, host, 100, 1)", "the destination is nullptr"),
        ("acl.aclrtMemcpy(device, 100, None, 100, 1)", "the source is nullptr"),
        ("acl.aclrtMemcpy(device, 100, host, 100, 9)", "unknown kind 9"),
        ("acl.aclrtMemcpy(freed, 100, host, 100, 1)", "the destination is not"),
        ("acl.aclrtMemcpy(host, 100, freed, 100, 4)", "the source is not"),
        ("acl.aclrtMemcpyAsync(host, 100, device, 100, 1, None)", "the destination is not"),
        ("acl.aclrtMemset(host, 100, 0, 100)", "the destination is not"),
        ("acl.aclrtMemset(device, 100, 0, 101)", "101 bytes in room for 100"),
        ("acl.aclrtMemsetAsync(device + 1, 100, 0, 100, None)", "the destination is not"),
    ],
)
def test_wrong_copies_are_errors(run: Run, call: str, why: str) -> None:
    run(f"""
        start()
        host = c.create_string_buffer(100)
        device, freed = malloc(100), malloc(100)
        ok(acl.aclrtFree(freed))
        bad({call}, 107000, {why!r})
    """)


@pytest.mark.parametrize("access", ["c.string_at(device, 4)", "c.memset(device, 0, 4)"])
def test_the_host_cannot_touch_device_memory(run: Run, access: str) -> None:
    run(f"start(); device = upload(b'1234'); {access}", code=-signal.SIGSEGV)


def test_fresh_memory_is_not_zero(run: Run) -> None:
    run("""
        start()
        device = upload(bytes(4096))
        ok(acl.aclrtFree(device))
        again = malloc(4096)
        assert again == device and download(again, 4096) == b"\\xff" * 4096
    """)


def test_device_memory_is_limited(run: Run) -> None:
    run(
        """
        start()
        pointer, free, total = c.c_void_p(), c.c_size_t(), c.c_size_t()
        def info():
            ok(acl.aclrtGetMemInfo(1, c.byref(free), c.byref(total)))
            return free.value >> 20, total.value >> 20
        assert info() == (8, 8)
        bad(acl.aclrtMallocAlign32(c.byref(pointer), (8 << 20) + 1, 0), 207001, "out of device memory")
        pieces = [malloc(2 << 20) for _ in range(4)]
        assert info() == (0, 8) and len(set(pieces)) == 4
        bad(acl.aclrtMallocAlign32(c.byref(pointer), 1, 0), 207001)
        ok(acl.aclrtFree(pieces[0])); ok(acl.aclrtFree(pieces[2]))
        bad(acl.aclrtMallocAlign32(c.byref(pointer), 3 << 20, 0), 207001)
        ok(acl.aclrtFree(pieces[1]))
        assert malloc(6 << 20) == pieces[0]
        ok(acl.aclrtResetDevice(0)); ok(acl.aclrtSetDevice(0))
        assert info() == (8, 8)
        """,
        CANNSIM_HBM_MB="8",
    )


def test_devices_have_memory_of_their_own(run: Run) -> None:
    run(
        """
        start(0)
        first = malloc(8 << 20)
        ok(acl.aclrtSetDevice(1))
        second = malloc(8 << 20)
        ok(acl.aclrtResetDevice(0))
        bad(acl.aclrtFree(first), 107000)
        ok(acl.aclrtFree(second))
        """,
        CANNSIM_HBM_MB="8",
        CANNSIM_DEVICES="2",
    )


def test_a_limit_on_file_sizes_does_not_limit_the_device(run: Run) -> None:
    run("""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        start()
        assert download(upload(b"1234"), 4) == b"1234"
    """)


def test_what_a_pointer_is(run: Run) -> None:
    run("""
        start()
        def kind(address):
            attributes = (c.c_uint32 * 8)()
            ok(acl.aclrtPointerGetAttributes(address, attributes))
            return attributes[1]
        device, host = malloc(100), acl.out("aclrtMallocHost", 100)
        assert [kind(p) for p in (device, device + 99, host, host + 99, id(acl))] == [1, 1, 0, 0, 2]
    """)


# Streams, events, errors


def test_streams_run_in_order(run: Run) -> None:
    run("""
        start()
        device, on = malloc(8), stream()
        values = [c.c_uint64(i) for i in range(500)]
        seen = [c.c_uint64(0) for _ in values]
        for value, back in zip(values, seen):
            ok(acl.aclrtMemcpyAsync(device, 8, c.byref(value), 8, 1, on))
            ok(copy_async(device, c.byref(back), 8, on))
        ok(acl.aclrtSynchronizeStream(on))
        assert [back.value for back in seen] == list(range(500))
    """)


def test_streams_that_are_not_there(run: Run) -> None:
    run(
        """
        start()
        on, host, device = stream(), c.create_string_buffer(8), malloc(8)
        ok(acl.aclrtDestroyStreamForce(on))
        bad(acl.aclrtSynchronizeStream(on), 107000, "destroyed")
        bad(copy_async(device, host, 8, on), 107000, "destroyed")
        bad(acl.aclrtDestroyStreamForce(on), 107000)
        bad(acl.aclrtSynchronizeStreamWithTimeout(id(acl), -1), 107000)
        assert stream() != on, "a handle came back"
        theirs = stream()
        ok(acl.aclrtSetDevice(1))
        bad(acl.aclrtSynchronizeStream(theirs), 107003)
        ok(acl.aclrtResetDevice(0))
        bad(acl.aclrtSynchronizeStream(theirs), 107000)
        """,
        CANNSIM_DEVICES="2",
    )


def test_events(run: Run) -> None:
    run("""
        start()
        one, two = stream(), stream()
        a, b = (acl.out("aclrtCreateEventExWithFlag", 8) for _ in "ab")
        device, source = malloc(1 << 22), c.create_string_buffer(b"x" * (1 << 22), 1 << 22)
        back = c.create_string_buffer(1 << 22)
        status, ms = c.c_int(7), c.c_float()
        ok(acl.aclrtQueryEventStatus(a, c.byref(status)))
        assert status.value == 0
        bad(acl.aclrtEventElapsedTime(c.byref(ms), a, b), 507006)
        ok(acl.aclrtRecordEvent(a, one))
        ok(acl.aclrtMemcpyAsync(device, 1 << 22, source, 1 << 22, 1, one))
        ok(acl.aclrtRecordEvent(b, one))
        ok(acl.aclrtStreamWaitEvent(two, b))
        ok(copy_async(device, back, 1 << 22, two))
        ok(acl.aclrtSynchronizeStream(two))
        assert back.raw == source.raw
        ok(acl.aclrtSynchronizeEvent(b))
        ok(acl.aclrtQueryEventStatus(b, c.byref(status)))
        assert status.value == 1
        ok(acl.aclrtEventElapsedTime(c.byref(ms), a, b))
        assert ms.value > 0
        bad(acl.aclrtEventElapsedTime(c.byref(ms), b, a), 107007)
        ok(acl.aclrtDestroyEvent(a))
        bad(acl.aclrtRecordEvent(a, one), 107000, "destroyed")
    """)


def test_a_failed_task_is_sticky(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    run(
        """
        start()
        on, other, device, host = stream(), stream(), upload(b"1234"), c.create_string_buffer(4)
        ok(copy_async(device, host, 4, on))
        ok(acl.aclrtSynchronizeStream(on))
        assert host.raw == b"1234"
        ok(acl.aclrtMemset(device, 4, 0, 4))
        assert acl.aclrtPeekAtLastError(0) == 0
        for _ in range(3):
            ok(copy_async(device, host, 4, on))  # the launch succeeds, the task does not
        event = acl.out("aclrtCreateEventExWithFlag", 8)
        ok(acl.aclrtRecordEvent(event, on))
        for call in (acl.aclrtSynchronizeStream, lambda s: acl.aclrtSynchronizeStreamWithTimeout(s, 1000)):
            bad(call(on), 507015, "exec:aclrtMemcpyAsync")
        bad(acl.aclrtSynchronizeDevice(), 507015)
        bad(acl.aclrtSynchronizeEvent(event), 507015)
        assert acl.aclrtPeekAtLastError(0) == 507015
        assert host.raw == b"1234", "a task ran after the one that failed"
        ok(copy_async(device, host, 4, other))
        ok(acl.aclrtSynchronizeStream(other))
        ok(acl.aclrtDestroyStreamForce(on))
        ok(acl.aclrtSynchronizeDevice())
        """,
        CANNSIM_FAIL="exec:aclrtMemcpyAsync:2",
        CANNSIM_TRACE=str(path),
    )
    executions = [line for line in trace(path) if line["name"] == "exec:aclrtMemcpyAsync"]
    assert [line.get("injected") for line in executions] == [None, AICORE_EXCEPTION, None]


def test_an_error_message_is_handed_out_once(run: Run) -> None:
    run("""
        start()
        bad(acl.aclrtFree(1), 107000, "aclrtFree")
        assert lib.aclGetRecentErrMsg() is None
        assert acl.aclrtPeekAtLastError(0) == 107000
        assert acl.aclrtGetLastError(0) == 107000
        assert acl.aclrtPeekAtLastError(0) == 0
    """)


def test_what_is_not_simulated_says_so(run: Run) -> None:
    result = run("""
        bad(acl.aclrtProcessReport(1), 207000, "aclrtProcessReport is not simulated")
        start()
        nothing = [None] * 2
        bad(acl.aclopCompileAndExecute(b"MatMul", 0, *nothing, 0, *nothing, None, 0, 0, *nothing), 100024, "MatMul")
        assert os.path.isdir("kernel_meta"), "the operator compiler was not started"
    """)
    assert "aclrtProcessReport is not simulated" in result.stderr


def test_an_operator_that_is_not_simulated_refuses_by_name(run: Run) -> None:
    run("""
        operators = c.CDLL("libopapi.so")
        start()
        for name in ("aclnnFracGetWorkspaceSize", "aclnnFrac", "aclnnIndexFillGetWorkspaceSize", "aclnnAngleV2"):
            bad(getattr(operators, name)(), 561003, f"{name}: this operator is not simulated")
        # Where torch_npu has another way that is right it must not find one that refuses.
        for name in ("aclnnGatherV3", "aclnnForeachErfc"):
            assert not hasattr(operators, name + "GetWorkspaceSize"), name
    """)


# The trace, injected failures and hangs


def test_trace(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    run(
        """
        start()
        on, device = stream(), malloc(16)
        host = c.create_string_buffer(16)
        ok(acl.aclrtMemcpy(device, 16, host, 10, 1))
        ok(copy_async(device, host, 12, on))
        ok(acl.aclrtSynchronizeStream(on))
        """,
        CANNSIM_TRACE=str(path),
    )
    lines = trace(path)
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    assert len({line["pid"] for line in lines}) == 1
    copies = [(line["name"], line["bytes"], line["direction"]) for line in lines if "direction" in line]
    assert copies == [("aclrtMemcpy", 10, "h2d"), ("aclrtMemcpyAsync", 12, "d2h")]
    by_name = {line["name"]: line for line in lines}
    assert by_name["exec:aclrtMemcpyAsync"]["thread"] != by_name["aclrtMemcpyAsync"]["thread"] == lines[0]["pid"]


def test_the_trace_of_many_threads_is_whole_even_after_a_kill(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "trace"
    body = """
        start()
        def work():
            while True:
                acl.aclrtPeekAtLastError(0)
        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        print("ready", flush=True)
        time.sleep(60)
    """
    with running(environment, body, CANNSIM_TRACE=str(path)) as process:
        process.kill()
        process.wait()
    lines = trace(path)
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    assert len({line["thread"] for line in lines}) == 5


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("aclrtMallocAlign32", "207001 0 0"),
        ("aclrtMallocAlign32:2", "0 207001 0"),
        ("aclrtMallocAlign32:3:207018", "0 0 207018"),
        ("aclrtMallocAlign32:9", "0 0 0"),
        ("aclrtMallocAlign32:1,aclrtMallocAlign32:3:500000", "207001 0 500000"),
        ("*:4", "0 207001 0"),
        ("*:5:77", "0 0 77"),
        ("aclrtMalloc", "0 0 0"),
    ],
)
def test_injected_failures(run: Run, spec: str, expected: str) -> None:
    result = run(
        """
        start()
        print(*(acl.aclrtMallocAlign32(c.byref(c.c_void_p()), 16, 0) for _ in range(3)))
        """,
        CANNSIM_FAIL=spec,
    )
    assert result.stdout.strip() == expected


def test_an_injected_failure_has_no_effect(run: Run) -> None:
    run(
        """
        start()
        device = upload(b"1234")
        bad(acl.aclrtMemset(device, 4, 0, 4), 507899, "injected")
        assert download(device, 4) == b"1234"
        bad(acl.aclrtFree(device), 99)
        ok(acl.aclrtFree(device))
        """,
        CANNSIM_FAIL="aclrtMemset,aclrtFree:1:99",
    )


def test_star_counts_the_lines_of_the_trace(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    body = """
        start()
        on, device, host = stream(), malloc(16), c.create_string_buffer(16)
        copy_async(device, host, 16, on)
        print(acl.aclrtSynchronizeStream(on))
    """
    assert run(body, CANNSIM_TRACE=str(path)).stdout == "0\n"
    first, last = (names := [line["name"] for line in trace(path)])[:-2], names[-2:]
    assert " ".join(first) == "aclInit aclrtSetDevice aclrtCreateStreamWithConfig aclrtMallocAlign32 aclrtMemcpyAsync"
    # These may come in either order: the stream is a thread of its own. Whichever fails, the synchronise says so.
    assert sorted(last) == ["aclrtSynchronizeStream", "exec:aclrtMemcpyAsync"]
    assert run(body, CANNSIM_FAIL="*:6:123").stdout == "123\n"
    assert run(body, CANNSIM_FAIL="exec:*").stdout == f"{AICORE_EXCEPTION}\n"


# Prints what two synchronous and two asynchronous copies of the same data deliver.
FOUR_COPIES = """
    import struct
    start()
    kind, numbers = os.environ["KIND"], [int(x) if x.isdigit() else float(x) for x in os.environ["NUMBERS"].split()]
    data, on = struct.pack(f"{len(numbers)}{kind}", *numbers), stream()
    device = malloc(len(data))
    ok(acl.aclrtMemset(device, len(data), 0, len(data)))
    def show(raw):
        print(*struct.unpack(f"{len(numbers)}{kind}", raw))
    def host():
        return c.create_string_buffer(struct.pack(f"{len(numbers)}{kind}", *[9] * len(numbers)), len(data))
    ok(acl.aclrtMemcpy(device, len(data), data, len(data), 1))
    for copy in (
        lambda buffer: acl.aclrtMemcpy(buffer, len(data), device, len(data), 2),
        lambda buffer: copy_async(device, buffer, len(data), on),
        lambda buffer: copy_async(device, buffer, len(data), on),
    ):
        buffer = host()
        ok(copy(buffer))
        ok(acl.aclrtSynchronizeStream(on))
        show(buffer.raw)
"""


@pytest.mark.parametrize(
    ("spec", "kind", "numbers", "expected"),
    [
        ("aclrtMemcpy", "f", "1.0 4.0", ["1.0 2.0", "1.0 2.0", "1.0 2.0"]),  # the device holds the wrong data
        ("aclrtMemcpy:2", "f", "1.0 4.0", ["1.0 2.0", "1.0 4.0", "1.0 4.0"]),
        ("aclrtMemcpy:2", "f", "0.0 0.0", ["2.0 0.0", "0.0 0.0", "0.0 0.0"]),
        ("aclrtMemcpy:2", "q", "6 7", ["7 7", "6 7", "6 7"]),
        ("aclrtMemcpy:2", "b", "6 7 8", ["7 7 8", "6 7 8", "6 7 8"]),
        ("aclrtMemcpyAsync:1:zero", "f", "1.0 4.0", ["1.0 4.0", "0.0 0.0", "1.0 4.0"]),
        ("aclrtMemcpyAsync:2:swap", "f", "1.0 4.0", ["1.0 4.0", "1.0 4.0", "4.0 1.0"]),
        ("aclrtMemcpyAsync:*:stale", "f", "1.0 4.0", ["1.0 4.0", "9.0 9.0", "9.0 9.0"]),
        ("exec:aclrtMemcpyAsync:2:zero", "f", "1.0 4.0", ["1.0 4.0", "1.0 4.0", "0.0 0.0"]),
        ("copy:*:3:zero", "f", "1.0 4.0", ["1.0 4.0", "0.0 0.0", "1.0 4.0"]),
        ("copy:*:2:zero,copy:*:4:stale", "f", "1.0 4.0", ["0.0 0.0", "1.0 4.0", "9.0 9.0"]),
        ("exec:aclnnRelu:*", "f", "1.0 4.0", ["1.0 4.0", "1.0 4.0", "1.0 4.0"]),
    ],
)
def test_corrupted_copies(run: Run, spec: str, kind: str, numbers: str, expected: list[str]) -> None:
    result = run(FOUR_COPIES, CANNSIM_CORRUPT=spec, KIND=kind, NUMBERS=numbers)
    assert result.stdout.splitlines() == expected


def test_a_corrupted_copy_is_in_the_trace_and_a_failure_wins(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    failing = "aclrtMemcpyAsync:2:107000"
    environment = {"CANNSIM_CORRUPT": "aclrtMemcpyAsync:*", "CANNSIM_FAIL": failing, "CANNSIM_TRACE": str(path)}
    run(FOUR_COPIES, code=1, KIND="f", NUMBERS="1.0 4.0", **environment)
    copies = [line.get("injected") for line in trace(path) if line["name"] == "aclrtMemcpyAsync"]
    assert copies == ["corrupt", 107000]
    assert not [line for line in trace(path) if line["name"] != "aclrtMemcpyAsync" and "injected" in line]


def test_a_task_that_hangs(run: Run) -> None:
    result = run(
        """
        start()
        on, device, host = stream(), malloc(16), c.create_string_buffer(16)
        ok(copy_async(device, host, 16, on))
        began = time.monotonic()
        bad(acl.aclrtSynchronizeStreamWithTimeout(on, 200), 507046)
        assert 0.2 <= time.monotonic() - began < 5
        bad(acl.aclrtSynchronizeDeviceWithTimeout(100), 507046)
        status = c.c_int()
        ok(acl.aclrtStreamQuery(on, c.byref(status)))
        assert status.value == 1
        ok(acl.aclrtDestroyStreamForce(on))
        ok(acl.aclrtResetDevice(0))
        ok(acl.aclFinalize())
        """,
        CANNSIM_HANG="exec:aclrtMemcpyAsync",
    )
    assert result.stderr == ""


@pytest.mark.parametrize("hang", ["aclrtSynchronizeStream", "exec:aclrtMemcpyAsync"])
def test_a_call_that_hangs_dies_of_sigterm_only(environment: dict[str, str], hang: str) -> None:
    body = """
        start()
        on, device, host = stream(), malloc(16), c.create_string_buffer(16)
        ok(copy_async(device, host, 16, on))
        print("ready", flush=True)
        acl.aclrtSynchronizeStream(on)
    """
    with running(environment, body, CANNSIM_HANG=hang) as process:
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CANNSIM_FAIL", "aclrtMalloc:0"),
        ("CANNSIM_FAIL", "aclrtMalloc:x"),
        ("CANNSIM_FAIL", "aclrtMalloc:1:0"),
        ("CANNSIM_FAIL", "aclrtMalloc:1:2:3"),
        ("CANNSIM_FAIL", "a,,b"),
        ("CANNSIM_FAIL", "exec:"),
        ("CANNSIM_HANG", "aclrtMalloc:1:2"),
        ("CANNSIM_CORRUPT", "aclrtMalloc"),
        ("CANNSIM_CORRUPT", "exec"),
        ("CANNSIM_CORRUPT", "exec:aclnnRelu:0"),
        ("CANNSIM_CORRUPT", "exec:aclnnRelu:1:byte"),
        ("CANNSIM_CORRUPT", "exec:aclnnRelu:1:bit:2"),
        ("CANNSIM_CORRUPT", "copy:aclrtMemcpy"),
        ("CANNSIM_CORRUPT", "aclrtMemcpy,"),
        ("CANNSIM_DEVICES", "many"),
        ("CANNSIM_DEVICES", ""),
        ("CANNSIM_DEVICES", "65"),
        ("CANNSIM_HBM_MB", "0"),
        ("CANNSIM_HBM_MB", "-1"),
        ("CANNSIM_SOC", ""),
        ("CANNSIM_CANN_VERSION", "latest"),
        ("CANNSIM_NPU_SMI", "27"),
        ("CANNSIM_NPU_SMI", "file:"),
        ("CANNSIM_TRACE", "/nonexistent/trace"),
        ("CANNSIM_FIAL", "aclrtMalloc"),
    ],
)
def test_a_malformed_setting_is_never_ignored(run: Run, name: str, value: str) -> None:
    result = run(
        """
        assert acl.aclrtGetDeviceCount(c.byref(c.c_uint32())) == 100000
        assert acl.aclInit(None) == 100000
        assert lib.aclrtGetSocName() is None
        """,
        **{name: value},
    )
    assert re.match(rf"cannsim: {name}=.*(malformed|cannot be opened).*\n\Z", result.stderr)


def test_forked_processes_work_independently(run: Run, tmp_path: Path) -> None:
    result = run(
        """
        ok(acl.aclrtGetDeviceCount(c.byref(c.c_uint32())))  # what torch_npu does when it is imported
        children = []
        for i in range(3):
            pid = os.fork()
            if pid == 0:
                os.environ["CANNSIM_TRACE"] = os.environ["BASE"] + str(i)
                if i == 1:
                    os.environ["CANNSIM_FAIL"] = "aclInit"
                code = acl.aclInit(None)
                if code == 0:
                    ok(acl.aclrtSetDevice(0))
                    on, device, host = stream(), upload(bytes([i])), c.create_string_buffer(1)
                    ok(copy_async(device, host, 1, on))
                    ok(acl.aclrtSynchronizeStream(on))
                    code = 100 + host.raw[0]
                os._exit(code % 256)
            children.append(pid)
        print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
        start()
        """,
        BASE=str(tmp_path / "trace"),
    )
    assert result.stdout == f"[100, {500001 % 256}, 102]\n"
    for i in range(3):
        assert [line["seq"] for line in trace(tmp_path / f"trace{i}")][:1] == [1]


# The operator compiler

# What the operator compiler leaves in a process: children, a directory, handlers of signals.
TRACES = """
    import pathlib
    def traces():
        me = f"PPid:\\t{os.getpid()}\\n"
        children = []
        for path in pathlib.Path("/proc").glob("[0-9]*/status"):
            try:
                children += [path.parent.name] * (me in path.read_text())
            except OSError:  # it has ended
                pass
        caught = int(pathlib.Path("/proc/self/status").read_text().split("SigCgt:")[1].split()[0], 16)
        handlers = [number for number in (2, 3, 15) if caught >> (number - 1) & 1]
        return len(children), [path.parent.name for path in pathlib.Path().glob("*/kernel_meta_temp_*")], handlers
    NONE, COMPILER = (0, [], [2]), (8, ["kernel_meta"], [2, 3, 15])  # the 2 is Python's own
"""


def test_a_compile_option_starts_the_operator_compiler_and_finalising_ends_it(run: Run) -> None:
    run(
        TRACES
        + """
    start()
    text = c.create_string_buffer(256)
    assert acl.aclGetCompileoptSize(10) == 256  # ACL_OP_JIT_COMPILE
    ok(acl.aclGetCompileopt(10, text, 256))
    assert text.value == b"disable"
    bad(acl.aclSetCompileopt(2, b"1"), 200006, "auto tune")
    bad(acl.aclSetCompileopt(99, b"1"), 500000, "no option 99")
    assert traces() == NONE, traces()
    in_a_thread = threading.Thread(target=lambda: ok(acl.aclSetCompileopt(14, b"00")))
    in_a_thread.start()
    in_a_thread.join()
    assert traces() == COMPILER, traces()
    ok(acl.aclSetCompileopt(0, b"must_keep_origin_dtype"))
    assert traces() == COMPILER, traces()
    ok(acl.aclFinalize())
    deadline = time.monotonic() + 10
    while traces() != NONE:
        assert time.monotonic() < deadline, traces()
    assert not pathlib.Path("kernel_meta").exists()
    """
    )


def test_the_workers_of_the_compiler_die_with_the_process_and_its_handlers_pass_signals_on(
    environment: dict[str, str], tmp_path: Path
) -> None:
    body = (
        TRACES
        + """
    os.chdir(os.environ["HERE"])
    start()
    ok(acl.aclSetCompileopt(14, b"00"))
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    time.sleep(60)
    """
    )
    with running(environment, body, HERE=str(tmp_path)) as process:
        assert process.stdout is not None
        children = Path(f"/proc/{process.pid}").glob("task/*/children")
        workers = [pid for path in children for pid in path.read_text().split()]
        assert len(workers) == 8
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}/stat").exists() and " Z " not in Path(f"/proc/{worker}/stat").read_text()
              for worker in workers):  # fmt: skip
        assert time.monotonic() < deadline


# Graph capture

# A graph that copies `source` to `device` and that to `target`, which are locked host memory of four bytes.
CAPTURED = """
    GLOBAL, THREAD_LOCAL, RELAXED = range(3)
    start()
    def locked(data):
        address = acl.out("aclrtMallocHost", len(data))
        c.memmove(address, data, len(data))
        return address
    def begin(on, mode=GLOBAL):
        ok(acl.aclmdlRICaptureBegin(on, mode))
    def end(on):
        graph = c.c_void_p()
        ok(acl.aclmdlRICaptureEnd(on, c.byref(graph)))
        return graph.value
    def status(on):
        value, graph = c.c_int(), c.c_void_p()
        ok(acl.aclmdlRICaptureGetInfo(on, c.byref(value), c.byref(graph)))
        return value.value, graph.value
    def in_thread(work):
        results = []
        def run():
            ok(acl.aclrtSetDevice(0))
            results.append(work())
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return results[0]
    on, other, device = stream(), stream(), upload(b"0000")
    source, target = locked(b"abcd"), locked(b"----")
    pageable = c.create_string_buffer(4)
    def launch(on, bytes=4):
        ok(acl.aclrtMemcpyAsync(device, 4, source, bytes, 1, on))
        return acl.aclrtMemcpyAsync(target, 4, device, 4, 2, on)
    def target_is(expected):
        ok(acl.aclrtSynchronizeStream(on))
        assert c.string_at(target, 4) == expected, c.string_at(target, 4)
"""


def test_a_captured_stream_records_and_a_replay_runs_it_in_order(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    run(
        CAPTURED
        + """
    assert status(on) == (0, None)
    begin(on)
    assert status(on)[0] == 1 and status(other) == (0, None)
    recorded = status(on)[1]
    bad(acl.aclmdlRIExecuteAsync(recorded, other), 107026, "still captured")
    ok(launch(on))
    ok(acl.aclrtMemsetAsync(device, 4, ord("z"), 2, on))
    graph = end(on)
    assert graph == recorded and status(on) == (0, None)
    target_is(b"----")
    assert download(device, 4) == b"0000", "recording ran it"
    for text in (b"abcd", b"efgh"):
        c.memmove(source, text, 4)
        ok(acl.aclmdlRIExecuteAsync(graph, on))
        target_is(text)
        assert download(device, 4) == b"zz" + text[2:]
    ok(acl.aclmdlRIExecuteAsync(graph, other))
    ok(acl.aclmdlRIDestroy(graph))
    ok(acl.aclrtSynchronizeStream(other))
    bad(acl.aclmdlRIExecuteAsync(graph, on), 107000, "destroyed")
    bad(acl.aclmdlRIDestroy(graph), 107000)
    ok(launch(on))
    target_is(b"efgh")
    """,
        CANNSIM_TRACE=str(path),
    )
    lines = trace(path)
    replays = [line for line in lines if line["name"] == "aclmdlRIExecuteAsync"]
    assert [line["tasks"] for line in replays] == [0, 3, 3, 3, 0]
    executed = [line["name"] for line in lines if line.get("replayed")]
    assert executed == ["exec:aclrtMemcpyAsync", "exec:aclrtMemcpyAsync", "exec:aclrtMemsetAsync"] * 3
    assert len([line for line in lines if line["name"].startswith("exec:") and "replayed" not in line]) == 2


def test_what_a_capture_refuses(run: Run) -> None:
    run(
        CAPTURED
        + """
    event, outside = acl.out("aclrtCreateEventExWithFlag", 8), acl.out("aclrtCreateEventExWithFlag", 8)
    never = acl.out("aclrtCreateEventExWithFlag", 8)
    ok(acl.aclrtRecordEvent(outside, other))
    ok(acl.aclrtSynchronizeEvent(outside))
    bad(acl.aclmdlRICaptureEnd(on, c.byref(c.c_void_p())), 107029, "is not captured")
    bad(acl.aclmdlRICaptureBegin(None, GLOBAL), 107000, "default stream")
    bad(acl.aclmdlRICaptureBegin(on, 3), 107000, "unknown mode")
    begin(on)
    ok(acl.aclrtRecordEvent(event, on))
    number, time = c.c_int(), c.c_float()
    for code, call in (
        (107027, lambda: acl.aclmdlRICaptureBegin(on, GLOBAL)),
        (107027, lambda: acl.aclrtSynchronizeStream(on)),
        (107027, lambda: acl.aclrtSynchronizeStreamWithTimeout(on, 10)),
        (107027, lambda: acl.aclrtStreamQuery(on, c.byref(number))),
        (107027, lambda: acl.aclrtSynchronizeDevice()),
        (107027, lambda: acl.aclrtDestroyStreamForce(on)),
        (107028, lambda: acl.aclrtSynchronizeEvent(event)),
        (107028, lambda: acl.aclrtQueryEventStatus(event, c.byref(number))),
        (107028, lambda: acl.aclrtEventElapsedTime(c.byref(time), outside, event)),
        (107024, lambda: acl.aclrtStreamWaitEvent(on, outside)),
        (107030, lambda: acl.aclrtMemcpy(device, 4, source, 4, 1)),
        (107030, lambda: acl.aclrtMemset(device, 4, 0, 4)),
        (107000, lambda: acl.aclrtMemcpyAsync(device, 4, pageable, 4, 1, on)),
        (107000, lambda: acl.aclrtMemcpyAsync(pageable, 4, device, 4, 2, on)),
        (107041, lambda: acl.aclrtMemcpyAsync(device, 4, pageable, 4, 1, other)),
    ):
        bad(call(), code)
    ok(acl.aclrtStreamWaitEvent(on, never))
    ok(launch(other))  # another stream works on
    ok(acl.aclrtSynchronizeStream(other))
    ok(acl.aclrtFree(malloc(16)))
    ok(launch(on))
    assert status(on)[0] == 1, "what was refused is no part of the capture, and does not spoil it"
    graph = end(on)
    ok(acl.aclmdlRIExecuteAsync(graph, on))
    target_is(b"abcd")
    ok(acl.aclrtSynchronizeDevice())
    """
    )


def test_the_mode_says_which_threads_may_make_unsafe_calls(run: Run) -> None:
    result = run(
        CAPTURED
        + """
    def exchange(mode):
        value = c.c_int(mode)
        ok(acl.aclmdlRICaptureThreadExchangeMode(c.byref(value)))
        return value.value
    def unsafe():
        return acl.aclrtMemset(device, 4, 0, 4)
    for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
        begin(on, mode)
        codes = [unsafe(), in_thread(unsafe)]
        assert exchange(RELAXED) == GLOBAL
        codes.append(unsafe())
        assert exchange(GLOBAL) == RELAXED
        codes.append(in_thread(lambda: exchange(THREAD_LOCAL) + unsafe()))
        print(*codes)
        ok(acl.aclmdlRIDestroy(end(on)))
    bad(acl.aclmdlRICaptureThreadExchangeMode(c.byref(c.c_int(9))), 107000)
    """
    )
    assert result.stdout.splitlines() == ["107030 107030 0 0", "107030 0 0 0", "0 0 0 0"]


@pytest.mark.parametrize("call", ["aclrtMemcpyAsync:2", "aclrtMemsetAsync"])
def test_a_launch_that_fails_spoils_the_capture(run: Run, call: str) -> None:
    run(
        CAPTURED
        + """
    begin(on)
    codes = [launch(on), acl.aclrtMemsetAsync(device, 4, 0, 4, on)]
    assert sorted(codes) == [0, 507899], codes
    assert status(on)[0] == 2
    graph = c.c_void_p(1)
    bad(acl.aclmdlRICaptureEnd(on, c.byref(graph)), 507903, "not valid")
    assert graph.value is None and status(on) == (0, None)
    ok(launch(on))
    target_is(b"abcd")
    begin(on)
    ok(launch(on))
    ok(acl.aclmdlRIExecuteAsync(end(on), on))
    target_is(b"abcd")
    """,
        CANNSIM_FAIL=call,
    )


def test_streams_join_a_capture_by_events(run: Run) -> None:
    run(
        CAPTURED
        + """
    fork, join, third = (acl.out("aclrtCreateEventExWithFlag", 8) for _ in range(3))
    def forked(joined):
        begin(on)
        ok(acl.aclrtMemcpyAsync(device, 4, source, 4, 1, on))
        ok(acl.aclrtRecordEvent(fork, on))
        ok(acl.aclrtStreamWaitEvent(other, fork))
        assert status(other) == status(on)
        bad(acl.aclrtSynchronizeStream(other), 107027)
        bad(acl.aclmdlRICaptureEnd(other, c.byref(c.c_void_p())), 107036, "did not begin")
        ok(acl.aclrtMemcpyAsync(target, 4, device, 4, 2, other))
        ok(acl.aclrtRecordEvent(join, other))
        if not joined:
            ok(acl.aclrtMemsetAsync(device, 4, 0, 4, other))  # after the event: nobody waits for this
        ok(acl.aclrtStreamWaitEvent(on, join))
        graph = c.c_void_p()
        code = acl.aclmdlRICaptureEnd(on, c.byref(graph))
        assert status(other) == status(on) == (0, None)
        return code, graph.value
    code, graph = forked(joined=True)
    ok(code)
    ok(acl.aclmdlRIExecuteAsync(graph, on))
    target_is(b"abcd")
    bad(forked(joined=False)[0], 107025, "not joined")
    begin(on)
    begin(other)
    ok(acl.aclrtRecordEvent(third, on))
    bad(acl.aclrtStreamWaitEvent(other, third), 107032, "another capture")
    bad(acl.aclmdlRICaptureEnd(on, c.byref(c.c_void_p())), 507903)
    bad(acl.aclmdlRICaptureEnd(other, c.byref(c.c_void_p())), 507903)
    begin(on)
    bad(in_thread(lambda: acl.aclmdlRICaptureEnd(on, c.byref(c.c_void_p()))), 107038)
    assert status(on) == (0, None)
    """
    )


def test_a_replay_that_does_not_find_its_memory_fails_on_the_device(run: Run) -> None:
    run(
        CAPTURED
        + """
    for free in (lambda: acl.aclrtFree(device), lambda: acl.aclrtFreeHost(target)):
        on, device, target = stream(), upload(b"0000"), locked(b"----")
        begin(on)
        ok(launch(on))
        graph = end(on)
        ok(acl.aclmdlRIExecuteAsync(graph, on))
        target_is(b"abcd")
        ok(free())
        ok(acl.aclmdlRIExecuteAsync(graph, on))
        bad(acl.aclrtSynchronizeStream(on), 507015, "memory was freed")
    """
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CANNSIM_FAIL": "exec:aclrtMemcpyAsync:3"}, f"0 abcd {AICORE_EXCEPTION} ---- {AICORE_EXCEPTION} ----"),
        ({"CANNSIM_HANG": "exec:aclrtMemcpyAsync:4"}, f"0 abcd {SYNC_TIMEOUT} ---- {SYNC_TIMEOUT} ----"),
        ({"CANNSIM_CORRUPT": "exec:aclrtMemcpyAsync:4:swap"}, "0 abcd 0 efgh 0 abcd"),
        ({"CANNSIM_CORRUPT": "exec:aclrtMemcpyAsync:4:stale"}, "0 abcd 0 ---- 0 abcd"),
        ({"CANNSIM_CORRUPT": "exec:aclrtMemcpyAsync:3:zero"}, "0 abcd 0 \0\0\0\0 0 abcd"),
    ],
)
def test_injections_reach_what_is_replayed(run: Run, variables: dict[str, str], expected: str) -> None:
    result = run(
        CAPTURED
        + """
    begin(on)
    ok(launch(on))
    graph, said = end(on), []
    for text in (b"abcd", b"efgh", b"abcd"):
        c.memmove(source, text, 4)
        c.memmove(target, b"----", 4)
        ok(acl.aclmdlRIExecuteAsync(graph, on))
        said += [str(acl.aclrtSynchronizeStreamWithTimeout(on, 300)), c.string_at(target, 4).decode()]
    print(*said)
    os._exit(sys.stdout.flush() or 0)
    """,
        **variables,
    )
    assert result.stdout == expected + "\n"


# npu-smi


def rows(table: str) -> list[list[str]]:
    """The cells of the process rows."""
    lines = table[table.index("Process id") :].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d+ +0 ", line)]


def test_npu_smi_lists_a_process_while_it_holds_a_context(environment: dict[str, str]) -> None:
    body = """
        ok(acl.aclInit(None))
        print("ready", flush=True)
        for line in sys.stdin:
            exec(line)
            print("done", flush=True)
    """
    with running(environment, body) as process:
        assert rows(smi(environment, "info")) == []
        tell(process, "ok(acl.aclrtSetDevice(0))")
        ((npu, pid, name, memory),) = rows(smi(environment, "info"))
        assert (npu.split(), pid, memory) == (["0", "0"], str(process.pid), "0")
        assert name == Path(f"/proc/{process.pid}/comm").read_text().strip()
        tell(process, "device = malloc(5 << 20)")
        assert rows(smi(environment, "info"))[0][3] == "5"
        assert re.search(r"\b5 +/ 32768 ", smi(environment, "info"))
        tell(process, "ok(acl.aclrtFree(device))")
        assert rows(smi(environment, "info"))[0][3] == "0"
        tell(process, "ok(acl.aclrtResetDevice(0))")
        assert rows(smi(environment, "info")) == []
        tell(process, "ok(acl.aclrtSetDevice(0))")
        assert len(rows(smi(environment, "info"))) == 1
        tell(process, "ok(acl.aclFinalize())")
        assert rows(smi(environment, "info")) == []


def test_npu_smi_forgets_a_killed_process(environment: dict[str, str]) -> None:
    with running(environment, HOLD) as one, running(environment, HOLD) as two:
        assert [row[1] for row in rows(smi(environment, "info"))] == sorted((str(one.pid), str(two.pid)), key=int)
        one.kill()
        one.wait()
        assert [row[1] for row in rows(smi(environment, "info"))] == [str(two.pid)]
    assert rows(smi(environment, "info")) == []
    assert list(Path(environment["XDG_RUNTIME_DIR"]).glob("*/*")) == []


def test_a_forked_child_does_not_keep_its_dead_parent_listed(environment: dict[str, str]) -> None:
    body = """
        start()
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        print("ready", flush=True)
        print(child, flush=True)
        time.sleep(30)
    """
    with running(environment, body) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert [row[1] for row in rows(smi(environment, "info"))] == [str(process.pid)]
            process.kill()
            process.wait()
            assert rows(smi(environment, "info")) == []
        finally:
            os.kill(child, signal.SIGKILL)


def test_npu_smi_shows_physical_devices(environment: dict[str, str]) -> None:
    four = {"CANNSIM_DEVICES": "4"}
    with running(environment, HOLD, DEVICE="1", ASCEND_RT_VISIBLE_DEVICES="1,3", **four) as process:
        table = smi(environment, "info", **four)
        assert [row[:2] for row in rows(table)] == [["3       0", str(process.pid)]]
        assert re.findall(r"No running processes found in NPU (\d)", table) == ["0", "1", "2"]
        tell(process, "ok(acl.aclrtSetDevice(0))")
        both = [row[:2] for row in rows(smi(environment, "info", **four))]
        assert both == [[f"{device}       0", str(process.pid)] for device in (1, 3)]


def test_npu_smi_lists_at_most_eight_processes_of_a_chip(environment: dict[str, str]) -> None:
    with contextlib.ExitStack() as stack:
        pids = sorted(stack.enter_context(running(environment, HOLD)).pid for _ in range(9))
        assert [int(row[1]) for row in rows(smi(environment, "info"))] == pids[:8]
        listed = smi(environment, "info", "-t", "proc-mem", "-i", "0", "-c", "0")
        assert [int(pid) for pid in re.findall(r"Process id:(\d+)", listed)] == pids


def test_npu_smi_names_are_short(environment: dict[str, str]) -> None:
    body = "open('/proc/self/comm', 'w').write('a:b\\tcdefghijklmnopq')\n" + HOLD
    with running(environment, body):
        assert rows(smi(environment, "info"))[0][2] == "abcdefghijklm"


# The widths of the real tables.
EDGE_25 = "+" + "-" * 27 + "+" + "-" * 15 + "+" + "-" * 52 + "+"
EDGE_26 = "+" + "-" * 27 + "+" + "-" * 15 + "+" + "-" * 70 + "+"
HEAD_25 = "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |"
HEAD_26 = (
    "| NPU     Chip              | Process id    |"
    " Process name       | Process memory(MB)    | Process id in container |"
)


def test_npu_smi_of_four_and_five_columns(environment: dict[str, str]) -> None:
    with running(environment, HOLD) as process:
        pid, name = process.pid, Path(f"/proc/{process.pid}/comm").read_text().strip()
        old, new = smi(environment, "info"), smi(environment, "info", CANNSIM_NPU_SMI="26")
        inside = smi(environment, "info", CANNSIM_NPU_SMI="container")
        memory = smi(environment, "info", "-t", "proc-mem", "-i", "0", "-c", "0", CANNSIM_NPU_SMI="container")
    for table, edge, head in ((old, EDGE_25, HEAD_25), (new, EDGE_26, HEAD_26), (inside, EDGE_26, HEAD_26)):
        *lines, note = table.splitlines()
        assert re.fullmatch(r"cannsim: .*power .*temperature .*are invented", note)
        assert {len(line) for line in lines} == {len(edge)}
        assert edge in lines
        assert head in lines
        assert any(line.startswith("| 0     910B4-1             | OK ") for line in lines)
    assert re.search(r"^\| npu-smi 25\.5\.1 {17}  Version: 25\.5\.1 ", old, re.M)
    assert re.search(r"^\| npu-smi 26\.0\.rc1 +Version: 26\.0\.rc1 ", new, re.M)
    assert rows(old) == [["0       0", str(pid), name, "3"]]
    assert rows(new) == [["0       0", str(pid), name, "3", "NA"]]
    assert rows(inside) == [["0       0", str(pid + 100000), name, "3", str(pid)]]
    assert f"Process id:{pid + 100000}  Process name:{name}  Process memory(MB):3" in memory


def test_npu_smi_modes(environment: dict[str, str], tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text("head\n| 0 | @PID@ |\ntail\n")
    assert smi(environment, "info", CANNSIM_NPU_SMI=f"file:{table}") == "head\ntail\n"
    with running(environment, HOLD) as one, running(environment, HOLD) as two:
        first, second = sorted((one.pid, two.pid))
        shown = smi(environment, "info", CANNSIM_NPU_SMI=f"file:{table}")
        assert shown == f"head\n| 0 | {first} |\n| 0 | {second} |\ntail\n"
        nothing = smi(environment, "info", CANNSIM_NPU_SMI="none")
        assert "910B4-1" in nothing
        assert "Process" not in nothing
    unsupported = smi(environment, "info", "-t", "proc-mem", "-i", "0", "-c", "0", code=1, CANNSIM_NPU_SMI="none")
    assert unsupported == "This device does not support querying proc-mem.\n"
    for arguments in (["info"], ["-v"], ["info", "-l"]):
        said = smi(environment, *arguments, code=1, CANNSIM_NPU_SMI="error")
        assert said == "dcmi module initialize failed. ret is -8005\n"
        smi(environment, *arguments, code=2, CANNSIM_NPU_SMI="x")
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["npu-smi", "info"], env=environment | {"CANNSIM_NPU_SMI": "hang"}, timeout=1, check=False)


def test_npu_smi_arguments(environment: dict[str, str]) -> None:
    assert smi(environment, "-v") == "npu-smi version: 25.5.1\n"
    assert "Usage" in smi(environment, "-h")
    assert "Total Count                    : 2\n" in smi(environment, "info", "-l", CANNSIM_DEVICES="2")
    assert "No process" in smi(environment, "info", "-t", "proc-mem", "-i", "0")
    for arguments in ("", "watch", "info -x", "info -t proc-mem", "info -t proc-mem -i 1", "info -t board -i 0"):
        assert smi(environment, *arguments.split(), code=1) != ""
    assert "-8005" in smi(environment, "info", code=1, CANNSIM_DEVICES="0")


def test_a_registry_that_others_can_write_is_refused(run: Run, environment: dict[str, str]) -> None:
    planted = Path(environment["XDG_RUNTIME_DIR"], f"cannsim-{os.geteuid()}")
    planted.mkdir()
    planted.chmod(0o777)
    run("ok(acl.aclInit(None)); bad(acl.aclrtSetDevice(0), 507033, 'belongs to this user alone')")
    smi(environment, "info", code=2)
    planted.rmdir()
    planted.symlink_to(environment["XDG_RUNTIME_DIR"])
    run("ok(acl.aclInit(None)); bad(acl.aclrtSetDevice(0), 507033, 'belongs to this user alone')")
    smi(environment, "info", code=2)


# The build


def test_builds_at_once_build_once(tmp_path: Path) -> None:
    sources, out = tmp_path / "sources", tmp_path / "out"
    sources.mkdir()
    for path in (support.PROJECT / "tests/cannsim").iterdir():
        if path.is_file() and not path.name.startswith("op"):  # the operators are most of the work
            shutil.copy2(path, sources)
    command = [str(sources / "build.sh"), sys.executable, str(out)]
    environment = support.clean_environment() | {"CXXFLAGS": "-O0"}

    def built() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != ".lock"}

    builds = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [build.wait(300) for build in builds] == [0, 0]
    first = built()
    names = ("acl_op_compiler", "acl_tdt_channel", "ascendcl", "ge_runner", "graph", "hccl", "opapi")
    libraries = {f"lib{name}.so" for name in names}
    assert {path.name for path in first} == {"npu-smi", ".stamp", *libraries}
    subprocess.run(command, env=environment, check=True, timeout=60)
    assert built() == first

    broken = sources / "stream.cpp"
    broken.write_text(broken.read_text(encoding="utf-8") + "int unused(int argument) { return 0; }\n", encoding="utf-8")
    failed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert failed.returncode != 0
    assert "-Werror=unused-parameter" in failed.stderr
    assert not (out / ".stamp").exists()


# A CUDA build of torch

# As in torch: one library has the names of the allocator's settings, and another one registers CUDA's there.
ALLOCATOR = """
#include <string>
#include <unordered_set>
namespace c10::CachingAllocator {
struct AcceleratorAllocatorConfig {
  static std::unordered_set<std::string> &getMutableKeys();
};
std::unordered_set<std::string> &AcceleratorAllocatorConfig::getMutableKeys() {
  static std::unordered_set<std::string> keys{"everyone's", "CUDA's", "CUDA's too"};
  return keys;
}
}  // namespace c10::CachingAllocator
extern "C" int known(const char *key) {
  return c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys().count(key) != 0;
}
"""
CUDA_ALLOCATOR = """
#include <string>
#include <unordered_set>
namespace c10::cuda::CUDACachingAllocator {
struct CUDAAllocatorConfig {
  static const std::unordered_set<std::string> &getKeys() {
    static std::unordered_set<std::string> keys{"CUDA's", "CUDA's too"};
    return keys;
  }
};
const auto &registered = CUDAAllocatorConfig::getKeys();
}  // namespace c10::cuda::CUDACachingAllocator
"""


def test_the_names_of_cuda_settings_are_free_for_torch_npu(run: Run, tmp_path: Path) -> None:
    body = """
    c10 = c.CDLL("libc10.so")
    print([c10.known(key) for key in (b"everyone's", b"CUDA's", b"CUDA's too")])
    """
    libraries = []
    for name, source, expected in (
        ("libc10.so", ALLOCATOR, "[1, 1, 1]"),
        ("libc10_cuda.so", CUDA_ALLOCATOR, "[1, 0, 0]"),
    ):
        library = tmp_path / name
        compiler = [os.environ.get("CXX", "g++"), "-x", "c++", "-std=c++17", "-shared", "-fPIC", "-", "-o", library]
        subprocess.run([*compiler, f"-Wl,-soname,{name}"], input=source, text=True, check=True, timeout=60)
        libraries.append(str(library))
        assert run(body, LD_PRELOAD=":".join(libraries)).stdout.strip() == expected


# The real torch_npu on top

Torch = Callable[..., support.Result]


@pytest.fixture
def torch(cli: support.Cli, tmp_path: Path, environment: dict[str, str]) -> Torch:
    """Runs a case in a process that has torch_npu imported."""

    def torch(body: str, code: int = 0, cold: bool = False, **env: str) -> support.Result:
        script = tmp_path / "case.py"
        script.write_text("import ctypes, os, torch, torch_npu\n" + textwrap.dedent(body), encoding="utf-8")
        run = cli.cold if cold else cli
        result = run(script=script, cwd=tmp_path, env={"XDG_RUNTIME_DIR": environment["XDG_RUNTIME_DIR"], **env})
        assert result.code == code, f"{result.code}\n{result.stdout}{result.stderr}"
        return result

    return torch


def test_torch_round_trip(torch: Torch) -> None:
    torch("""
        a = torch.arange(1000.)
        x = a.pin_memory().npu(non_blocking=True)
        assert x.device == torch.device("npu:0") and torch.equal(x.cpu(), a)
        assert torch.equal(torch.arange(7, dtype=torch.int64).npu().cpu(), torch.arange(7))
        assert torch.npu.get_device_name(0) == "Ascend910B4-1"
    """)


def test_torch_host_access_dies(torch: Torch) -> None:
    body = "x = torch.ones(4).npu(); print(ctypes.string_at(x.data_ptr(), 4))"
    torch(body, code=-signal.SIGSEGV)


def test_torch_out_of_memory(torch: Torch) -> None:
    torch(
        """
        x = torch.zeros(1 << 20).npu()
        try:
            torch.empty(1 << 26, device="npu")
        except torch.OutOfMemoryError as error:
            assert "64.00 MiB" in str(error), error
        else:
            raise SystemExit("no error")
        """,
        CANNSIM_HBM_MB="64",
    )


def test_torch_sees_a_failed_task_at_the_next_synchronise(torch: Torch) -> None:
    torch(
        """
        a = torch.ones(4).pin_memory()
        x = a.npu(non_blocking=True)
        for _ in range(2):
            try:
                torch.npu.synchronize()
            except RuntimeError as error:
                assert "507015" in str(error) and "exec:aclrtMemcpyAsync" in str(error), error
            else:
                raise SystemExit("no error")
        """,
        CANNSIM_FAIL="exec:aclrtMemcpyAsync",
    )


def test_torch_process_is_listed(torch: Torch) -> None:
    torch("""
        import subprocess
        info = lambda: subprocess.run(["npu-smi", "info"], capture_output=True, text=True, check=True).stdout
        assert f" {os.getpid()} " not in info()
        torch.npu.is_available()
        assert f" {os.getpid()} " not in info()
        x = torch.ones(4).npu()
        torch.npu.synchronize()
        assert f" {os.getpid()} " in info()
    """)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("exec:aclnnRelu", "[1.0, 0.0, 6.0, 2.0] [1.0, 0.0, 3.0, 2.0] 2 5.0"),
        ("exec:aclnnRelu:2:zero", "[1.0, 0.0, 3.0, 2.0] [0.0, 0.0, 0.0, 0.0] 2 5.0"),
        ("exec:aclnnRelu:*:swap", "[0.0, 1.0, 3.0, 2.0] [0.0, 1.0, 3.0, 2.0] 2 5.0"),
        ("exec:aclnnInplaceCopy:1:stale", "[1.0, 0.0, 3.0, 2.0] [1.0, 0.0, 3.0, 2.0] 2 4.0"),
        ("exec:aclnnArgMax", "[1.0, 0.0, 3.0, 2.0] [1.0, 0.0, 3.0, 2.0] 3 5.0"),
        ("exec:*:3", "[1.0, 0.0, 3.0, 2.0] [1.0, 0.0, 3.0, 2.0] 3 5.0"),
    ],
)
def test_torch_corrupted_kernels(torch: Torch, tmp_path: Path, spec: str, expected: str) -> None:
    path = tmp_path / "trace"
    body = """
        x = torch.tensor([1., -2., 3., 2.]).npu()
        results = torch.relu(x), torch.relu(x), torch.argmax(x)
        y = torch.tensor([4., 4.]).npu()
        y[1:].copy_(torch.tensor([0., 5.]).npu()[1:])
        print(*(result.tolist() for result in results), y[1].item())
    """
    assert torch(body, CANNSIM_CORRUPT=spec, CANNSIM_TRACE=str(path)).stdout.splitlines()[-1] == expected
    hits = [line["name"] for line in trace(path) if line.get("injected") == "corrupt"]
    assert len(hits) == (2 if ":*:" in spec and "*:3" not in spec else 1)
    assert all(name.startswith("exec:aclnn") for name in hits)


@pytest.mark.parametrize("queue", ["0", "1"])
def test_torch_ends_in_an_error_where_an_operator_is_not_simulated(torch: Torch, queue: str) -> None:
    torch(
        """
        x, index = torch.tensor([3e9, 1.5]).npu(), torch.tensor([0]).npu()
        for name, call in (
            ("aclnnFrac", lambda: x.frac()),
            ("aclnnIndexFill", lambda: x.index_fill(0, index, 1.0)),
            ("aclnnSort", lambda: torch.sort(x)),
            ("aclnnConvolution", lambda: torch.nn.functional.conv1d(x.view(1, 1, 2), x.view(1, 1, 2))),
        ):
            try:
                call()
            except RuntimeError as error:
                assert f"{name} failed, error code is 561003" in str(error), error
                assert f"{name}GetWorkspaceSize: this operator is not simulated" in str(error), error
            else:
                raise SystemExit(f"no error from {name}")
            assert (x + 1).tolist() == [3e9, 2.5], "what comes after it is lost"
        assert torch.nn.functional.gelu(x.neg()).tolist()[0] == 0  # tries a later version first
        """,
        TASK_QUEUE_ENABLE=queue,
    )


# On torch_npu 2.9.0 setting allow_hf32 starts it at once; later releases wait for an operator that needs it.
def test_torch_starts_the_operator_compiler_only_where_it_must(torch: Torch) -> None:
    body = (
        TRACES
        + """
    x = torch.ones(2, 2).npu()
    x.matmul(x).relu().cpu()
    torch.npu.conv.allow_hf32, torch.npu.matmul.allow_hf32
    torch.use_deterministic_algorithms(True)
    x.matmul(x).cpu()
    assert traces() == (COMPILER if os.environ.get("ACL_OP_INIT_MODE") == "0" else NONE), traces()
    torch.npu.conv.allow_hf32 = False
    at_once = torch_npu.__version__ == "2.9.0" or os.environ.get("ACL_OP_INIT_MODE") == "0"
    assert traces() == (COMPILER if at_once else NONE), traces()
    """
    )
    torch(body)
    torch(body, ACL_OP_INIT_MODE="0")


# As the policies of SB3: a capture of it on a static input, and what it gives without one.
GRAPHED = """
    class Policy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64),
                                            torch.nn.Tanh())
            self.logits, self.value = torch.nn.Linear(64, 2), torch.nn.Linear(64, 1)
        def forward(self, x):
            features = self.body(x)
            logits = self.logits(features)
            probs = torch.softmax(logits, -1)
            return torch.argmax(probs, -1), torch.cat([probs, logits, self.value(features)], -1)
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    policy = Policy().npu()
    static, rows = torch.zeros(8, 4).npu(), torch.randn(10, 8, 4) * 3
    eager = [[output.cpu() for output in policy(row.npu())] for row in rows]
    def capture(body):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            outputs = body()
        return graph, outputs
"""


@pytest.mark.parametrize("queue", ["0", "1"])
def test_torch_replays_equal_eager_bit_for_bit(torch: Torch, tmp_path: Path, queue: str) -> None:
    path = tmp_path / "trace"
    body = """
    graph, outputs = capture(lambda: policy(static))
    for row, expected in zip(rows, eager):
        static.copy_(row)
        graph.replay()
        assert all(torch.equal(output.cpu(), wanted) for output, wanted in zip(outputs, expected, strict=True))
    assert not torch.equal(eager[0][1], eager[1][1])
    inputs, results = torch.empty(8, 4).pin_memory(), torch.empty(8, 5).pin_memory()
    def from_host_to_host():
        static.copy_(inputs, non_blocking=True)
        results.copy_(policy(static)[1], non_blocking=True)
    whole, _ = capture(from_host_to_host)
    inputs.copy_(rows[7])
    whole.replay()
    torch.npu.synchronize()
    assert torch.equal(results, eager[7][1])
    layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).npu()
    layer.requires_grad_(False)
    wanted = layer(rows[3].npu()).cpu()
    graphed = torch.npu.make_graphed_callables(layer, (torch.zeros(8, 4).npu(),))
    assert torch.equal(graphed(rows[3].npu()).cpu(), wanted)
    """
    torch(GRAPHED + body, TASK_QUEUE_ENABLE=queue, CANNSIM_TRACE=str(path))
    lines = trace(path)
    replays = [i for i, line in enumerate(lines) if line["name"] == "aclmdlRIExecuteAsync"]
    assert len(replays) == 12
    for first, last in itertools.pairwise(replays[:10]):
        executed = [line["name"] for line in lines[first:last] if line.get("replayed")]
        assert executed.count("exec:aclnnAddmm") == 4
        assert {"exec:aclnnRelu", "exec:aclnnTanh", "exec:aclnnSoftmax", "exec:aclnnArgMax"} < set(executed)
        assert not [line["name"] for line in lines[first:last] if line["name"].startswith("aclnn")]


def test_torch_cannot_synchronise_in_a_capture(torch: Torch) -> None:
    torch(
        GRAPHED
        + """
    for body, code in (
        (lambda: policy(static)[1].cpu(), 107030),
        (lambda: torch.ones(3).npu(), 107030),
        (lambda: static[0, 0].item(), 107027),
        (lambda: torch.nonzero(static), 107027),
        (lambda: torch.npu.synchronize(), 107027),
    ):
        try:
            capture(body)
        except RuntimeError as error:
            assert str(code) in str(error), error
        else:
            raise SystemExit(f"no error {code}")
    graph, outputs = capture(lambda: policy(static))  # that of the next one is not affected
    static.copy_(rows[0])
    graph.replay()
    assert torch.equal(outputs[1].cpu(), eager[0][1])
    """
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CANNSIM_FAIL": "exec:aclnnTanh:12"}, "equal RuntimeError RuntimeError"),
        ({"CANNSIM_CORRUPT": "exec:aclnnTanh:12:zero"}, "equal different equal"),
        ({"CANNSIM_CORRUPT": "exec:aclnnArgMax:12"}, "equal different equal"),
        ({"CANNSIM_FAIL": "aclmdlRIExecuteAsync:2"}, "equal RuntimeError equal"),
        ({"CANNSIM_FAIL": "aclmdlRICaptureBegin:1:207008"}, "RuntimeError"),
        ({"CANNSIM_FAIL": "aclnnTanh:11"}, "RuntimeError"),
    ],
)
def test_torch_sees_faults_of_captures_and_replays(torch: Torch, variables: dict[str, str], expected: str) -> None:
    result = torch(
        GRAPHED
        + """
    said = []
    def attempt(step):
        try:
            return step()
        except RuntimeError:
            return "RuntimeError"
    captured = attempt(lambda: capture(lambda: policy(static)))
    if captured == "RuntimeError":
        said = [captured]
    else:
        graph, outputs = captured
        def replay():
            static.copy_(row)
            graph.replay()
            equal = all(torch.equal(output.cpu(), wanted) for output, wanted in zip(outputs, expected, strict=True))
            return "equal" if equal else "different"
        for row, expected in list(zip(rows, eager))[:3]:
            said.append(attempt(replay))
    print(*said)
    """,
        TASK_QUEUE_ENABLE="0",
        **variables,
    )
    assert result.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize("queue", ["0", "1"])
def test_torch_leaves_cleanly(torch: Torch, tmp_path: Path, queue: str) -> None:
    path = tmp_path / "trace"
    body = "x, y = torch.ones(4).npu(), torch.ones(4).pin_memory(); print(x.cpu().sum().item())"
    result = torch(body, cold=True, TASK_QUEUE_ENABLE=queue, CANNSIM_TRACE=str(path))
    assert result.stdout.splitlines()[-1] == "4.0"
    assert "rror" not in result.stderr
    assert [line["name"] for line in trace(path)][-3:] == ["aclrtDestroyStreamForce", "aclrtResetDevice", "aclFinalize"]
