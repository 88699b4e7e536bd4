"""The main job end to end, as a user would see it: one command runs the checkpoint and leaves evidence of it."""

from __future__ import annotations

import getpass
import json
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness import evidence, faults, support

FORWARD = json.loads((support.PROJECT / "tests/data/standin.forward.json").read_text())
VALUE_TOLERANCE, TOLERANCE = 6e-5, 1e-5  # twice what batching alone changes, on a CPU; logits and the like

# The lines of the published log, as they are to be found in every log of a good run, in this order.
LOG_LINES = r"""
\[inference\] python            : \d+\.\d+\.\d+
\[inference\] platform          : Linux-\S+
\[inference\] pid               : (?P<pid>\d+)
\[inference\] cwd               : \S+
\[inference\] checkpoint        : \S+\.zip
\[verify\]  bytes=139220 sha256=9cf3e56aad9699674a80c839ceb54482552873f5d344f4af1aecd287a9642062
\[verify\]  size_ok=True sha256_ok=True
\[npu\]     torch=\d\S+ torch_npu=\d\S+
\[npu\]     is_available=True device=npu:0 name=Ascend910B4-1 \(simulated\)
\[npu\]     device_count=1 CANN=8\.5\.1 npu-smi=25\.5\.1
\[load\]    PPO\.load elapsed=\d+\.\d{4}s device=npu:0
\[model\]   policy_class=ActorCriticPolicy num_params=9155
\[model\]   param_devices=\['npu:0'\] all_params_on_npu=True
\[ready\]   NPU_READY_PID=(?P=pid) DEVICE=npu:0 MARKER=logs/npu_ready\.marker
\[ready\]   holding 1\.0s for external npu-smi correlation \.\.\.
\[ready\]   npu_smi captured=True pid_found=True log=logs/npu_smi\.log
\[ready\]   npu_smi pid_line=\| 0       0 +\| (?P=pid) +\| \S+ +\| \d+ +\|
\[forward\] elapsed=\d+\.\d{4}s \(npu-synchronized\)
\[forward\] obs=\[\[0\.0, 0\.0, 0\.0, 0\.0\]\] shape=\(1, 4\) dtype=torch\.float32 device=npu:0
\[forward\] action=\[0\] shape=\(1,\) dtype=torch\.int64 device=npu:0
\[forward\] value=\[\[182\.\d+\]\] shape=\(1, 1\) dtype=torch\.float32 device=npu:0
\[forward\] log_prob=\[-0\.\d+\] shape=\(1,\) dtype=torch\.float32 device=npu:0
\[forward\] probs=\[\[0\.\d+, 0\.\d+\]\] logits=\[\[-0\.\d+, -0\.\d+\]\] entropy=\[0\.\d+\]
\[forward\] all_outputs_on_npu=True
\[final\]   exit_code=0 result_json=logs/npu_result\.json
""".strip().splitlines()

KEYS = {
    "schema", "exit_code", "simulated", "engine", "model_id", "source_revision", "license", "checkpoint",
    "script_sha256", "pid", "argv", "started_at", "finished_at", "versions", "npu_available", "npu_device",
    "npu_device_name", "device_count", "visible_devices", "device_nodes", "policy_class", "num_params",
    "param_devices", "all_params_on_npu", "params_match_checkpoint", "hold_seconds", "npu_smi", "input_device",
    "model_device", "output_device", "all_outputs_on_npu", "observation", "action", "value", "log_prob", "entropy",
    "probs", "logits", "outputs", "bitwise_repeatable", "reference", "load_s", "forward_s", "total_s", "files",
    "error", "environment",
}  # fmt: skip


class Run:
    """One run of inference.py and the directory that it wrote."""

    def __init__(self, result: support.Result, log_dir: Path) -> None:
        self.result = result
        self.log_dir = log_dir
        assert not evidence.problems(result, log_dir), result.stderr

    def json(self) -> dict:
        return support.read_result(self.log_dir)

    def text(self, name: str) -> str:
        return (self.log_dir / name).read_text()

    def refused(self, code: int, stage: str, words: str) -> None:
        """It ended so, and says on stderr and in the JSON why."""
        assert (self.result.code, self.json()["error"]["stage"]) == (code, stage), self.result.stderr
        [line] = evidence.complaints_of(self.result)
        assert re.search(words, line), line


