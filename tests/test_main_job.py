"""The main job end to end, as a user would see it: one command runs the checkpoint and leaves evidence of it."""

from __future__ import annotations

import getpass
import json
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness import evidence, faults, support

FORWARD = json.loads((support.PROJECT / "tests/data/standin.forward.json").read_text())
VALUE_TOLERANCE, TOLERANCE = 6e-5, 1e-5  # twice what batching alone changes, on a CPU; logits and the like

# The lines of the log, as they are to be found in every log of a good run, in this order.
LOG_LINES = r"""
\[inference\] python            : \d+\.\d+\.\d+
\[inference\] platform          : Linux-\S+
\[inference\] pid               : (?P<pid>\d+)
\[inference\] cwd               : \.
\[inference\] checkpoint        : \S+\.zip
\[inference\] program           : \d+\.\d+ sha256=[0-9a-f]{64}
\[verify\]  bytes=139220 sha256=9cf3e56aad9699674a80c839ceb54482552873f5d344f4af1aecd287a9642062
\[verify\]  size_ok=True sha256_ok=True
\[npu\]     torch=\d\S+ torch_npu=\d\S+
\[npu\]     is_available=True device=npu:0 name=Ascend910B4-1 \(simulated\)
\[npu\]     device_count=1 CANN=8\.5\.1 npu-smi=25\.5\.1
\[npu\]     driver=25\.5\.1 stable_baselines3=2\.7\.0 gymnasium=\d\S+ numpy=\d\S+ cloudpickle=\d\S+
\[npu\]     visible_devices=0 device_nodes=\[\]
\[npu\]     environment=\{'ASCEND_RT_VISIBLE_DEVICES': '0', 'TASK_QUEUE_ENABLE': '0', .*\}
\[npu\]     determinism=\{'deterministic_algorithms': True, 'jit_compile': False, .*'device': True\}
\[npu\]     SIMULATED by cannsim \S+: nothing in this run touched a physical NPU
\[load\]    PPO\.load elapsed=\d+\.\d{4}s device=npu:0
\[model\]   policy_class=ActorCriticPolicy num_params=9155
\[model\]   param_devices=\['npu:0'\] all_params_on_npu=True
\[model\]   params_match_checkpoint=True
\[ready\]   NPU_READY_PID=(?P=pid) DEVICE=npu:0 MARKER=logs/npu_ready\.marker
\[ready\]   holding 1\.0s for external npu-smi correlation \.\.\.
\[ready\]   npu_smi captured=True pid_found=True log=logs/npu_smi\.log
\[ready\]   npu_smi pid_line=\| 0       0 +\| (?P=pid) +\| \S+ +\| \d+ +\|
\[ready\]   npu_smi pid_absent_before=True matched_by=process id npu_id=0 chip_id=0
\[forward\] elapsed=\d+\.\d{4}s \(npu-synchronized\)
\[forward\] obs=\[\[0\.0, 0\.0, 0\.0, 0\.0\]\] shape=\(1, 4\) dtype=torch\.float32 device=npu:0
\[forward\] action=\[0\] shape=\(1,\) dtype=torch\.int64 device=npu:0
\[forward\] value=\[\[182\.\d+\]\] shape=\(1, 1\) dtype=torch\.float32 device=npu:0
\[forward\] log_prob=\[-0\.\d+\] shape=\(1,\) dtype=torch\.float32 device=npu:0
\[forward\] probs=\[\[0\.\d+, 0\.\d+\]\] logits=\[\[-0\.\d+, -0\.\d+\]\] entropy=\[0\.\d+\]
\[forward\] all_outputs_on_npu=True
\[forward\] bitwise_repeatable=True rows=1
\[forward\] inputs_match_host=True params_match_after_forward=True
\[forward\] kernels=\{'aclnnAddmm': 6, .*\}
\[reference\] float64 from the checkpoint's bytes: compared with, never a source of a result
\[reference\] rows=1 tolerance=0\.001 within_tolerance=True within_1_percent=True action_agreement=1\.0 .*
\[reference\] value max_abs_error=\S+ max_rel_error_percent=\S+ mean_abs_error=\S+ cosine=\S+
\[final\]   worker_exit=exit code 0
\[final\]   exit_code=0 result_json=logs/npu_result\.json
""".strip().splitlines()

