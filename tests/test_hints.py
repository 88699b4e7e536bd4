"""The start-up failures that users meet: each ends in one line with what happened and the command that mends it.

The texts are those that users have reported. The simulator brings about what it can; for the rest, a package is
replaced by one that fails with such a text, or the function that finds the hint is asked.
"""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest
from harness import evidence, faults, support

PROGRAM = runpy.run_path(str(support.PROJECT / "inference.py"))


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
ONE_PAIR = r"pair.*python3 -m pip install .*torch_npu==\d"
VISIBLE = "export ASCEND_RT_VISIBLE_DEVICES=0"
KERNELS = "install the kernels package of your CANN for your chip .*910b"

# what a library says, and what mends it
HINTS = {
    "no torch": ("No module named 'torch'", r"python3 -m pip install torch==\S+ torch_npu=="),
    "no torch_npu": ("No module named 'torch_npu'", r"python3 -m pip install .*torch_npu=="),
    "no PyYAML": ("No module named 'yaml'", "python3 -m pip install pyyaml"),
    "set_env.sh not sourced": ("libhccl.so: cannot open shared object file: No such file or directory", SET_ENV),
    "set_env.sh of another CANN": ("libopapi.so.1: cannot open shared object file: No such file", SET_ENV),
    "a container without the driver": ("libascend_hal.so: cannot open shared object file: No such file",
                                       "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver"),
    "static TLS": ("/usr/lib/libgomp-947d5fa1.so.1: cannot allocate memory in static TLS block", "LD_PRELOAD="),
    "wheels that are not a pair": ("libtorch_npu.so: undefined symbol: _ZN3c1017RegisterOperatorsD1Ev", ONE_PAIR),
    "wheels for another C++ library": ("libstdc++.so.6: version `GLIBCXX_3.4.30' not found", ONE_PAIR),
    "a CUDA build": ("Two accelerators cannot be used at the same time in PyTorch: npu and cuda. You can install the "
                     "cpu version of PyTorch ...", "CUDA build.*CPU build of torch"),
    "numpy 2 below a torch_npu for numpy 1": ("numpy.core.multiarray failed to import", OLD_NUMPY),
    "a package of the operator compiler": ("No module named 'decorator'", OLD_NUMPY),
    "packages of the operator compiler": (
        pta_error(PRECISION_MODE, 500001, "The internal ACL of the system is incorrect.",
                  "EH9999: Inner Error!\nEH9999: [PID] 2025-08-05-08:05:26 [Init][PlatformInfo]init failed"),
        OLD_NUMPY),
    "no operator package for the chip": (
        pta_error("aclnnAdd", 561107, "Op binary is not found.",
                  "EZ9999: [PID] Get binary failed. Please check if the kernel package is installed."), KERNELS),
    "CANN and a driver that do not match": (pta_error("aclnnAddGetWorkspaceSize", 561103, "call failed", ""),
                                            "CANN and the driver do not match: update the older one"),
    "a full device": (pta_error(SET_DEVICE, 507033, "Failed to start the device.",
                                "[PID] 2026-03-24-12:14 Memory_Allocation_Failure(EL0004): Failed to allocate memory."),
                      "memory is full.*npu-smi info"),
    "no memory for one tensor": (pta_error("aclrtMalloc", 207001, "Memory allocation fails.", ""),
                                 "memory is full.*npu-smi info"),
    "torch's own word for it": ("NPU out of memory. Tried to allocate 2.00 MiB", "memory is full.*npu-smi info"),
    "an invalid device": (pta_error(SET_DEVICE, 107001, "Invalid device ID.",
                                    "EE8888: [PID] Set visible device failed, input visible devices:4"),
                          VISIBLE),
    "visible devices that descend": (
        pta_error("aclrtGetDeviceCount(&device_count)", 207004, "The device is unavailable.",
                  "EE1001: [PID] The argument is invalid.Reason: set ASCEND_RT_VISIBLE_DEVICES:1,0 error, it must be "
                  "configured in ascending order"), VISIBLE),
    "an unknown chip": (pta_error(SET_DEVICE, 507008, "Failed to obtain the SOC version.", ""),
                        "does not know the chip"),
    "a chip that torch_npu does not know": ("Unsupported soc version: Ascend999", "does not know the chip"),
    "no permission": ("dcmi module initialize failed. ret is -8005",
                      r"sudo usermod -aG HwHiAiUser \$USER.*after a driver upgrade, reboot"),
    "held by another container": ("dcmi model initialized failed, because the device is used. ret is -8020",
                                  "another container holds the device"),
    "a device that is held": (pta_error("aclInit", 507899, "An internal error occurs in the Driver module.",
                                        "Resource_Busy(EL0005): The resources are busy."),
                              "another container.*--device /dev/davinci0"),
    "a device that does not start": (pta_error(SET_DEVICE, 507033, "Failed to start the device.", "E30006: [PID]"),
                                     "npu-smi info.*after a driver upgrade, reboot"),
    "another error": (pta_error("aclrtSynchronizeDevice", 507018, "The AI CPU execution is abnormal.", ""),
                      r"npu-smi info.*plog"),
}  # fmt: skip