@pytest.fixture
def log_dir(cli, request) -> Path:
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return cli.project / "runs" / name


@pytest.fixture
def run(cli, log_dir):
    def start_and_wait(
        *args: object, checkpoint: tuple[str, ...] = support.STANDIN_ARGS, cold: bool = False, **options
    ):
        arguments = (*checkpoint, "--hold-seconds", 0, "--log-dir", log_dir.relative_to(cli.project), *args)
        return Run(cli.start(*arguments, cold=cold, **options).wait(), log_dir)

    return start_and_wait


@pytest.fixture(scope="module")
def good(cli, tmp_path_factory) -> Run:
    """The command of the README, in a process of its own, below an unusual path and user."""
    project = support.project_copy(tmp_path_factory.mktemp("their home") / "a project")
    write_sums(project, old=True)
    result = cli.cold(*support.STANDIN_ARGS, "--hold-seconds", 1, script=project / "inference.py", cwd=project,
                      env={"USER": "hilda", "LOGNAME": "hilda", "HOME": "/home/hilda"})  # fmt: skip
    assert result.code == 0, result.stderr
    return Run(result, project / "logs")


def test_the_result_has_every_key_and_the_values_of_the_standin(good):
    result = good.json()
    assert set(result) >= KEYS
    assert result["engine"] == "torch_npu"
    assert result["checkpoint"] == {
        "path": support.STANDIN, "bytes": 139220, "sha256": support.STANDIN_SHA256, "size_ok": True, "sha256_ok": True,
    }  # fmt: skip
    assert [result[name] for name in ("model_id", "source_revision", "license", "reference", "error")] == [None] * 5
    assert (result["num_params"], result["policy_class"]) == (9155, "ActorCriticPolicy")
    assert (result["param_devices"], result["device_count"], result["visible_devices"]) == (["npu:0"], 1, "0")
    assert result["script_sha256"] == evidence.sha256(good.log_dir.parent / "inference.py")
    assert result["pid"] == good.result.pid
    assert result["npu_smi"]["pid_found"] and str(good.result.pid) in result["npu_smi"]["pid_line"]
    assert {name: result["versions"][name] for name in ("cann", "npu_smi", "driver", "stable_baselines3")} == {
        "cann": "8.5.1", "npu_smi": "25.5.1", "driver": "25.5.1", "stable_baselines3": "2.7.0",
    }  # fmt: skip
    assert result["hold_seconds"] == 1 and result["total_s"] > 1 > result["forward_s"] > 0 and result["load_s"] > 0
    assert result["started_at"] < result["ready_at"] < result["finished_at"]
    assert result["outputs"]["value"] == {"dtype": "torch.float32", "shape": [1, 1], "device": "npu:0"}
    assert result["outputs"]["action"] == {"dtype": "torch.int64", "shape": [1], "device": "npu:0"}


def assert_outputs(result: dict, row: int, expected: dict) -> None:
    assert result["action"][row] == expected["action"]
    assert result["value"][row] == [pytest.approx(expected["value"], abs=VALUE_TOLERANCE)]
    for name in ("log_prob", "entropy", "probs", "logits"):
        assert result[name][row] == pytest.approx(expected[name], abs=TOLERANCE), name


def test_the_outputs_are_those_of_the_reference(good):
    result = good.json()
    assert result["observation"] == [[0.0] * 4]
    assert_outputs(result, 0, FORWARD["zero"])
    assert result["action"] == [0]
    assert result["value"][0][0] == pytest.approx(182.51921, abs=1e-4)


def test_the_log_has_the_published_lines_in_their_order(good):
    log = good.text("npu_inference.log")
    assert re.search("(?m)^" + r"\n(?:.*\n)*?".join(LOG_LINES) + r"\n\Z", log), log
    assert log.splitlines() == [line for line in good.result.stdout.splitlines() if line.startswith("[")]


def test_the_random_observations_give_the_reference_in_a_batch(run):
    rows = FORWARD["random20_single"]
    result = run("--observation", json.dumps([row["obs"] for row in rows])).json()
    assert result["observation"] == [row["obs"] for row in rows]
    for number, row in enumerate(rows):
        assert_outputs(result, number, row)


