"""PyTorch's own operator samples on the simulated NPU, against PyTorch on the CPU.

`op_db` of torch.testing has some 700 operators with inputs for each: empty ones, scalars, broadcasting, every argument.
Each runs as it is, with inputs that are not contiguous, and in place. Three things must hold:

- what the simulator has (SIMULATED) is right: all of float32, and of other dtypes whatever CANN's kernels take;
- what it has not refuses, by the name of the operator or of the kernel that is missing, and never gives a wrong answer;
- nothing crashes.

The samples run through torch_npu in one process of their own, this file as a program, because torch_npu takes seconds
to import and must find the simulator when it is. After a crash another one goes on with the next operator.

    LD_LIBRARY_PATH=SIMULATOR python test_cannsim_samples.py REPORT [OPERATOR...]      writes a line of JSON for each
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from harness import support

if __name__ == "__main__" or TYPE_CHECKING:
    import torch
    import torch_npu  # noqa: F401
    from torch.nn import functional as F
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.utils._pytree import tree_leaves

DTYPES = ("float32", "float16", "bfloat16", "int64", "uint8", "bool")

SIMULATED = """
    H T __getitem__ __radd__ __rdiv__ __rmatmul__ __rmod__ __rmul__ __rpow__ __rsub__ _softmax_backward_data
    _unsafe_masked_index abs add addcdiv addcmul addmm addmm_decomposed alias_copy all allclose amax amin any argmax
    argmin argwhere as_strided as_strided_copy as_strided_partial_views as_strided_scatter atanh atleast_1d atleast_2d
    atleast_3d bernoulli bitwise_and bitwise_not bitwise_or bitwise_xor block_diag bmm bmm_triton_optimized
    broadcast_shapes broadcast_tensors broadcast_to cartesian_prod cat ceil chunk clamp clamp_max clamp_min clone
    column_stack combinations conj conj_physical contiguous corrcoef cos count_nonzero cov cumsum cumulative_trapezoid
    deg2rad diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff div_floor_rounding
    div_no_rounding_mode div_trunc_rounding dot dsplit dstack einsum empty empty_like empty_permuted empty_strided eq
    equal erf exp expand expand_as expand_copy expm1 exponential fill flatten float_power floor floor_divide fmod full
    full_like gather ge gradient gt hsplit hstack index_select inner isclose isfinite isinf isnan isreal item kron ldexp
    le linalg_diagonal linalg_multi_dot linalg_vecdot log log1p log_softmax log_softmax_with_dtype logical_and
    logical_not logical_or logical_xor logsumexp lt mH mT masked_amax masked_amin masked_argmax masked_argmin
    masked_cumsum masked_fill masked_log_softmax masked_logsumexp masked_mean masked_norm masked_normalize masked_prod
    masked_select masked_softmax masked_softmin masked_std masked_sum masked_var matmul max_binary max_reduction_no_dim
    max_reduction_with_dim maximum mean meshgrid_list_of_tensors meshgrid_variadic_tensors min_binary
    min_reduction_no_dim min_reduction_with_dim minimum mm movedim mul multinomial mv narrow narrow_copy ne neg
    new_empty new_empty_strided new_full new_ones new_zeros nn_functional_alpha_dropout nn_functional_batch_norm
    nn_functional_bilinear nn_functional_binary_cross_entropy_with_logits nn_functional_celu
    nn_functional_cosine_embedding_loss nn_functional_cosine_similarity nn_functional_dropout2d nn_functional_dropout3d
    nn_functional_elu nn_functional_feature_alpha_dropout_with_train nn_functional_feature_alpha_dropout_without_train
    nn_functional_gaussian_nll_loss nn_functional_gelu nn_functional_glu nn_functional_hardshrink
    nn_functional_hardsigmoid nn_functional_hardswish nn_functional_hardtanh nn_functional_hinge_embedding_loss
    nn_functional_instance_norm nn_functional_leaky_relu nn_functional_linear nn_functional_logsigmoid
    nn_functional_margin_ranking_loss nn_functional_mish nn_functional_mse_loss
    nn_functional_multilabel_soft_margin_loss nn_functional_pad_circular nn_functional_pixel_shuffle
    nn_functional_pixel_unshuffle nn_functional_relu nn_functional_relu6 nn_functional_rms_norm nn_functional_selu
    nn_functional_silu nn_functional_softmin nn_functional_softmin_with_dtype nn_functional_softplus
    nn_functional_softshrink nn_functional_softsign nn_functional_tanhshrink nn_functional_threshold nonzero norm_fro
    norm_inf normal normal_in_place normal_number_mean ones ones_like outer permute permute_copy positive pow prod
    rad2deg rand_like randn randn_like ravel real reciprocal remainder repeat reshape reshape_as resize_ resize_as_
    resolve_conj resolve_neg round rsqrt rsub scalar_tensor scatter_add scatter_reduce_amax scatter_reduce_amin
    scatter_reduce_mean scatter_reduce_prod select select_scatter sgn sigmoid sign sin slice slice_scatter softmax
    softmax_with_dtype special_ndtr split split_list_args split_with_sizes split_with_sizes_copy sqrt square squeeze
    squeeze_copy squeeze_multiple stack std std_unbiased sub sum sum_to_size t t_copy take_along_dim tanh tensordot tile
    transpose transpose_copy trapezoid trapz true_divide trunc unbind unbind_copy unflatten unfold unfold_copy uniform
    unsafe_chunk unsafe_split unsqueeze unsqueeze_copy var var_unbiased vdot view view_as view_as_complex view_copy
    vsplit vstack where zero_ zeros zeros_like
