"""The start-up failures that users meet: each ends in one line with what happened and the command that mends it.

The simulator brings about what it can; for the rest, a part of torch, torch_npu or /dev is replaced by one that fails
with the text that users have reported.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy

import pytest
from harness import evidence, faults, support

SIMULATE = "tests/simulate.sh"


def failing_import(module: str, error: str) -> str:
    """A patch: the module cannot be imported, and `error` is the statement that says so."""
    return f"""
class Failing:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {error}
for name in [name for name in sys.modules if name.partition(".")[0] == {module!r}]:
    del sys.modules[name]
sys.meta_path.insert(0, Failing())
"""


def missing(module: str) -> str:
    return failing_import(module, f'raise ModuleNotFoundError("No module named {module!r}", name={module!r})')


def failing_device(text: str) -> str:
    """A patch: torch.npu.set_device fails with this text."""
    return f"""
import torch, torch_npu
def set_device(*_):
    raise RuntimeError({text!r})
torch.npu.set_device = set_device
"""


def pta_error(call: str, code: int, message: str, details: str, pid: int = 4711) -> str:
    """What torch_npu makes of a failed call: its own lines, then CANN's."""
    return (
        f"SetPrecisionMode:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:155 NPU function error: {call}, "
        f"error code is {code}\n[ERROR] 2025-08-05-08:05:26 (PID:{pid}, Device:0, RankID:-1) ERR00100 PTA call acl api "
        f"failed\n[Error]: {message}\n        Rectify the fault based on the error information in the ascend log.\n"
        f"{details.replace('PID', f'PID: {pid}')}"
    )


PRECISION_MODE = "at_npu::native::AclSetCompileopt(aclCompileOpt::ACL_PRECISION_MODE, precision_mode)"
SET_DEVICE = "c10_npu::SetDevice(device_id_)"
OLD_NUMPY = r"python3 -m pip install .*'numpy<2' decorator attrs psutil scipy"
SET_ENV = r"source /usr/local/Ascend/\S+/set_env\.sh"
ONE_PAIR = r"pair.*python3 -m pip install .*torch_npu=="
VISIBLE = "export ASCEND_RT_VISIBLE_DEVICES=0"

# patch: what the line must say, and what to do
IMPORTS = {
    "no torch": (missing("torch"), "No module named 'torch'", r"python3 -m pip install torch==\S+ torch_npu=="),
    "no torch_npu": (missing("torch_npu"), "No module named 'torch_npu'", r"python3 -m pip install .*torch_npu=="),
    "set_env.sh not sourced": (
        failing_import("torch_npu", 'raise ImportError("libhccl.so: cannot open shared object file: No such file")'),
        r"libhccl\.so", SET_ENV,
    ),
    "set_env.sh of another CANN": (
        failing_import("torch_npu", 'raise OSError("libopapi.so: cannot open shared object file: No such file")'),
        r"libopapi\.so", SET_ENV,
    ),
    "a container without the driver": (
        failing_import("torch_npu", 'raise ImportError("libascend_hal.so: cannot open shared object file: No such")'),
        r"libascend_hal\.so", r"driver.*-v /usr/local/Ascend/driver:/usr/local/Ascend/driver",
    ),
    "torch loads torch_npu by itself": (
        failing_import("torch", 'raise RuntimeError("Failed to load the backend extension: torch_npu. You can disable '
                                'extension auto-loading with TORCH_DEVICE_BACKEND_AUTOLOAD=0.") '
                                'from ImportError("libhccl.so: cannot open shared object file: No such file")'),
        r"libhccl\.so", SET_ENV,
    ),
    "wheels that are no pair": (
        failing_import("torch_npu", 'raise ImportError("/usr/lib/python3/site-packages/torch_npu/lib/libtorch_npu.so: '
                                    'undefined symbol: _ZN3c1017RegisterOperatorsD1Ev")'),
        r"libtorch_npu\.so: undefined symbol", ONE_PAIR,
    ),
    "a CUDA build": (
        failing_import("torch_npu", 'raise RuntimeError("Two accelerators cannot be used at the same time in PyTorch: '
                                    'npu and cuda. You can install the cpu version of PyTorch ...")'),
        "npu and cuda", "CUDA build.*CPU build of",
    ),
    "numpy 2 below a torch_npu for numpy 1": (
        failing_import("torch_npu", 'raise ImportError("numpy.core.multiarray failed to import")'),
        "multiarray", OLD_NUMPY,
    ),
    "no package of the operator compiler": (missing("decorator") + failing_import("torch_npu", "import decorator"),
                                            "No module named 'decorator'", OLD_NUMPY),
}  # fmt: skip