@pytest.mark.parametrize("cause", HINTS)
def test_every_text_has_the_hint_that_mends_it(cause):
    text, cure = HINTS[cause]
    assert re.search(cure, PROGRAM["npu_hint"](text))


def test_every_hint_of_the_program_is_for_one_of_these_texts():
    reached = set()
    for text, _ in HINTS.values():
        text = re.sub(r"PID: ?\d+", "PID", text)
        reached.add(next((pattern for pattern, _ in PROGRAM["NPU_HINTS"] if re.search(pattern, text)), None))
    assert [pattern for pattern, _ in PROGRAM["NPU_HINTS"] if pattern not in reached] == []


@pytest.mark.parametrize("pid", [107001, 207001, 500001, 507008, 507899, 561103])
def test_the_number_of_a_process_is_not_taken_for_an_error_code(pid):
    text = pta_error(SET_DEVICE, 507033, "Failed to start the device.", "EL0003: [PID] invalid.", pid)
    assert "device does not start" in PROGRAM["npu_hint"](text)


# Through the program


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> dict[str, str]:
    return faults.quick_npu_smi(tmp_path_factory.mktemp("bin"))


@pytest.fixture
def fail(cli, quick, tmp_path):
    """Runs the program into a failure and returns its line on stderr, once all that it left agrees with it."""

    def run(code: int, stage: str, *args: object, patch: str = "", env: support.Environment | None = None,
            **options) -> str:  # fmt: skip
        if patch:
            options["script"] = faults.patched(cli.project, patch)
        log_dir = tmp_path / "logs"
        arguments = (*support.STANDIN_ARGS, "--hold-seconds", 0, "--log-dir", log_dir, *args)
        result = cli.start(*arguments, env={**quick, **(env or {})}, **options).wait()
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


def failing_package(directory: Path, name: str, statement: str) -> dict[str, str]:
    """The environment in which importing a package fails so."""
    (directory / "packages").mkdir()
    (directory / "packages" / f"{name}.py").write_text(f"{statement}\n")
    return {"PYTHONPATH": str(directory / "packages")}