"""
# Some of their samples need a kernel that is not simulated, or torch_npu refuses them.
PARTLY = "arange linalg_vector_norm nn_functional_normalize nn_functional_rrelu nn_functional_smooth_l1_loss scatter to"

# ---- What torch_npu does differently from PyTorch on the CPU, whatever is below it ---------------------------------

# The numbers are drawn by another generator: shapes and dtypes are compared, distributions in test_cannsim_ops.py.
RANDOM = """
    bernoulli exponential multinomial nn_functional_alpha_dropout nn_functional_dropout nn_functional_dropout2d
    nn_functional_dropout3d nn_functional_feature_alpha_dropout_with_train normal normal_in_place normal_number_mean
    rand_like randint randint_like randn randn_like uniform
"""
# The memory holds what was there before.
UNINITIALISED = "empty empty_like empty_permuted empty_strided new_empty new_empty_strided"
# On the device torch_npu makes float32 of what should become float64.
NO_DOUBLE = "double float_power to masked_argmax masked_argmin"
DIFFERENT = {
    "_native_batch_norm_legit": "in evaluation the saved statistics have a shape, on the CPU they are empty",
    "native_batch_norm": "in evaluation the saved statistics have a shape, on the CPU they are empty",
    "native_dropout_backward": "the mask is packed, eight elements to a byte",
    "arange": "the length of integers comes from bounds that are cut to integers first",
}
# aclnnGelu is the approximation by tanh whatever is asked for.
INSTEAD = {"nn_functional_gelu": lambda x, approximate="none": F.gelu(x, approximate="tanh")}

MANY = 20  # refusals, after which the other samples of an operator tell nothing new
FAILURES = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
# How an error says that it is a refusal: by the simulator for want of a kernel, by torch_npu for want of an operator or
# for reasons of its own, by PyTorch; and by the simulator because CANN's kernel takes no such dtype.
REFUSED = re.compile(
    r"(aclnn\w+|operator \w+).* (is not|is|are) simulated"
    r"|'aten::\w+.*(CPU fallback is disabled|Could not run)|Could not run 'aten::\w+"
    r"|ERR\d{5} (OPS|PTA) (?!call acl)"
    r"|expected \w+ to be on cpu|not implemented for"
)
OTHER_DTYPE = re.compile(r"aclnn\w+GetWorkspaceSize: .*(dtype \S+ is not supported|cannot be cast to \w+)")


@dataclasses.dataclass
class Outcome:
    """What became of one operator's samples of one dtype."""

    operator: str
    dtype: str
    right: int = 0
    refused: list[str] = dataclasses.field(default_factory=list)  # for want of a kernel, or by torch_npu
    other_dtype: list[str] = dataclasses.field(default_factory=list)  # the kernel does not take
    wrong: list[str] = dataclasses.field(default_factory=list)