def test_the_random_observations_give_the_reference_one_by_one(cli, run, tmp_path):
    rows = FORWARD["random20_single"]
    np.save(tmp_path / "rows.npy", np.array([row["obs"] for row in rows], dtype=np.float32))
    script = faults.patched(cli.project, "inference.CHUNK_ROWS = 1")
    ended = run("--observations", tmp_path / "rows.npy", script=script)
    assert ended.result.code == 0
    outputs = np.load(ended.log_dir / "npu_outputs.npz")
    for number, row in enumerate(rows):
        assert_outputs({name: outputs[name].tolist() for name in outputs.files}, number, row)


def test_a_shell_can_source_the_marker(good):
    names = ("NPU_READY_PID", "DEVICE", "HOLD_SECONDS", "READY_AT", "SIMULATED")
    script = f'set -eu; . ./npu_ready.marker; printf "%s\\n" {" ".join(f"${name}" for name in names)}'
    lines = subprocess.run(["sh", "-c", script], cwd=good.log_dir, capture_output=True, text=True, check=True).stdout
    pid, device, hold, ready_at, simulated = lines.splitlines()
    assert (pid, device, float(hold), simulated) == (str(good.result.pid), "npu:0", 1.0, "1")
    assert ready_at == good.json()["ready_at"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\+00:00", ready_at)


def test_a_simulated_run_says_so_in_every_file(good):
    result = good.json()
    assert result["simulated"] is True
    assert result["npu_device_name"].endswith(" (simulated)")
    assert "SIMULATED" in good.text("npu_inference.log")
    assert "SIMULATED=1\n" in good.text("npu_ready.marker")


def test_no_evidence_names_a_directory_a_user_or_a_host(good, simulator):
    secrets = {"their home", "hilda", "/home", str(simulator), sys.prefix, socket.gethostname(), str(Path.home())}
    if getpass.getuser() not in ("root", "python"):
        secrets.add(getpass.getuser())
    for file in good.log_dir.iterdir():
        text = file.read_text()
        assert [secret for secret in secrets if secret in text] == [], file.name
        assert re.findall(r"(?<![\w./])/(?!dev/)[a-z]\S*", text) == [], file.name


def write_sums(project: Path, old: bool = False) -> None:
    """A SHA256SUMS as the repository has it; `old`: with the evidence of an earlier run."""
    (project / "logs").mkdir(exist_ok=True)
    if old:
        (project / "logs/npu_smi.log").write_text("an earlier run's\n")
    files = [project / "inference.py", *(project / "logs").glob("npu_*")]
    lines = [f"{evidence.sha256(file)}  {file.relative_to(project)}\n" for file in files]
    (project / "SHA256SUMS").write_text("".join(lines))


def sums_of(project: Path) -> set[str]:
    """The files that SHA256SUMS lists, all of which are as it says."""
    done = subprocess.run(
        ["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {line[66:] for line in (project / "SHA256SUMS").read_text().splitlines()}


ALL_SUMS = {"inference.py", *(f"logs/{name}" for name in (evidence.RESULT, *evidence.FILES))}


def test_the_sums_hold_after_good_failed_and_killed_runs(cli, good, tmp_path):
    project = tmp_path / "project"
    shutil.copytree(good.log_dir.parent, project)
    assert sums_of(project) == ALL_SUMS

    def start(*args: object, **options) -> support.Process:
        return cli.start(*support.STANDIN_ARGS, *args, script=project / "inference.py", cwd=project, **options)

    assert start("--hold-seconds", 0, env={"CANNSIM_FAIL": "aclrtMemcpy:9"}).wait().code == 5
    assert sums_of(project) == ALL_SUMS - {"logs/npu_ready.marker"}
    process = start()
    process.wait_for("holding")
    assert sums_of(project) == {"inference.py"}
    process.kill()
    assert sums_of(project) == {"inference.py"}
    assert start("--hold-seconds", 0).wait().code == 0
    assert sums_of(project) == ALL_SUMS


def test_the_sums_of_a_run_elsewhere_stay_as_they_are(cli, good, tmp_path):
    before = (good.log_dir.parent / "SHA256SUMS").read_bytes()
    arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path / "elsewhere")
    result = cli(*arguments, script=good.log_dir.parent / "inference.py", cwd=good.log_dir.parent)
    assert Run(result, tmp_path / "elsewhere").result.code == 0
    assert (good.log_dir.parent / "SHA256SUMS").read_bytes() == before


# Verification


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_wrong_hash_is_refused_before_torch_and_at_once(cli, run):
    start = cpu_seconds()
    refused = run(cold=True, checkpoint=("--checkpoint", support.STANDIN, "--sha256", "0" * 64))
    verified = cpu_seconds() - start
    refused.refused(3, "verify", "SHA256 9cf3e56a.* expected SHA256 0000")
    assert refused.json()["checkpoint"]["sha256_ok"] is False
    subprocess.run(
        [sys.executable, "-c", "import torch"], env=cli.environment({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}), check=True
    )
    assert verified < (cpu_seconds() - start - verified) / 10


def test_verification_imports_no_package(run):
    refused = run(
        cold=True, python_args=("-X", "importtime"), checkpoint=("--sha256", "0" * 64, "--checkpoint", support.STANDIN)
    )
    assert refused.result.code == 3
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in refused.result.stderr.splitlines() if "|" in line
    }
    assert "json" in imported
    assert not imported & {"torch", "torch_npu", "numpy", "stable_baselines3", "gymnasium", "cloudpickle"}


def test_without_the_pinned_checkpoint_the_hint_says_where_it_is(run):
    refused = run(checkpoint=(), env={"HF_HUB_OFFLINE": "1"})
    refused.refused(3, "verify", "ppo-seals-CartPole-v0.zip.*hf download HumanCompatibleAI/")


def test_the_pinned_digest_is_required_of_the_default(run):
    refused = run(checkpoint=("--checkpoint", support.STANDIN))
    refused.refused(3, "verify", "139220 bytes.*expected 139005 bytes and SHA256 4e57a261")
    assert refused.json()["checkpoint"]["size_ok"] is False


# No NPU


NO_MODULE = "raise ModuleNotFoundError(\"No module named 'torch_npu'\", name='torch_npu')\n"


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("no packages", "No module named .*install"),
        ("no torch_npu", "No module named 'torch_npu'.*pip install torch=="),
        ("no CANN", r"lib\w+\.so.*set_env\.sh"),
        ("no device", "no device"),
        ("hidden devices", "ASCEND_RT_VISIBLE_DEVICES"),
        ("unreal device", "no device"),
    ],
)
def test_without_an_npu_it_ends_with_a_hint_and_runs_nowhere(run, tmp_path, cause, words):
    (tmp_path / "torch_npu.py").write_text(NO_MODULE)
    options = {
        "no packages": {"cold": True, "python_args": ("-S",)},
        "no torch_npu": {"cold": True, "env": {"PYTHONPATH": str(tmp_path)}},
        "no CANN": {"cold": True, "env": {"LD_LIBRARY_PATH": None}},
        "no device": {"env": {"CANNSIM_DEVICES": "0"}},
        "hidden devices": {"env": {"ASCEND_RT_VISIBLE_DEVICES": ""}},
        "unreal device": {"env": {"ASCEND_RT_VISIBLE_DEVICES": "3"}},
    }[cause]
    refused = run(**options)
    refused.refused(4, "verify" if cause == "no packages" else "npu", words)
    assert "Traceback" not in refused.result.stderr
    assert cause == "hidden devices" or "tests/simulate.sh" in refused.json()["error"]["hint"]
    assert refused.json()["action"] is None