IMPORTS = {
    "no torch": ("torch", "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "no torch"),
    "torch loads torch_npu by itself": (
        "torch", "raise RuntimeError('Failed to load the backend extension: torch_npu. You can disable extension "
        "auto-loading with TORCH_DEVICE_BACKEND_AUTOLOAD=0.') from ImportError('libhccl.so: cannot open shared object "
        "file: No such file')", "set_env.sh not sourced"),
    "another directory in the text": ("torch", "raise ImportError('/usr/lib/python3/site-packages/torch_npu/lib/"
                                      "libtorch_npu.so: undefined symbol: _ZN3c10')", "wheels that are not a pair"),
    "no torch_npu": ("torch_npu", "raise ModuleNotFoundError(\"No module named 'torch_npu'\", name='torch_npu')",
                     "no torch_npu"),
}  # fmt: skip


@pytest.mark.parametrize("cause", IMPORTS)
def test_what_cannot_be_imported_says_what_to_install_or_source(fail, tmp_path, cause):
    package, statement, hint = IMPORTS[cause]
    line = fail(4, "npu", cold=True, env=failing_package(tmp_path, package, statement))
    assert_says(line, "torch_npu cannot be imported: .*(torch|libhccl|libtorch_npu)", HINTS[hint][1])
    assert line.endswith("tests/simulate.sh")


def test_without_set_env_the_real_torch_npu_says_so_even_with_torchs_autoload(fail):
    line = fail(4, "npu", cold=True, env={"LD_LIBRARY_PATH": None, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"})
    assert_says(line, r"torch_npu cannot be imported: lib\w+\.so: cannot open shared object file", SET_ENV)


def test_a_missing_package_of_the_pins_is_installed_from_them(fail, tmp_path):
    numpy = "raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')"
    line = fail(4, "verify", cold=True, env=failing_package(tmp_path, "numpy", numpy))
    assert_says(line, "No module named 'numpy'", r"python3 -m pip install -r requirements\.txt")
    line = fail(5, "load", patch="sys.modules['stable_baselines3'] = None\n")
    assert_says(line, "stable_baselines3 cannot be imported", r"python3 -m pip install -r requirements\.txt")


@pytest.mark.parametrize(
    ("env", "words", "cure"),
    [
        ({"CANNSIM_HBM_MB": "1"}, "out of memory", "memory is full.*npu-smi info"),
        ({"CANNSIM_FAIL": "aclrtSetDevice:1:507033"}, "507033", "npu-smi info.*reboot"),
        ({"CANNSIM_FAIL": "aclInit:1:507899"}, "507899", "another container"),
        ({"CANNSIM_FAIL": "aclnnAddGetWorkspaceSize:1:561103"}, "561103", "CANN and the driver do not match"),
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


@pytest.mark.parametrize("visible", ["", "1,0", "npu0", " 0", "0,"])
def test_visible_devices_that_cann_ignores_without_a_word_are_named(fail, visible):
    assert_says(fail(4, "npu", cold=True, env={"ASCEND_RT_VISIBLE_DEVICES": visible}),
                re.escape(f"ASCEND_RT_VISIBLE_DEVICES={visible!r} is not an ascending list"), VISIBLE)  # fmt: skip


def test_visible_devices_that_are_not_there_are_named(fail, tmp_path):
    for name in ("davinci0", *NODES):
        (tmp_path / name).touch()
    assert re.search(f"ASCEND_RT_VISIBLE_DEVICES=1,2 .*{VISIBLE}", PROGRAM["no_device_hint"]("1,2", "", tmp_path))
    assert_says(fail(4, "npu", env={"ASCEND_RT_VISIBLE_DEVICES": "1,2"}), "no device", "dev|VISIBLE_DEVICES=1,2")


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
    "a table and no files": ((), TABLE, rf"no /dev/davinci\*.*{CONTAINER}"),
    "an error and all files": (("davinci0", *NODES), "ret is -8020", "another container holds the device"),
}


@pytest.mark.parametrize("case", DEVS)
def test_the_files_in_dev_explain_why_no_device_is_counted(tmp_path, case):
    names, npu_smi_says, hint = DEVS[case]
    for name in names:
        (tmp_path / name).touch()
    assert re.search(hint, PROGRAM["no_device_hint"]("6", PROGRAM["driver_error_of"](npu_smi_says), tmp_path))


@pytest.mark.parametrize("closed", ["davinci0", "davinci_manager", "hisi_hdc"])
def test_a_device_that_this_user_may_not_open_names_the_group(cli, tmp_path, closed):
    for name in ("davinci0", *NODES):
        (tmp_path / name).touch(mode=0o600)
    (tmp_path / closed).chmod(0o000)
    patch = (f"{faults.WITHOUT_PRIVILEGES}\nsys.stdout.write(inference.no_device_hint('0', '', "
             f"inference.Path({str(tmp_path)!r})))\nsys.exit()")  # fmt: skip
    result = cli(script=faults.patched(cli.project, patch))
    assert re.search(r"sudo usermod -aG HwHiAiUser \$USER", result.stdout), result