# ---- The tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(simulator: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    report = tmp_path_factory.mktemp("samples") / "report.jsonl"
    environment = support.clean_environment() | {
        "LD_LIBRARY_PATH": str(simulator),
        "TASK_QUEUE_ENABLE": "0",
        "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
    }
    command = [sys.executable, __file__, str(report)]
    crashed: list[Outcome] = []
    while True:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        lines = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        if done.returncode == 0:
            break
        assert lines and "started" in lines[-1], done.stderr  # else it did not get as far as an operator
        assert len(crashed) < 20, crashed
        what = f"crashed, {done.returncode}: {done.stderr[-500:]}"
        crashed.append(Outcome(lines[-1]["started"], "any", wrong=[what]))
    found: dict[str, list[Outcome]] = {}
    for outcome in [*(Outcome(**line) for line in lines if "started" not in line), *crashed]:
        found.setdefault(outcome.operator, []).append(outcome)
    return found


@pytest.mark.parametrize("name", SIMULATED.split())
def test_a_simulated_operator_is_right(outcomes: dict[str, list[Outcome]], name: str) -> None:
    if name not in outcomes:
        pytest.skip("this PyTorch has no samples of it")
    for outcome in outcomes[name]:
        assert not outcome.wrong, (outcome.dtype, outcome.wrong)
        assert not outcome.refused, (outcome.dtype, outcome.refused)
        if outcome.dtype == "float32":
            assert not outcome.other_dtype, outcome.other_dtype
    assert outcomes[name][0].right > 0


@pytest.mark.parametrize("name", PARTLY.split())
def test_a_partly_simulated_operator_is_right_where_it_runs(outcomes: dict[str, list[Outcome]], name: str) -> None:
    (outcome,) = outcomes[name]
    assert outcome.right > 0
    assert not outcome.wrong


def test_any_other_operator_is_right_or_refuses_by_name(outcomes: dict[str, list[Outcome]]) -> None:
    others = [outcome for name in outcomes.keys() - set(SIMULATED.split()) for outcome in outcomes[name]]
    assert len(others) > 200
    assert not [(outcome.operator, outcome.dtype, outcome.wrong) for outcome in others if outcome.wrong]


# ---- The program ---------------------------------------------------------------------------------------------------