DEVICES = {
    "no package of the operator compiler": (
        pta_error(PRECISION_MODE, 500001, "The internal ACL of the system is incorrect.",
                  "EH9999: Inner Error!\nEH9999: [PID] 2025-08-05-08:05:26 [Init][PlatformInfo]init failed"),
        "error code is 500001", OLD_NUMPY,
    ),
    "the device is full": (
        pta_error(SET_DEVICE, 507033, "Failed to start the device.",
                  "[PID] 2026-03-24-12:14:45 Memory_Allocation_Failure(EL0004): Failed to allocate memory."),
        "error code is 507033", "memory is full.*npu-smi info",
    ),
    "no memory for one tensor": (pta_error("aclrtMalloc", 207001, "Memory allocation fails.", ""),
                                 "error code is 207001", "memory is full.*npu-smi info"),
    "an invalid device": (
        pta_error(SET_DEVICE, 107001, "Invalid device ID.",
                  "EE8888: [PID] Set visible device failed, invalid device=0, input visible devices:4"),
        "error code is 107001", VISIBLE,
    ),
    "visible devices that descend": (
        pta_error("aclrtGetDeviceCount(&device_count)", 207004, "The device is unavailable.",
                  "EE1001: [PID] The argument is invalid.Reason: set ASCEND_RT_VISIBLE_DEVICES:1,0 error, it must be "
                  "configured in ascending order"),
        "error code is 207004", VISIBLE,
    ),
    "a device that does not start": (
        pta_error(SET_DEVICE, 507033, "Failed to start the device.", "EL0003: [PID] The argument is invalid."),
        "error code is 507033", "npu-smi info.*after a driver upgrade, reboot",
    ),
    "a device that is held": (
        pta_error("aclInit", 507899, "An internal error occurs in the Driver module.",
                  "Resource_Busy(EL0005): The resources are busy."),
        "error code is 507899", "another container.*--device /dev/davinci0",
    ),
    "an unknown chip": (pta_error(SET_DEVICE, 507008, "Failed to obtain the SOC version.", ""),
                        "error code is 507008", "does not know the chip"),
    "another error": (pta_error("aclrtSynchronizeDevice", 507018, "The AI CPU execution is abnormal.", ""),
                      "error code is 507018", r"npu-smi info.*plog"),
}  # fmt: skip