@pytest.mark.parametrize(
    ("failure", "code", "stage"),
    [
        ("aclrtGetDeviceCount", 4, "npu"),
        ("aclInit", 4, "npu"),
        ("aclrtSetDevice", 4, "npu"),
        ("aclrtMallocAlign32", 6, "final"),  # torch's allocator tries again by itself
        ("aclrtMemcpy", 4, "npu"),
        ("aclrtMemcpy:9", 5, "load"),
        ("aclnnAddmm", 6, "forward"),
        ("aclnnAddmmGetWorkspaceSize", 6, "forward"),
        ("exec:aclnnAddmm", 6, "forward"),
        ("aclrtSynchronizeDeviceWithTimeout", 4, "npu"),
        ("aclrtSynchronizeStream:9", 5, "load"),
    ],
)
def test_a_failing_device_call_ends_the_run(run, failure, code, stage):
    ended = run(env={"CANNSIM_FAIL": failure})
    assert (ended.result.code, ended.json()["error"]["stage"]) == (code, stage)


def test_a_device_failure_is_named(run):
    ended = run(env={"CANNSIM_FAIL": "aclrtMemcpy:9"})
    assert re.search("aclrtMemcpy|507899", ended.json()["error"]["message"])


# One run at a time, signals, hangs


def test_a_second_run_is_refused_and_the_first_is_untouched(cli, run, log_dir):
    arguments = (*support.STANDIN_ARGS, "--log-dir", log_dir.relative_to(cli.project))
    first = cli.start(*arguments, "--hold-seconds", 3)
    first.wait_for("holding")
    before = {file.name: file.read_bytes() for file in log_dir.iterdir()}
    second = cli(*arguments)
    assert second.code == 7
    assert "another run is writing" in second.stderr
    assert {file.name: file.read_bytes() for file in log_dir.iterdir() if file.name in before}.items() >= {
        name: data for name, data in before.items() if name != "npu_inference.log"
    }.items()
    ended = Run(first.wait(), log_dir)
    assert ended.result.code == 0
    assert ended.json()["pid"] == first.pid