KEYS = """
    schema exit_code error simulated simulator engine script_version script_sha256 pid argv cwd log_dir started_at
    finished_at total_s stages versions environment determinism model_id source_revision license checkpoint notes rows
    observation_shape observations npu_available npu_device npu_device_name device_count visible_devices device_nodes
    policy_class num_params param_devices all_params_on_npu params_match_checkpoint params_match_after_forward
    model_device load_s hold_seconds ready_at npu_smi action_space input_device inputs_match_host output_device
    all_outputs_on_npu bitwise_repeatable repeated_rows observation action value log_prob entropy probs logits mean std
    env_action outputs kernels forward_s reference published benchmark worker_exit files
    """.split()  # noqa: SIM905


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
    assert list(result) == KEYS
    assert (result["engine"], result["schema"]) == ("torch_npu", "npu-inference-evidence/2")
    assert result["checkpoint"] == {
        "path": support.STANDIN, "bytes": 139220, "sha256": support.STANDIN_SHA256, "size_ok": True, "sha256_ok": True,
    }  # fmt: skip
    absent = ("model_id", "source_revision", "license", "observations", "published", "benchmark", "error", "mean",
              "std", "env_action")  # fmt: skip
    assert {name: result[name] for name in absent} == dict.fromkeys(absent)
    assert result["argv"] == ["inference.py", *support.STANDIN_ARGS, "--hold-seconds", "1"]
    assert (result["cwd"], result["log_dir"], result["notes"]) == (".", "logs", [])
    assert (result["num_params"], result["policy_class"]) == (9155, "ActorCriticPolicy")
    assert result["action_space"] == {"type": "Discrete", "n": 2}
    assert (result["param_devices"], result["device_count"], result["visible_devices"]) == (["npu:0"], 1, "0")
    assert result["script_sha256"] == evidence.sha256(good.log_dir.parent / "inference.py")
    assert {name: result["versions"][name] for name in ("cann", "npu_smi", "driver", "stable_baselines3")} == {
        "cann": "8.5.1", "npu_smi": "25.5.1", "driver": "25.5.1", "stable_baselines3": "2.7.0",
    }  # fmt: skip
    assert result["hold_seconds"] == 1 and result["total_s"] > 1 > result["forward_s"] > 0 and result["load_s"] > 0
    assert result["started_at"] < result["ready_at"] < result["finished_at"]
    assert list(result["stages"]) == ["verify", "npu", "load", "ready", "forward", "final"]
    assert sum(result["stages"].values()) == pytest.approx(result["total_s"], abs=1e-5)
    assert result["stages"]["ready"] >= 1
    assert result["outputs"]["value"] == {"dtype": "torch.float32", "shape": [1, 1], "device": "npu:0"}
    assert result["outputs"]["action"] == {"dtype": "torch.int64", "shape": [1], "device": "npu:0"}


def test_the_command_that_checks_a_run_works_where_the_run_was_started(cli, quick, tmp_path):
    standin = ("--checkpoint", cli.project / support.STANDIN, "--sha256", support.STANDIN_SHA256)
    done = cli(*standin, "--hold-seconds", 0, "--log-dir", "my logs", cwd=tmp_path, env=quick)
    assert done.code == 0, done.stderr
    command = shlex.split(done.stdout.splitlines()[-1].removeprefix("check it: "))
    checked = subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert (command[0], checked.returncode) == ("python3", 0), checked.stdout + checked.stderr


def test_the_process_of_the_evidence_is_the_one_on_the_npu(good):
    """Not the supervisor, which the user starts and which never touches the device."""
    result = good.json()
    assert result["pid"] != good.result.pid
    found = result["npu_smi"]
    assert found["pid_found"] and found["pid_absent_before"] is True and f" {result['pid']} " in found["pid_line"]
    assert f"NPU_READY_PID={result['pid']}\n" in good.text("npu_ready.marker")


