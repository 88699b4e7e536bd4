"""The NPU or nothing: a device that is missing, fails, miscomputes, or leaves work to the CPU ends the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import compiler, evidence, faults, support


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict[str, str]:
    return faults.quick_npu_smi(tmp_path_factory.mktemp("bin"))


class Run:
    """A run of the stand-in that has ended, with proper evidence of how."""

    def __init__(self, result: support.Result, log_dir: Path) -> None:
        self.result, self.log_dir = result, log_dir
        assert not evidence.problems(result, log_dir), result.stderr

    def json(self) -> dict:
        return support.read_result(self.log_dir)

    def refused(self, code: int, stage: str, words: str) -> None:
        """It ended so, and says on stderr and in the JSON why."""
        assert (self.result.code, self.json()["error"]["stage"]) == (code, stage), self.result.stderr
        [line] = evidence.complaints_of(self.result)
        assert re.search(words, line), line


@pytest.fixture
def run(cli, quick, tmp_path):
    def start_and_wait(*args: object, patch: str = "", env: support.Environment | None = None, **options) -> Run:
        if patch:
            options["script"] = faults.patched(cli.project, patch)
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", tmp_path / "logs", *args)
        return Run(cli.start(*arguments, env={**quick, **(env or {})}, **options).wait(), tmp_path / "logs")

    return start_and_wait


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
        ("unreal device", "no device.*CANNSIM_DEVICES=4"),
        ("device in other digits", "is not an ascending list"),
        ("abort", "ended by SIGABRT; .*CPU build"),
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
        "device in other digits": {"env": {"ASCEND_RT_VISIBLE_DEVICES": "\u0660"}},
        "abort": {"patch": faults.during("prepare_environment", "os.abort()")},
    }[cause]
    refused = run(**options)
    refused.refused(4, "verify" if cause == "no packages" else "npu", words)
    assert "Traceback" not in refused.result.stderr
    on_simulator = cause in ("no device", "hidden devices", "unreal device")  # whom it helps nothing to name it
    assert on_simulator or "tests/simulate.sh" in refused.json()["error"]["hint"]
    assert refused.json()["action"] is None


@pytest.mark.parametrize(
    ("failure", "code", "stage"),
    [
        ("aclInit", 4, "npu"),
        ("aclrtMallocAlign32", 6, "final"),  # torch's allocator tries again by itself
        ("aclrtMemcpy:9", 5, "load"),
        ("exec:aclnnAddmm", 6, "forward"),
    ],
)
def test_a_failing_device_call_ends_the_run(run, failure, code, stage):
    """One of each stage; measure/sweep.py makes every call fail."""
    ended = run(env={"CANNSIM_FAIL": failure})
    assert (ended.result.code, ended.json()["error"]["stage"]) == (code, stage)


def test_a_device_failure_is_named(run):
    ended = run(env={"CANNSIM_FAIL": "aclrtMemcpy:9"})
    assert re.search("aclrtMemcpy|507899", ended.json()["error"]["message"])


# Fallback to the CPU


def computed_on_the_cpu(function: str, statement: str) -> str:
    """A patch: a function of torch computes elsewhere, as one without a kernel for the NPU does."""
    return f"""
import torch
original = torch.{function}
def elsewhere(*args, **kwargs):
    {statement}