def test_runs_in_directories_of_their_own_do_not_meet(cli):
    log_dirs = [cli.project / "runs" / f"parallel-{number}" for number in range(3)]
    processes = [cli.start(*support.STANDIN_ARGS, "--hold-seconds", 1, "--log-dir", log_dir) for log_dir in log_dirs]
    for process, log_dir in zip(processes, log_dirs, strict=True):
        ended = Run(process.wait(), log_dir)
        assert (ended.result.code, ended.json()["pid"]) == (0, process.pid)


SIGNALS = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}

# How to hold a run in each stage: a function of its own that stalls, or a device call that does not return.
STAGES = {
    "verify": faults.stall("read_checkpoint"),
    "npu": "aclrtSynchronizeDeviceWithTimeout",
    "load": "aclrtMemcpy:9",
    "ready": faults.stall("correlate"),
    "forward": "exec:aclnnAddmm",
    "final": faults.stall("final"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_every_stage(cli, log_dir, tmp_path, stage, number):
    arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", log_dir.relative_to(cli.project))
    if "def " in STAGES[stage]:
        process = cli.start(*arguments, script=faults.patched(cli.project, STAGES[stage]))
        process.wait_for(faults.STALLED)
    else:
        trace = tmp_path / "trace"
        process = cli.start(*arguments, env={"CANNSIM_HANG": STAGES[stage], "CANNSIM_TRACE": str(trace)})
        faults.wait_for_hang(trace, process)
    process.signal(number)
    ended = Run(process.wait(30), log_dir)
    assert ended.result.seconds < 30
    stopped = "forward" if stage == "final" else stage  # `final` names its stage itself
    ended.refused(SIGNALS[number], stopped, f"interrupted by {number.name}")
    assert ended.json()["error"]["type"] == "Interrupted"


def test_an_interrupted_run_gives_the_device_back(cli, log_dir):
    process = cli.start(*support.STANDIN_ARGS, "--log-dir", log_dir)
    process.wait_for("holding")

    def listed() -> bool:
        table = subprocess.run(["npu-smi", "info"], env=cli.environment(), capture_output=True, text=True, check=True)
        return str(process.pid) in table.stdout

    assert listed()
    process.signal(signal.SIGTERM)
    assert process.wait(30).code == 143
    assert not listed()


def test_a_signal_that_was_ignored_stays_ignored(cli, log_dir):
    """As under nohup."""
    script = faults.patched(cli.project, "signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    process = cli.start(*support.STANDIN_ARGS, "--hold-seconds", 1.5, "--log-dir", log_dir, script=script)
    process.wait_for("holding")
    process.signal(signal.SIGHUP)
    assert Run(process.wait(), log_dir).result.code == 0


# The first three are called with the interpreter's lock held: no Python code of the process runs any more.
HANGS = {
    "aclrtGetDeviceCount": "npu",
    "aclrtSetDevice": "npu",
    "aclrtMemcpy:9": "load",
    "aclrtSynchronizeDeviceWithTimeout": "npu",
    "exec:aclnnInplaceCopy": "load",
    "aclnnRelu": "forward",
    "exec:aclnnCat": "forward",
}


@pytest.fixture(scope="module")
def hanging(cli) -> dict[str, tuple[support.Process, Path]]:
    """Runs that hang, all at once: they do nothing but wait."""
    started = {}
    for number, call in enumerate(HANGS):
        log_dir = cli.project / f"runs/hang-{number}"
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0, "--timeout-seconds", 8, "--log-dir", log_dir)
        started[call] = cli.start(*arguments, env={"CANNSIM_HANG": call}), log_dir
    return started


@pytest.mark.parametrize("call", HANGS)
def test_a_call_that_never_returns_ends_at_the_timeout(hanging, call):
    process, log_dir = hanging[call]
    ended = Run(process.wait(60), log_dir)
    ended.refused(6, HANGS[call], "did not answer in time")
    assert ended.json()["error"]["type"] == "DeviceTimeout"


def test_the_hold_does_not_count_as_a_hang(run):
    ended = run("--timeout-seconds", 3, "--hold-seconds", 4)
    assert ended.result.code == 0
    assert ended.json()["total_s"] > 4


def test_a_process_that_was_stopped_for_longer_than_the_timeout_says_so_everywhere(cli, run, log_dir):
    arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0.5, "--timeout-seconds", 3, "--log-dir", log_dir)
    process = cli.start(*arguments)
    process.wait_for("npu_smi captured")
    process.signal(signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while not (log_dir / evidence.RESULT).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.signal(signal.SIGCONT)
    Run(process.wait(30), log_dir).refused(6, "ready", "did not answer in time")


# The evidence of an earlier run


def test_nothing_of_an_earlier_run_survives_the_start_of_the_next(run, good, log_dir):
    shutil.copytree(good.log_dir, log_dir)
    refused = run(checkpoint=("--checkpoint", support.STANDIN, "--sha256", "0" * 64))
    refused.refused(3, "verify", "SHA256")
    assert sorted(file.name for file in log_dir.iterdir()) == ["npu_inference.log", "npu_result.json"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-option"],
        ["--sha256", "abc"],
        ["--hold-seconds", "-1"],
        ["--hold-seconds", "nan"],
        ["--timeout-seconds", "soon"],
        ["--observation", "0, 0"],
        ["--observation", "[]"],
        ["--observation", "[1, 2]"],
        ["--observation", "[NaN, 0, 0, 0]"],
        ["--observation", "[[0, 0, 0, 0], [0, 0, 0]]"],
        ["--checkpoint", ""],
        ["extra"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_refused_and_leaves_no_earlier_success(run, good, log_dir, arguments):
    shutil.copytree(good.log_dir, log_dir)
    refused = run(*arguments)
    assert refused.result.code == 2
    assert refused.json()["error"]["type"] == "UsageError"


def test_help_lists_every_option_and_touches_nothing(cli, good):
    before = sorted((file.name, file.stat().st_mtime_ns) for file in good.log_dir.iterdir())
    done = cli("--help", script=good.log_dir.parent / "inference.py", cwd=good.log_dir.parent)
    assert done.code == 0
    for option in ("--checkpoint", "--sha256", "--hold-seconds", "--log-dir", "--timeout-seconds", "--observation"):
        assert option in done.stdout
    assert sorted((file.name, file.stat().st_mtime_ns) for file in good.log_dir.iterdir()) == before


# Fallback to the CPU

CAUTION = (
    "[W1130 10:00:00.000000000 VariableFallbackKernel.cpp:239] Warning: CAUTION: The operator 'aten::addmm' is not "
    "currently supported on the NPU backend and will fall back to run on the CPU. This may have performance "
    "implications. (function npu_cpu_fallback)\\n"
)


@pytest.mark.parametrize("where", ["load_placement", "policy_outputs", "synchronise"])
def test_an_operator_that_ran_on_the_cpu_ends_the_run(cli, run, where):
    """Older releases of torch_npu say it on stderr, from C++, and go on."""
    function = {"load_placement": "check_placement", "policy_outputs": "policy_outputs", "synchronise": "to_host"}[
        where
    ]
    half = len(CAUTION) // 2
    statement = f'os.write(2, b"""{CAUTION[:half]}"""); os.write(2, b"""{CAUTION[half:]}""")'
    ended = run(script=faults.patched(cli.project, faults.during(function, statement)))
    ended.refused(6, "forward", "fell back to the CPU.*aten::addmm")
    assert ended.json()["error"]["type"] == "ForwardFailed"
    assert "CAUTION" in ended.result.stderr  # and the user sees the line itself


def test_the_variables_that_hide_or_allow_a_fallback_are_overruled(cli, run):
    hiding = PROGRAM["REMOVED_ENVIRONMENT"]
    assert {"RANK", "TORCH_CPP_LOG_LEVEL", "TORCH_NPU_WARNING_DISABLE", "INF_NAN_MODE_ENABLE"} <= set(hiding)
    patch = faults.during("load", f"assert not set({hiding!r}) & set(os.environ), os.environ")
    environment = {**dict.fromkeys(hiding, "1"), "TORCH_NPU_FALLBACK_CPU_DISABLE": "0"}
    ended = run(env=environment, script=faults.patched(cli.project, patch))
    assert ended.result.code == 0, ended.result.stderr
    assert ended.json()["environment"]["TORCH_NPU_FALLBACK_CPU_DISABLE"] == "1"


OTHER_WORDS = "Warning: kernel [polar.out] is not supported by NPU currently.Now this kernel is running on CPU."


@pytest.mark.parametrize("statement", [f'os.write(2, b"{OTHER_WORDS}")', f'warnings.warn("{OTHER_WORDS}")'])
def test_a_kernel_that_goes_to_the_cpu_on_its_own_account_ends_the_run(cli, run, statement):
    """Some of op-plugin's do, and TORCH_NPU_FALLBACK_CPU_DISABLE does not forbid it."""
    script = faults.patched(cli.project, "import warnings; warnings.simplefilter('ignore')\n"
                            + faults.during("policy_outputs", statement))  # fmt: skip
    run(script=script).refused(6, "forward", "fell back to the CPU.*polar")


# What the evidence claims, where it is not so

CHANGED_OUTPUTS = """
original, calls = inference.policy_outputs, []
def policy_outputs(policy, observations, torch):
    outputs = original(policy, observations, torch)
    calls.append(1)
    {}
    return outputs
inference.policy_outputs = policy_outputs
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("outputs['value'] = outputs['value'] + len(calls) * 1e-3", "two passes over the same observations differ"),
        ("outputs = {name: part.cpu() for name, part in outputs.items()}", "not all on npu:0"),
    ],
)
def test_an_output_that_changes_or_is_elsewhere_ends_the_run(cli, run, change, words):
    run(script=faults.patched(cli.project, CHANGED_OUTPUTS.replace("{}", change))).refused(6, "forward", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("args[0].action_net.bias.data += 1e-3", "differ from the checkpoint: action_net.bias"),
        ("args[0].action_net.cpu()", r"parameters are on \['cpu', 'npu:0'\]"),
        ("args[0].register_buffer('mean', sys.modules['torch'].zeros(1), persistent=False)", "parameters are on"),
    ],
)
def test_a_tensor_that_arrives_changed_or_elsewhere_ends_the_run(cli, run, change, words):
    run(script=faults.patched(cli.project, faults.during("check_placement", change))).refused(5, "load", words)


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("torch.ones = lambda *args, **kwargs: ones(*args, **kwargs) + 1", r"1 \+ 1 on npu:0 gave"),
        ("torch.set_deterministic_debug_mode = lambda mode: None", "does not keep its settings"),
    ],
)
def test_a_device_that_miscomputes_or_does_not_take_its_settings_ends_the_run(cli, run, patch, words):
    statement = f"import torch; ones = torch.ones; {patch}"
    script = faults.patched(cli.project, faults.during("simulator_version", statement))
    ended = run(script=script)
    ended.refused(4, "npu", words)
    checked = cli("--check", ended.log_dir)
    assert checked.stdout.splitlines()[-1] == "FAILED RUN", checked.stdout


# The device


def test_the_users_choice_of_a_device_is_kept_and_recorded(run):
    result = run(env={"ASCEND_RT_VISIBLE_DEVICES": "2", "CANNSIM_DEVICES": "4"}).json()
    assert (result["visible_devices"], result["npu_device"], result["device_count"]) == ("2", "npu:0", 1)
    assert result["npu_smi"]["npu_id"] == "2"


def test_a_lack_of_device_memory_is_no_success(run):
    ended = run(env={"CANNSIM_HBM_MB": "1"})
    assert ended.result.code in (4, 5, 6)
    assert ended.json()["error"]


def test_the_version_of_cann_is_the_runtimes(run):
    """torch_npu asks for it once, when it is imported."""
    assert run(env={"CANNSIM_CANN_VERSION": "8.1.RC1"}, cold=True).json()["versions"]["cann"] == "8.1.RC1"


def test_the_operator_compiler_of_cann_is_not_started(run):
    """It takes seconds and Python packages that may be missing; CANN before 8.3 starts it when an option is set."""
    ended = run(env={"CANNSIM_CANN_VERSION": "8.1.0", "CANNSIM_FAIL": "aclSetCompileopt"}, cold=True)
    assert ended.result.code == 0, ended.result.stderr
    assert ended.json()["environment"]["ACL_OP_INIT_MODE"] == "1"


def test_whether_the_device_computes_deterministically_is_read_back_from_it(run, good):
    """torch_npu 2.13 sets it for CANN since 8.5 alone, and says nothing of that."""
    assert good.json()["determinism"]["device"] is True
    old = run(env={"CANNSIM_CANN_VERSION": "8.1.0"}, cold=True)
    assert old.result.code == 0, old.result.stderr
    assert old.json()["determinism"]["deterministic_algorithms"] is True
    assert old.json()["determinism"]["device"] is False


def test_a_python_that_cannot_keep_files_in_memory_runs_as_well(cli, run):
    """conda's is built for a glibc that has no memfd_create."""
    ended = run(script=faults.patched(cli.project, "del os.memfd_create"))
    assert ended.result.code == 0, ended.result.stderr


# The published reference; the pinned checkpoint itself is not at hand

PROGRAM = runpy.run_path(str(support.PROJECT / "inference.py"))


def published(**changes: object) -> dict:
    return {**PROGRAM["PUBLISHED"], **changes}


@pytest.mark.parametrize(
    ("changes", "within"),
    [
        ({}, True),
        ({"value": [[196.2478790283203 * 1.0009]]}, True),
        ({"value": [[196.2478790283203 * 1.0011]]}, False),
        ({"action": [1]}, False),
        ({"log_prob": [-0.30756598711013794 + 9e-4]}, True),
        ({"log_prob": [-0.30756598711013794 - 2e-3]}, False),
        ({"probs": [[0.7352343797683716, 0.26476559042930603 + 2e-3]]}, False),
        ({"logits": [[-0.30756598711013794, -1.3289103507995605 + 2e-3]]}, False),
        ({"entropy": [0.5779828429222107 + 2e-3]}, False),
    ],
)
def test_a_result_is_held_against_the_published_one(changes, within):
    reference = PROGRAM["compare_with_published"](published(**changes))
    assert reference["within_tolerance"] is within
    for name in changes:
        assert name == "action" or reference["max_abs_diff"][name] > 0


def test_a_pinned_run_that_misses_the_published_result_fails(cli, run):
    """The stand-in in the pinned checkpoint's place: everything fits but the outputs."""
    data = (support.PROJECT / support.STANDIN).read_bytes()
    patch = f"inference.CHECKPOINT_BYTES, inference.CHECKPOINT_SHA256 = {len(data)}, {support.STANDIN_SHA256!r}\n"
    ended = run(checkpoint=("--checkpoint", support.STANDIN), script=faults.patched(cli.project, patch))
    ended.refused(6, "forward", "differs from the published")
    result = ended.json()
    assert result["source_revision"] == "a86541dd3744275227cb16d07192967fc6b7775e"
    assert (result["model_id"], result["license"]) == ("HumanCompatibleAI/ppo-seals-CartPole-v0", "not-declared")
    assert result["reference"]["within_tolerance"] is False
    assert result["reference"]["max_abs_diff"]["value"] == pytest.approx(196.24788 - 182.51921, abs=1e-3)