def test_a_cold_process_leaves_the_same_evidence_as_a_forked_one(cli, good):
    """Else the tests of this suite would say little about `python3 inference.py`."""
    log_dir = cli.project / "logs"
    forked = Run(cli(*support.STANDIN_ARGS, "--hold-seconds", 1), log_dir)
    assert forked.result.code == 0
    assert evidence.facts(log_dir) == evidence.facts(good.log_dir)


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


def test_the_log_has_its_lines_in_their_order_and_stdout_the_same(good):
    log = good.text("npu_inference.log")
    assert re.search("(?m)^" + r"\n(?:.*\n)*?".join(LOG_LINES) + r"\n\Z", log), log
    assert good.result.stdout == log + "check it: python3 tests/check_evidence.py logs\n"


def test_random_observations_give_the_reference_in_a_batch_and_alone(cli, tmp_path):
    rows = FORWARD["random20_single"]
    log_dir, quick = tmp_path / "logs", faults.quick_npu_smi(tmp_path / "bin")
    arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", log_dir)
    for given in (rows, rows[:1]):
        observation = json.dumps([row["obs"] for row in given])
        result = Run(cli(*arguments, "--observation", observation, env=quick), log_dir).json()
        assert result["observation"] == [row["obs"] for row in given][:16]
        for number, row in enumerate(given[:16]):
            assert_outputs(result, number, row)


def test_a_shell_can_source_the_marker(good):
    names = ("NPU_READY_PID", "DEVICE", "HOLD_SECONDS", "READY_AT", "SIMULATED")
    script = f'set -eu; . ./npu_ready.marker; printf "%s\\n" {" ".join(f"${name}" for name in names)}'
    lines = subprocess.run(["sh", "-c", script], cwd=good.log_dir, capture_output=True, text=True, check=True).stdout
    pid, device, hold, ready_at, simulated = lines.splitlines()
    assert (pid, device, float(hold), simulated) == (str(good.json()["pid"]), "npu:0", 1.0, "1")
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
    for file in good.log_dir.glob("npu_*"):
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

    quick = faults.quick_npu_smi(tmp_path / "bin")

    def start(*args: object, env: support.Environment = quick) -> support.Process:
        return cli.start(*support.STANDIN_ARGS, *args, script=project / "inference.py", cwd=project, env=env)

    assert start("--hold-seconds", 0, env={**quick, "CANNSIM_FAIL": "aclrtMemcpy:9"}).wait().code == 5
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
    result = cli(*arguments, script=good.log_dir.parent / "inference.py", cwd=good.log_dir.parent,
                 env=faults.quick_npu_smi(tmp_path / "bin"))  # fmt: skip
    assert Run(result, tmp_path / "elsewhere").result.code == 0
    assert (good.log_dir.parent / "SHA256SUMS").read_bytes() == before


# Verification


def refused(cli, log_dir: Path, *args: object, code: int = 3, stage: str = "verify", words: str = "", **options) -> Run:
    """A run in a process of its own that ended so, and says on stderr and in the JSON why."""
    ended = Run(cli.cold("--log-dir", log_dir, "--hold-seconds", 0, *args, **options), log_dir)
    assert (ended.result.code, ended.json()["error"]["stage"]) == (code, stage), ended.result.stderr
    [line] = evidence.complaints_of(ended.result)
    assert re.search(words, line), line
    return ended


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_wrong_hash_is_refused_before_torch_and_at_once(cli, tmp_path):
    start = cpu_seconds()
    ended = refused(cli, tmp_path, "--checkpoint", support.STANDIN, "--sha256", "0" * 64,
                    words="SHA256 9cf3e56a.* expected SHA256 0000")  # fmt: skip
    verified = cpu_seconds() - start
    assert ended.json()["checkpoint"]["sha256_ok"] is False
    subprocess.run(
        [sys.executable, "-c", "import torch"], env=cli.environment({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}), check=True
    )
    assert verified < (cpu_seconds() - start - verified) / 5  # a tenth where the machine is idle: see measure/bench.py