torch.{function} = elsewhere
"""


CPU_WORK = {
    # torch_npu's own fallback for what the NPU has no kernel for: forbidden by a variable in newer releases
    "an operator without a kernel": computed_on_the_cpu(
        "nn.functional.relu", "return original(*args, **kwargs) + 0 * torch.special.i0(args[0])"),
    # what some of op-plugin's operators do on their own account, which no variable forbids
    "an operator that copies to the host": computed_on_the_cpu(
        "nn.functional.relu", "return original(args[0].cpu()).to(args[0].device)"),
    "a part of an operator": computed_on_the_cpu(
        "nn.functional.relu", "return original(*args, **kwargs) * args[0].cpu().sign().abs().npu().clamp(1, 1)"),
}  # fmt: skip


@pytest.mark.parametrize("what", CPU_WORK)
def test_what_the_policy_computes_on_the_cpu_ends_the_run(run, what):
    """The outputs are right, and all on npu:0; only the operators that ran tell."""
    ended = run(patch=CPU_WORK[what])
    ended.refused(6, "forward", "CPU|host|i0")
    assert ended.json()["error"]["type"] == "ForwardFailed"
    assert ended.json()["action"] is None or ended.json()["exit_code"] == 6


def test_the_profiler_sees_a_fallback_where_no_variable_forbids_it(run):
    """As with torch_npu 2.9.0, which does not know TORCH_NPU_FALLBACK_CPU_DISABLE."""
    allow = "inference.FORCED_ENVIRONMENT['TORCH_NPU_FALLBACK_CPU_DISABLE'] = '0'\n"
    ended = run(patch=allow + CPU_WORK["an operator without a kernel"])
    ended.refused(6, "forward", "i0.* fell back to the CPU")


def test_the_kernels_of_a_pass_are_named_and_counted(run, tmp_path):
    """They are those that the device has executed, by its own trace."""
    trace = tmp_path / "trace"
    ended = run(env={"CANNSIM_TRACE": str(trace)})
    kernels = ended.json()["kernels"]
    assert sum(kernels.values()) <= 21 and kernels["aclnnAddmm"] == 6 and kernels["aclnnRelu"] == 4
    assert f"[forward] kernels={kernels}\n" in (ended.log_dir / evidence.LOG).read_text()
    executed = re.findall(r'"name":"exec:(\w+)"', trace.read_text())
    for name, count in kernels.items():  # in two passes, and a few of them when the device is taken and loaded
        assert executed.count(name) >= 2 * count, name


def test_the_variables_that_hide_or_allow_a_fallback_are_overruled(run):
    hiding = ("RANK", "TORCH_CPP_LOG_LEVEL", "TORCH_NPU_WARNING_DISABLE", "INF_NAN_MODE_ENABLE")
    environment = {**dict.fromkeys(hiding, "1"), "TORCH_NPU_FALLBACK_CPU_DISABLE": "0"}
    patch = faults.during("load", f"left = set({hiding!r}) & set(os.environ); assert not left, left")
    ended = run(env=environment, patch=patch)
    assert ended.result.code == 0, ended.result.stderr
    assert ended.json()["environment"]["TORCH_NPU_FALLBACK_CPU_DISABLE"] == "1"


# What the evidence claims, where it is not so

CHANGED_OUTPUTS = """
original, calls = inference.policy_outputs, []
def policy_outputs(policy, *args):
    outputs = original(policy, *args)
    calls.append(1)
    {}
    return outputs
inference.policy_outputs = policy_outputs
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("outputs['value'] = outputs['value'] + len(calls) * 1e-3", "two passes over the same observations differ"),
        ("outputs = {name: part.cpu() for name, part in outputs.items()}", "not all on npu:0|copied to the host"),
    ],
)
def test_an_output_that_changes_or_is_elsewhere_ends_the_run(run, change, words):
    run(patch=CHANGED_OUTPUTS.replace("{}", change)).refused(6, "forward", words)