def main(report: Path, only: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    written = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    started = [json.loads(line)["started"] for line in written if "started" in line]
    with report.open("a", encoding="utf-8") as file:
        for operator in op_db:
            name = operator.formatted_name
            if name in started or (only and name not in only):
                continue
            print(json.dumps({"started": name}), file=file, flush=True)
            dtypes = [dtype for dtype in DTYPES if getattr(torch, dtype) in operator.supported_dtypes("cpu")]
            for dtype in dtypes if name in SIMULATED.split() else dtypes[:1]:
                print(json.dumps(dataclasses.asdict(run(operator, dtype))), file=file, flush=True)


def run(operator: Any, dtype: str) -> Outcome:
    outcome = Outcome(operator.formatted_name, dtype)
    for sample in operator.sample_inputs("cpu", getattr(torch, dtype)):
        for case in cases(operator, sample):
            judge(case, outcome)
        if len(outcome.refused) > MANY:
            break
    return outcome


def cases(operator: Any, sample: Any) -> Iterator[Case]:
    name = operator.formatted_name
    yield Case(name, operator.op, sample)
    if all(leaf.layout == torch.strided for leaf in tree_leaves((sample.input, sample.args)) if is_tensor(leaf)):
        yield Case(name, operator.op, sample.noncontiguous())
    if operator.inplace_variant is not None and not sample.broadcasts_input:
        yield Case(name, operator.inplace_variant, sample)


def judge(case: Case, outcome: Outcome) -> None:
    try:
        case.compare(case.on("npu"))
        outcome.right += 1
    except FAILURES as error:
        message = f"{error} {case}"
        if REFUSED.search(message):
            outcome.refused.append(message)
        elif OTHER_DTYPE.search(message):
            outcome.other_dtype.append(message)
        elif not case.fails_on_the_cpu():
            outcome.wrong.append(message)


@dataclasses.dataclass
class Case:
    """An operator and its inputs, which each run gets a copy of."""

    name: str
    function: Callable[..., Any]
    sample: Any

    def on(self, device: str, upcast: bool = False) -> Any:
        given = self.sample.transform(lambda leaf: carry(leaf, device, upcast))
        args = [device if argument == "cpu" else argument for argument in given.args]
        kwargs = {key: device if value == "cpu" else value for key, value in given.kwargs.items()}
        function = INSTEAD.get(self.name, self.function) if device == "cpu" else self.function
        torch.manual_seed(0)
        return function(given.input, *args, **kwargs)

    def fails_on_the_cpu(self) -> bool:
        try:
            self.on("cpu")
        except FAILURES:
            return True
        return False

    def compare(self, got: Any) -> None:
        want = self.on("cpu")
        if self.name in DIFFERENT:
            return
        results, expected = tree_leaves(got), tree_leaves(want)
        assert len(results) == len(expected)
        # Halves may be nearer to the exact result than PyTorch on the CPU, which rounds in between.
        try:
            for result, wanted in zip(results, expected, strict=True):
                self.compare_leaf(result, wanted, wanted)
        except AssertionError:
            if not any(is_tensor(leaf) and leaf.dtype in (torch.float16, torch.bfloat16) for leaf in expected):
                raise
            for result, wanted, exact in zip(results, expected, tree_leaves(self.on("cpu", True)), strict=True):
                self.compare_leaf(result, wanted, exact)

    def compare_leaf(self, result: Any, wanted: Any, exact: Any) -> None:
        if not is_tensor(wanted):
            assert type(result) is type(wanted)
            assert self.name in RANDOM.split() or result == wanted or wanted != wanted, f"{result}, not {wanted}"
            return
        if self.name in NO_DOUBLE.split() and (result.dtype, wanted.dtype) == (torch.float32, torch.float64):
            wanted, exact = wanted.float(), exact.float()
        assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape), f"{result.dtype} {result.shape}"
        if self.name not in (*RANDOM.split(), *UNINITIALISED.split()):
            torch.testing.assert_close(result.cpu(), exact.to(wanted.dtype), equal_nan=True)

    def __str__(self) -> str:
        leaves = tree_leaves((self.sample.input, self.sample.args, self.sample.kwargs))
        inputs = [f"{leaf.dtype} {list(leaf.shape)}" if is_tensor(leaf) else repr(leaf) for leaf in leaves]
        return f"{getattr(self.function, '__name__', self.name)}({', '.join(inputs)})"


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def carry(leaf: Any, device: str, upcast: bool) -> Any:
    """A copy of a tensor on another device: of its whole storage, so that the strides and the offset stay."""
    if isinstance(leaf, torch.dtype):
        return torch.float32 if upcast and leaf in (torch.float16, torch.bfloat16) else leaf
    if not is_tensor(leaf) or leaf.layout != torch.strided or leaf.is_complex():
        return leaf.to(device) if is_tensor(leaf) else leaf
    dtype = torch.float32 if upcast and leaf.dtype in (torch.float16, torch.bfloat16) else leaf.dtype
    if leaf.numel() == 0:
        return torch.empty(leaf.shape, dtype=dtype, device=device)
    whole = torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage())
    return whole.to(device, dtype, copy=True).as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