def test_without_the_pinned_checkpoint_the_hint_says_where_it_is(cli, tmp_path):
    refused(cli, tmp_path, words="ppo-seals-CartPole-v0.zip.*hf download HumanCompatibleAI/")


def test_the_pinned_digest_is_required_of_the_default(cli, tmp_path):
    ended = refused(cli, tmp_path, "--checkpoint", support.STANDIN,
                    words="139220 bytes.*expected 139005 bytes and SHA256 4e57a261")  # fmt: skip
    assert ended.json()["checkpoint"]["size_ok"] is False


def test_a_name_may_leave_out_its_suffix(cli, tmp_path):
    """As for PPO.load."""
    shutil.copy(support.PROJECT / support.STANDIN, tmp_path / "model.zip")
    ended = refused(cli, tmp_path / "logs", "--checkpoint", tmp_path / "model", "--sha256", "0" * 64,
                    words="has 139220 bytes")  # fmt: skip
    assert ended.json()["checkpoint"]["sha256"] == support.STANDIN_SHA256


# The evidence of an earlier run


def content_of(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in directory.iterdir()}


def test_nothing_of_an_earlier_run_survives_the_start_of_the_next(cli, good, tmp_path):
    shutil.copytree(good.log_dir, tmp_path / "logs")
    refused(cli, tmp_path / "logs", "--checkpoint", support.STANDIN, "--sha256", "0" * 64, words="SHA256")
    assert {file.name for file in (tmp_path / "logs").glob("*npu_*")} == {"npu_inference.log", "npu_result.json"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-option"],
        ["--sha256", "abc"],
        ["--hold-seconds", "-1"],
        ["--hold-seconds", "nan"],
        ["--timeout-seconds", "soon"],
        ["--tolerance", "0"],
        ["--tolerance", "nan"],
        ["--tolerance"],
        ["--benchmark", "-1"],
        ["--benchmark", "1.5"],
        ["--benchmark", "1000001"],
        ["--shard", "1/2"],
        ["--observation", "0, 0"],
        ["--observation", "[]"],
        ["--observation", "[1, 2]"],
        ["--observation", "[NaN, 0, 0, 0]"],
        ["--observation", "[1e39, 0, 0, 0]"],
        ["--observation", '["0", "0", "0", "0"]'],
        ["--observation", "[true, true, true, true]"],
        ["--observation", "[[0, 0, 0, 0], [0, 0, 0]]"],
        ["--observation", "[" * 100_000],
        ["--checkpoint", ""],
        ["--log-dir", ""],
        ["extra"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_wrong_usage_writes_nothing_and_removes_nothing(cli, good, tmp_path, arguments):
    """Evidence of an earlier run survives a mistyped flag, and a directory that was not there is not made."""
    log_dir, absent = tmp_path / "logs", tmp_path / "absent"
    shutil.copytree(good.log_dir, log_dir)
    before = content_of(log_dir)
    for directory in (log_dir, absent):
        result = cli.cold(*support.STANDIN_ARGS, "--log-dir", directory, *arguments)
        assert (result.code, evidence.problems(result, directory)) == (2, []), result.stderr
    assert content_of(log_dir) == before
    assert not absent.exists()


def test_help_lists_every_option_and_touches_nothing(cli, good):
    before = content_of(good.log_dir)
    done = cli.cold("--help", script=good.log_dir.parent / "inference.py", cwd=good.log_dir.parent)
    assert done.code == 0
    for option in ("--checkpoint", "--sha256", "--hold-seconds", "--log-dir", "--timeout-seconds", "--observation",
                   "--observations", "--shard", "--tolerance", "--benchmark", "--version"):  # fmt: skip
        assert f" {option}" in done.stdout
    assert content_of(good.log_dir) == before