@pytest.fixture
def fail(cli, tmp_path):
    """Runs the program into a failure and returns its line on stderr, once all that it left agrees with it."""

    def run(code: int, stage: str, *args: object, patch: str = "", **options) -> str:
        if patch:
            options["script"] = faults.patched(cli.project, patch)
        log_dir = tmp_path / "logs"
        result = cli.start(*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", log_dir, *args, **options).wait()
        assert (result.code, evidence.problems(result, log_dir)) == (code, []), result.stderr
        [line] = evidence.complaints_of(result)
        error = support.read_result(log_dir)["error"]
        assert line == f"inference.py: {stage}: {error['message']}; {error['hint']}"
        assert not re.search(r"[\w.]/(site-packages|lib)/", line)  # no directories of this machine
        return line

    return run


def assert_says(line: str, cause: str, cure: str) -> None:
    """The cause comes first, then the cure."""
    assert re.search(f"({cause}).*; .*({cure})", line), line


# torch and torch_npu cannot be imported


@pytest.mark.parametrize("cause", IMPORTS)
def test_what_cannot_be_imported_says_what_to_install_or_source(fail, cause):
    patch, words, cure = IMPORTS[cause]
    line = fail(4, "npu", patch=patch)
    assert_says(line, words, cure)
    assert line.endswith(SIMULATE)


def test_without_set_env_the_real_torch_npu_says_so_even_with_torchs_autoload(fail):
    line = fail(4, "npu", cold=True, env={"LD_LIBRARY_PATH": None, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"})
    assert_says(line, r"torch_npu cannot be imported: lib\w+\.so: cannot open shared object file", SET_ENV)


def test_wheels_that_are_no_pair_name_the_version_that_is(fail):
    patch, words, cure = IMPORTS["wheels that are no pair"]
    version = importlib.metadata.version("torch").partition("+")[0]
    assert_says(fail(4, "npu", patch=patch), words, f"{cure}{re.escape(version)}(?![.\\d])")


@pytest.mark.parametrize(
    ("module", "code", "stage"),
    [("numpy", 4, "verify"), ("stable_baselines3", 5, "load"), ("gymnasium", 5, "load")],
)
def test_a_missing_package_of_the_pins_is_installed_from_them(fail, module, code, stage):
    line = fail(code, stage, patch=missing(module))
    assert_says(line, f"No module named '{module}'", r"python3 -m pip install -r requirements\.txt")


# The device fails


@pytest.mark.parametrize("cause", DEVICES)
def test_an_error_of_the_device_says_what_mends_it(fail, cause):
    text, words, cure = DEVICES[cause]
    line = fail(4, "npu", patch=failing_device(text))
    assert_says(line, words, cure)
    assert line.endswith(SIMULATE)


@pytest.mark.parametrize("pid", [107001, 207001, 500001, 507008, 507899])
def test_the_number_of_a_process_is_not_taken_for_an_error_code(fail, pid):
    text = pta_error(SET_DEVICE, 507033, "Failed to start the device.", "EL0003: [PID] invalid.", pid)
    assert_says(fail(4, "npu", patch=failing_device(text)), "507033", "device does not start")


@pytest.mark.parametrize(
    ("env", "words", "cure"),
    [
        ({"CANNSIM_HBM_MB": "1"}, "out of memory", "memory is full.*npu-smi info"),
        ({"CANNSIM_FAIL": "aclrtSetDevice:1:207001"}, "207001", "memory is full"),
        ({"CANNSIM_FAIL": "aclrtSetDevice:1:507033"}, "507033", "npu-smi info.*reboot"),
        ({"CANNSIM_FAIL": "aclInit:1:507899"}, "507899", "another container"),
        ({"CANNSIM_FAIL": "aclInit:1:500001"}, "500001", OLD_NUMPY),
        ({"CANNSIM_FAIL": "aclrtSetDevice:1:507008"}, "507008", "does not know the chip"),
        ({"CANNSIM_SOC": "Ascend999"}, "Unsupported soc version: Ascend999", "does not know the chip"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_an_error_of_the_simulated_device_says_what_mends_it(fail, env, words, cure):
    assert_says(fail(4, "npu", env=env), words, cure)


def test_a_failure_past_the_start_points_to_the_device_and_its_log(fail):
    line = fail(5, "load", env={"CANNSIM_FAIL": "aclrtMemcpy:9:507899"})
    assert_says(line, "507899", "npu-smi info.*plog")


# No device is counted


@pytest.mark.parametrize("visible", ["", "1,0", "0,0", "npu0", "0,a", "-1", " 0", "0,"])
def test_visible_devices_that_cann_ignores_without_a_word_are_named(fail, visible):
    assert_says(fail(4, "npu", env={"ASCEND_RT_VISIBLE_DEVICES": visible}),
                re.escape(f"ASCEND_RT_VISIBLE_DEVICES={visible!r} is no ascending list"), VISIBLE)  # fmt: skip


@pytest.mark.parametrize("visible", ["3", "1,2"])
def test_visible_devices_that_are_not_there_are_named(fail, visible):
    assert_says(fail(4, "npu", env={"ASCEND_RT_VISIBLE_DEVICES": visible}), "no device",
                f"ASCEND_RT_VISIBLE_DEVICES={visible}.*{VISIBLE}")  # fmt: skip


SMI_ERRORS = {
    "no permission, or no reboot": ("dcmi module initialize failed. ret is -8005",
                                    r"sudo usermod -aG HwHiAiUser \$USER.*after a driver upgrade, reboot"),
    "held by another container": ("DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi model initialized failed, "
                                  "because the device is used. ret is -8020", "another container holds the device"),
}  # fmt: skip


@pytest.mark.parametrize("error", SMI_ERRORS)
def test_what_npu_smi_says_of_a_device_that_is_not_counted_is_explained(fail, tmp_path, error):
    text, cure = SMI_ERRORS[error]
    (tmp_path / "npu-smi").write_text(f"#!/bin/sh\necho '{text}'\nexit 1\n")
    (tmp_path / "npu-smi").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert_says(fail(4, "npu", env={"CANNSIM_DEVICES": "0", "PATH": path}), "no device", cure)


TABLE = """
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 6     910B3               | OK            | 200.3       14                0    / 0             |
| 0                         | 0000:C5:00.0  | 0           0    / 0          74318/ 49562         |
+===========================+===============+====================================================+
"""
NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
CONTAINER = " ".join(f"--device /dev/{name}" for name in ("davinci0", *NODES))

# files in /dev, what npu-smi says: the hint
DEVS = {
    "no device at all": ((), "", rf"no /dev/davinci\*.*{CONTAINER}"),
    "other files of that name": (("davinci_manager", "davinci_manager_docker"), "", rf"no /dev/davinci\*.*{CONTAINER}"),
    "no manager in the container": (("davinci0", "devmm_svm", "hisi_hdc"), "", f"/dev/davinci_manager.*{CONTAINER}"),
    "no memory in the container": (("davinci0", "davinci_manager", "hisi_hdc"), "", f"/dev/devmm_svm.*{CONTAINER}"),
    "another device than the visible": (("davinci6", *NODES), TABLE, f"ASCEND_RT_VISIBLE_DEVICES=6 .*{VISIBLE}"),
    "a table and no files": ((), TABLE, f"ASCEND_RT_VISIBLE_DEVICES=6 .*{VISIBLE}"),
    "an error and all files": (("davinci0", *NODES), "ret is -8020", "another container holds the device"),
}


@pytest.fixture(scope="module")
def program() -> dict[str, object]:
    return runpy.run_path(str(support.PROJECT / "inference.py"))


@pytest.mark.parametrize("case", DEVS)
def test_the_files_in_dev_explain_why_no_device_is_counted(program, tmp_path, case):
    names, npu_smi_says, hint = DEVS[case]
    for name in names:
        (tmp_path / name).touch()
    assert re.search(hint, program["no_device_hint"]("6", npu_smi_says, tmp_path))


@pytest.mark.parametrize("closed", ["davinci0", "davinci_manager", "hisi_hdc"])
def test_a_device_that_this_user_may_not_open_names_the_group(cli, tmp_path, closed):
    for name in ("davinci0", *NODES):
        (tmp_path / name).touch(mode=0o600)
    (tmp_path / closed).chmod(0o000)
    patch = (f"{faults.WITHOUT_PRIVILEGES}\nsys.stdout.write(inference.no_device_hint('0', '', "
             f"inference.Path({str(tmp_path)!r})))\nsys.exit()")  # fmt: skip
    result = cli(script=faults.patched(cli.project, patch))
    assert re.search(r"sudo usermod -aG HwHiAiUser \$USER", result.stdout), result
