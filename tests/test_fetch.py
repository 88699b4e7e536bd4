"""The checkpoint by itself: where the default file is absent, huggingface_hub fetches it, here from a local server with
the hub's routes. What arrives wrong is refused and stays nowhere; nothing else is asked, and nowhere else is written.

The pinned file cannot be had here, so the program is a copy that pins the stand-in.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import re
import runpy
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import evidence, faults, support
from harness.terminal import Terminal

PROGRAM = runpy.run_path(str(support.PROJECT / "inference.py"))
NAME, MODEL_ID, REVISION = (PROGRAM[name] for name in ("CHECKPOINT_NAME", "MODEL_ID", "SOURCE_REVISION"))
CONTENT = (support.PROJECT / support.STANDIN).read_bytes()
RESOLVE, STORAGE = f"/{MODEL_ID}/resolve/{REVISION}/{NAME}", f"/storage/{NAME}"

# A run ends right after the verification, with another code than its failures.
VERIFIED, END_THERE = 4, {"ASCEND_RT_VISIBLE_DEVICES": ""}
HASTE = "real_sleep = time.sleep\ntime.sleep = lambda seconds: real_sleep(min(seconds, 0.02))\n"  # between attempts


class Hub(http.server.ThreadingHTTPServer):
    """Answers for one file as huggingface.co does, which redirects to a storage; `fault` is what it does wrong."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}{STORAGE}"  # another host than the hub's
        self.fault = ""
        self.content = CONTENT
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.sent_some = threading.Event()
        self.closing = threading.Event()


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        hub, fault = self.server, self.server.fault
        hub.requests.append(f"{self.command} {self.path}")
        hub.headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.path == RESOLVE and fault == "no such file":
            self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION}, b"Entry not found")
        elif self.path == RESOLVE and fault == "no such revision":
            self.answer(404, {"X-Error-Code": "RevisionNotFound"}, b"Revision not found")
        elif self.path == RESOLVE and fault == "a gated model":
            self.answer(403, {"X-Error-Code": "GatedRepo"}, b"Access denied")
        elif self.path == RESOLVE and fault == "a broken hub":
            self.answer(500, {}, b"Internal error")
        elif fault == "a login page":  # of a hotel's network, in the place of whatever is asked for
            self.answer(200, {"Content-Type": "text/html"}, b"<html>Welcome</html>")
        elif self.path == RESOLVE:
            digest = hashlib.sha256(CONTENT).hexdigest()
            self.answer(302, {"Location": hub.storage, "ETag": f'"{digest}"', "X-Linked-ETag": f'"{digest}"',
                              "X-Linked-Size": str(len(hub.content)), "X-Repo-Commit": REVISION}, b"")  # fmt: skip
        elif self.path == STORAGE and fault == "a broken storage":
            self.answer(503, {}, b"Slow down")
        elif self.path == STORAGE:
            self.send_content()
        else:
            self.answer(404, {}, b"Not found")

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_content(self) -> None:
        hub, content = self.server, self.server.content
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.close_connection = True
        first = hub.requests.count(f"GET {STORAGE}") == 1
        if hub.fault in ("cut off", "stalled") or (hub.fault == "cut off once" and first):
            self.wfile.write(content[: len(content) // 2])
            if hub.fault == "stalled":
                hub.sent_some.set()
                hub.closing.wait(60)
        else:
            for position in range(0, len(content), 20000):
                self.wfile.write(content[position : position + 20000])
                hub.closing.wait(0.1 if hub.fault == "slow" else 0)

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client was killed
            super().handle()


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
    thread.join()


class Fetcher:
    """Runs a copy of the program that pins the stand-in, without the file, against the hub."""

    def __init__(self, cli: support.Cli, directory: Path, hub: Hub) -> None:
        self.cli = cli
        self.project = support.project_copy(directory / "project")
        shutil.rmtree(self.project / "logs", ignore_errors=True)
        self.default = self.project / NAME
        self.log_dir = self.project / "logs"
        self.home = directory / "hf home"
        program = self.project / "inference.py"
        source = program.read_text()
        for name, value in (("CHECKPOINT_BYTES", len(CONTENT)), ("CHECKPOINT_SHA256", f'"{support.STANDIN_SHA256}"')):
            source, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", source)
            assert count == 1, name
        program.write_text(source)
        for name in ("user", "tmp"):
            (directory / name).mkdir()
        self.env = {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(self.home), "HF_HUB_OFFLINE": None, "HOME": str(directory / "user"),
            "TMPDIR": str(directory / "tmp"), "XDG_CACHE_HOME": None, "NO_PROXY": "*", "no_proxy": "*",
        }  # fmt: skip

    def start(self, *args: object, patch: str = HASTE, env: support.Environment | None = None, **options):
        options.setdefault("script", faults.patched(self.project, patch) if patch else self.project / "inference.py")
        return self.cli.start("--hold-seconds", 0, *args, cwd=self.project,
                              env={**self.env, **END_THERE, **(env or {})}, **options)  # fmt: skip

    def __call__(self, *args: object, **options) -> support.Result:
        return self.start(*args, **options).wait()

    def cached(self) -> list[str]:
        """What the hub's cache holds of the model, whole or in part."""
        return sorted(str(path.relative_to(self.home)) for path in self.home.glob("hub/models--*/*/**/*")
                      if path.is_file())  # fmt: skip


@pytest.fixture
def fetch(cli, tmp_path, hub) -> Fetcher:
    return Fetcher(cli, tmp_path, hub)


def assert_refused(fetch: Fetcher, result: support.Result, words: str) -> None:
    """It says why, and how to get the file by hand; nothing that could pass for the file is left."""
    assert (result.code, evidence.problems(result, fetch.log_dir)) == (3, []), result.stderr
    [line] = evidence.complaints_of(result)
    assert re.search(words, line), line
    assert f"hf download {MODEL_ID} {NAME} --revision {REVISION} --local-dir . " in line
    assert f"SHA256 {support.STANDIN_SHA256})" in line
    assert support.read_result(fetch.log_dir)["error"]["hint"] in line
    assert not os.path.lexists(fetch.default)


# A hub that works


def test_the_absent_default_is_fetched_verified_kept_and_run(fetch, hub):
    # an observation of its own: at zero, the outputs would be held against the published ones of the upstream file
    first = fetch("--observation", "[0.1, 0.0, 0.0, 0.0]", patch="", env={"ASCEND_RT_VISIBLE_DEVICES": None})
    assert (first.code, evidence.problems(first, fetch.log_dir)) == (0, []), first.stderr
    result = support.read_result(fetch.log_dir)
    assert result["checkpoint"] == {
        "path": NAME, "bytes": len(CONTENT), "sha256": support.STANDIN_SHA256, "size_ok": True, "sha256_ok": True,
    }  # fmt: skip
    assert (result["model_id"], result["source_revision"]) == (MODEL_ID, REVISION)
    assert fetch.default.read_bytes() == CONTENT and not fetch.default.is_symlink()
    asked = len(hub.requests)
    assert asked and fetch(patch="").code == VERIFIED
    assert len(hub.requests) == asked


def test_the_hub_is_asked_for_the_pinned_file_and_nothing_else(fetch, hub):
    assert fetch(patch="", env={"HF_TOKEN": "hf_secret"}).code == VERIFIED
    assert set(hub.requests) <= {f"{method} {path}" for method in ("HEAD", "GET") for path in (RESOLVE, STORAGE)}
    assert hub.requests.count(f"GET {STORAGE}") == 1


def test_the_users_token_goes_to_nobody(fetch, hub):
    """The file is public, and HF_ENDPOINT may name anybody's mirror."""
    assert fetch(env={"HF_TOKEN": "hf_secret"}).code == VERIFIED
    assert hub.headers and [headers for headers in hub.headers if "hf_secret" in json.dumps(headers)] == []


def test_what_the_cache_holds_is_taken_from_there_online_and_offline(fetch, hub):
    assert fetch().code == VERIFIED
    assert any("/blobs/" in name for name in fetch.cached())
    asked = len(hub.requests)
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        fetch.default.unlink()
        assert fetch(env=env).code == VERIFIED
        assert fetch.default.read_bytes() == CONTENT
    assert len(hub.requests) == asked


@pytest.mark.parametrize("fault", ["cut off once", "slow"])
def test_a_poor_connection_suffices(fetch, hub, fault):
    hub.fault = fault
    assert fetch().code == VERIFIED
    assert fetch.default.read_bytes() == CONTENT


def test_the_progress_is_shown_on_a_terminal_and_nowhere_else(fetch, hub):
    hub.fault = "slow"
    screen = Terminal()
    result = fetch(stderr=screen.file)
    text = screen.text()
    assert result.code == VERIFIED
    assert re.search(rf"{NAME}: +\d+%.*\d+%", text, re.DOTALL), text
    assert "%" not in result.stdout + (fetch.log_dir / "npu_inference.log").read_text()
    fetch.default.unlink()
    shutil.rmtree(fetch.home)
    piped = fetch()
    assert piped.code == VERIFIED and "\r" not in piped.stderr


# Notes the paths that are changed and the hosts that are asked, as the interpreter sees them.
AUDIT = """
journal = os.open({journal!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
changes = dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"), 0)
changes |= dict.fromkeys(("os.rename", "os.link", "os.symlink"), 1)
hosts = dict.fromkeys(("socket.connect", "socket.sendto"), 1) | dict.fromkeys(("socket.getaddrinfo",), 0)
def hook(event, arguments):
    if event in hosts:
        asked = arguments[hosts[event]]
        os.write(journal, f"host {{asked[0] if isinstance(asked, tuple) else asked}}\\n".encode())
    writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event in changes:
        changed = arguments[changes.get(event, 0)]
        if not isinstance(changed, int):
            os.write(journal, f"path {{os.path.abspath(os.fsdecode(changed))}}\\n".encode())
sys.addaudithook(hook)
"""


def test_a_fetch_touches_the_hub_its_cache_and_the_project_only(fetch, hub, tmp_path):
    journal = tmp_path / "journal"
    result = fetch(patch=AUDIT.format(journal=str(journal)))
    assert result.code == VERIFIED, result.stderr
    entries = journal.read_text().splitlines()
    assert "host 127.0.0.1" in entries
    assert {entry for entry in entries if entry.startswith("host ")} <= {"host 127.0.0.1", "host localhost", "host ::1"}
    own = re.compile(rf"path ({re.escape(str(fetch.project))}|{re.escape(str(fetch.home))}|/dev/null|/proc/self/fd/)")
    assert f"path {fetch.default.with_name(f'.{NAME}.tmp')}" in entries
    assert [entry for entry in entries if entry.startswith("path ") and not own.match(entry)] == []
    assert [list((tmp_path / name).iterdir()) for name in ("user", "tmp")] == [[], []]


def test_a_project_that_cannot_be_written_is_served_from_the_cache(fetch, hub, tmp_path):
    scripts = [faults.patched(fetch.project, faults.WITHOUT_PRIVILEGES) for _ in range(2)]
    fetch.project.chmod(0o555)
    for script in scripts:
        result = fetch("--log-dir", tmp_path / "logs", patch="", script=script)
        assert result.code == VERIFIED, result.stderr
    assert not fetch.default.exists()
    assert hub.requests.count(f"GET {STORAGE}") == 1


# A hub that does not


FAULTS = {
    "no such file": "Entry Not Found",
    "no such revision": "Revision Not Found",
    "a gated model": "403|gated|restricted",
    "a broken hub": "fetching it failed",
    "a broken storage": "503",
    "a login page": "fetching it failed",
    "cut off": "fetching it failed",
    "refused": "fetching it failed",
    "offline": "fetching it failed",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fetch_that_fails_says_how_to_get_the_file_and_leaves_nothing(fetch, hub, fault):
    hub.fault = fault
    env = {"offline": {"HF_HUB_OFFLINE": "1"}, "refused": {"HF_ENDPOINT": closed_port()}}.get(fault, {})
    assert_refused(fetch, fetch(env=env), rf"^inference\.py: verify: {NAME} is absent, and .*({FAULTS[fault]})")
    assert bool(hub.requests) is not bool(env)
    assert [name for name in fetch.cached() if "no_exist" not in name] == []
    hub.fault = ""
    assert fetch().code == VERIFIED  # the next run asks again


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


WRONG = {
    "other bytes": CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]),
    "too short": CONTENT[:-1],
    "too long": CONTENT + b"\0",
    "empty": b"",
    "a web page": b"<html>Welcome</html>",
    "larger than any checkpoint": bytes(1 << 20),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_arrives_wrong_is_refused_and_stays_nowhere(fetch, hub, wrong):
    hub.content = WRONG[wrong]
    patch = HASTE + "inference.MAX_CHECKPOINT_BYTES = 1 << 18\n"
    assert_refused(fetch, fetch(patch=patch), rf"{NAME} has {len(hub.content)} bytes")
    assert fetch.cached() == []
    hub.content = CONTENT
    assert fetch(patch=patch).code == VERIFIED
    assert fetch.default.read_bytes() == CONTENT


def test_a_wrong_file_in_a_cache_that_cannot_be_written_is_refused(fetch, hub):
    assert fetch().code == VERIFIED
    fetch.default.unlink()
    [blob] = fetch.home.glob("hub/models--*/blobs/*")
    blob.write_bytes(b"wrong")
    blob.parent.chmod(0o555)
    assert_refused(fetch, fetch(patch=faults.WITHOUT_PRIVILEGES), f"{NAME} has 5 bytes")


def test_a_cache_that_cannot_be_written_is_no_bug(fetch, hub):
    fetch.home.mkdir(mode=0o555)
    assert_refused(fetch, fetch(patch=faults.WITHOUT_PRIVILEGES), f"{NAME} is absent, and .*Permission denied")


@pytest.mark.parametrize("env", [{"HF_HUB_DOWNLOAD_TIMEOUT": "soon"}, {"HF_ENDPOINT": "no url"}], ids=" ".join)
def test_variables_that_the_hub_cannot_read_are_no_bug(fetch, env):
    assert_refused(fetch, fetch(env=env), f"{NAME} is absent, and ")


def test_without_huggingface_hub_it_says_how_to_get_the_file(fetch, hub):
    result = fetch(patch="sys.modules['huggingface_hub'] = None\n")
    assert_refused(fetch, result, f"{NAME}: No such file")
    assert hub.requests == []


def test_nothing_but_the_hubs_client_is_imported_before_the_file_is_verified(fetch, hub):
    hub.content = WRONG["other bytes"]
    result = fetch(patch="", cold=True, python_args=("-X", "importtime"))
    assert result.code == 3
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "|" in line}
    assert "huggingface_hub" in imported
    assert not imported & {"torch", "torch_npu", "numpy", "stable_baselines3", "gymnasium", "cloudpickle"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_a_fetch_that_hangs(fetch, hub, number):
    hub.fault = "stalled"
    process = fetch.start()
    assert hub.sent_some.wait(60)
    process.signal(number)
    result = process.wait(10)
    assert (result.code, evidence.problems(result, fetch.log_dir)) == (128 + number, [])
    assert not os.path.lexists(fetch.default)
    hub.fault = ""
    assert fetch().code == VERIFIED


def test_another_checkpoint_is_never_fetched(fetch, hub):
    """Only the default is anybody's to fetch: a digest or a path of the user's own names the user's file."""
    for args in (("--sha256", "0" * 64), ("--checkpoint", NAME), ("--checkpoint", "missing.zip")):
        assert fetch(*args).code == 3
    fetch.default.symlink_to("nowhere")
    assert fetch().code == 3
    assert hub.requests == []