LOADED_CHANGED = """
import torch, torch_npu
from stable_baselines3 import PPO
original = PPO.load
def load(*args, **kwargs):
    model = original(*args, **kwargs)
    policy = model.policy
    {}
    return model
PPO.load = load
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("policy.action_net.bias.data += 1e-3", "differ from the checkpoint: action_net.bias"),
        ("policy.action_net.cpu()", r"parameters are on \['cpu', 'npu:0'\]"),
        ("policy.register_buffer('mean', torch.zeros(1), persistent=False)", "parameters are on"),
    ],
)
def test_a_tensor_that_arrives_changed_or_elsewhere_ends_the_run(run, change, words):
    run(patch=LOADED_CHANGED.replace("{}", change)).refused(5, "load", words)


def test_weights_that_change_on_the_device_after_they_were_checked_end_the_run(run):
    """Here by a policy that changes its own while it runs; both passes agree, since the change comes after them."""
    change = """original_forward = policy.forward
    calls = []
    def forward(*args, **kwargs):
        calls.append(1)
        outputs = original_forward(*args, **kwargs)
        if len(calls) == 2:
            policy.value_net.bias.data.add_(1.0)
        return outputs
    policy.forward = forward"""
    ended = run(patch=LOADED_CHANGED.replace("{}", change))
    ended.refused(6, "forward", "weights changed on the device during the run: value_net.bias")
    result = ended.json()
    assert (result["params_match_checkpoint"], result["params_match_after_forward"]) == (True, False)


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("torch.ones = lambda *args, **kwargs: ones(*args, **kwargs) + 1", r"1 \+ 1 on npu:0 .*gave"),
        ("torch.set_deterministic_debug_mode = lambda mode: None", "does not keep its settings"),
    ],
)
def test_a_device_that_miscomputes_or_does_not_take_its_settings_ends_the_run(run, patch, words):
    run(patch=f"import torch; ones = torch.ones; {patch}").refused(4, "npu", words)


# The device


def test_the_users_choice_of_a_device_is_kept_and_recorded(cli, run):
    environment = {"ASCEND_RT_VISIBLE_DEVICES": "2", "CANNSIM_DEVICES": "4", "PATH": cli.environment()["PATH"]}
    result = run(env=environment).json()
    assert (result["visible_devices"], result["npu_device"], result["device_count"]) == ("2", "npu:0", 1)
    assert result["npu_smi"]["npu_id"] == "2"


def test_a_lack_of_device_memory_is_no_success(run):
    ended = run(env={"CANNSIM_HBM_MB": "1"})
    assert ended.result.code in (4, 5, 6)
    assert ended.json()["error"]


def test_with_an_older_cann_nothing_is_claimed_that_is_not_so_and_the_operator_compiler_stays_off(run):
    """torch_npu asks for the version once, when it is imported; CANN before 8.3 starts its compiler when an option is
    set, which takes seconds and Python packages that may be missing; before 8.5, torch_npu leaves the device as it is,
    whatever torch is told about determinism."""
    environment = {"CANNSIM_CANN_VERSION": "8.1.RC1", "CANNSIM_FAIL": "aclSetCompileopt"}
    ended = run(env=environment, cold=True)
    assert ended.result.code == 0, ended.result.stderr
    result = ended.json()
    assert result["versions"]["cann"] == "8.1.RC1"
    assert result["environment"]["ACL_OP_INIT_MODE"] == "1"
    assert (result["determinism"]["deterministic_algorithms"], result["determinism"]["device"]) == (True, False)


def test_that_the_device_computes_deterministically_is_read_back_from_it(run):
    assert run().json()["determinism"]["device"] is True


COMPILE_OPTION = 'assert ctypes.CDLL("libascendcl.so").aclSetCompileopt(14, b"00") == 0'


@pytest.mark.parametrize(
    ("patch", "found"),
    [
        ("", set()),
        (faults.during("load", COMPILE_OPTION),
         {"child processes", "a handler for SIGINT", "a handler for SIGQUIT", "kernel_meta"}),
    ],
    ids=["the program", "one that sets an option"],
)  # fmt: skip
def test_no_trace_of_the_operator_compiler_is_there_at_any_time_of_a_run(cli, run, tmp_path, patch, found):
    """The second case is there to show that the first can fail. With torch_npu 2.9.0, which starts the compiler sooner,
    tests/measure/matrix.py does the same."""
    with compiler.Watch(tmp_path / "logs", cli.project) as watch:
        ended = run("--hold-seconds", 0.5, patch=patch)
    assert ended.result.code == 0, ended.result.stderr
    assert watch.found == found
    assert watch.looks > 10
