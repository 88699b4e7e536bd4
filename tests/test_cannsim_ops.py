"""The operators of the simulated NPU: special values, lists, draws, and how they refuse what they do not do.

test_cannsim_samples.py runs PyTorch's own samples of the operators; here is what those do not cover.

The cases run through torch_npu in one process of their own, this file as a program, because torch_npu takes seconds to
import and must find the simulator when it is; pytest then reports them one by one.

    LD_LIBRARY_PATH=SIMULATOR python test_cannsim_ops.py REPORT     writes {case: what went wrong, or nothing}
"""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from harness import support

if __name__ == "__main__" or TYPE_CHECKING:
    import numpy
    import torch
    import torch_npu
    from torch import Tensor
    from torch.nn import functional as F

INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
FLOATS = ("float32", "float16", "bfloat16")
REALS = (*FLOATS, "float64")
EVERY = (*REALS, *INTEGERS, "bool")
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}  # relative, and absolute below one

CASES: dict[str, Callable[[], None]] = {}


@pytest.fixture(scope="module")
def outcomes(simulator: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    report = tmp_path_factory.mktemp("ops") / "report.json"
    environment = support.clean_environment() | {
        "LD_LIBRARY_PATH": str(simulator),
        "TASK_QUEUE_ENABLE": "0",
        "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
        "CANNSIM_CORRUPT": "copy:*:1000000000",  # never: but an operator that does not say what it writes is refused
    }
    command = [sys.executable, __file__, str(report)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(report.read_text(encoding="utf-8")))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("name", list(CASES))


def test_case(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]


def run_cases(report: Path) -> None:
    torch.set_num_threads(1)
    outcomes = dict.fromkeys(CASES, "")
    for name, run in CASES.items():
        try:
            run()
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
    report.write_text(json.dumps(outcomes), encoding="utf-8")


def case(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(f: Callable[[], None]) -> Callable[[], None]:
        CASES[name] = f
        return f

    return add


def case_of(name: str, dtypes: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    def add(f: Callable[[str], None]) -> Callable[[str], None]:
        for dtype in dtypes:
            CASES[f"{name} {dtype}"] = lambda dtype=dtype: f(dtype)  # type: ignore[misc]
        return f

    return add


# ---- Inputs and comparison -----------------------------------------------------------------------------------------

SHAPES = ((), (1,), (7,), (3, 4), (2, 3, 5), (0,), (3, 0), (600, 9))
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 1e-8, 100.0, -100.0)


def values(shape: tuple[int, ...], dtype: str, seed: int = 0, special: bool = False, low: float = -3) -> Tensor:
    """Random numbers above `low` on the CPU; with `special` the first ones are NaN, infinities and the like."""
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in INTEGERS:
        lowest = max(math.ceil(low), 0 if dtype == "uint8" else -9)
        return torch.randint(lowest, 10, shape, generator=generator).to(kind)
    result = (torch.rand(shape, generator=generator, dtype=torch.float64) * 6 + low).flatten()
    if special:
        count = min(len(SPECIAL), result.numel())
        result[:count] = torch.tensor(SPECIAL[:count])
    return result.reshape(shape).to(kind)


def layouts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and views of it that are not contiguous. It must be on its device by now: `.to` compacts."""
    yield tensor
    if tensor.dim() >= 1:
        yield tensor[1:] if tensor.size(0) > 1 else tensor[:0]
        yield tensor[..., ::2]
        yield tensor.unsqueeze(0).expand(3, *tensor.shape)
    if tensor.dim() >= 2:
        yield tensor.transpose(0, -1)
        yield tensor[:, 1:]
        yield tensor.movedim(0, -1)


def compare(got: Any, want: Any, tolerance: float | None = None) -> None:
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            compare(g, w, tolerance)
        return
    assert got.device.type == "npu", got.device
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (got.dtype, got.shape, want.dtype, want.shape)
    if want.is_floating_point():
        allowed = tolerance or TOLERANCE[str(want.dtype).split(".")[1]]
        torch.testing.assert_close(got.cpu(), want, rtol=allowed, atol=allowed, equal_nan=True)
    else:
        assert torch.equal(got.cpu(), want), f"{got} instead of {want}"


def both(f: Callable[..., Any], *inputs: Tensor, tolerance: float | None = None) -> None:
    """f on the device against f on the CPU, with the inputs in every layout."""
    on_cpu = zip(*(layouts(x) for x in inputs), strict=True)
    on_npu = zip(*(layouts(x.npu()) for x in inputs), strict=True)
    for cpu, npu in zip(on_cpu, on_npu, strict=True):
        assert all(a.stride() == b.stride() for a, b in zip(cpu, npu, strict=True))
        compare(f(*npu), f(*cpu), tolerance)


# ---- Element by element --------------------------------------------------------------------------------------------

FUNCTIONS = """
    abs atanh ceil cos erf exp expm1 floor isfinite isinf isnan log log1p logical_not neg reciprocal round rsqrt
    sigmoid sign sin sqrt square tanh trunc celu elu hardshrink hardsigmoid hardswish hardtanh leaky_relu mish relu
    relu6 selu silu softplus softshrink
"""
PAIRS = "add sub mul div pow maximum minimum fmod eq ne lt le gt ge logical_and logical_xor"
REDUCTIONS = "amax amin max min argmax argmin softmax log_softmax logsumexp all any"


def function(name: str) -> Callable[..., Any]:
    return getattr(torch, name, None) or getattr(F, name)  # type: ignore[no-any-return]


@case_of("NaN, infinities and zeros in a function", FLOATS)
def special(dtype: str) -> None:
    for name in FUNCTIONS.split():
        try:
            both(function(name), values((600, 9), dtype, special=True))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@case_of("NaN, infinities and zeros in a function of two", FLOATS)
def special_pairs(dtype: str) -> None:
    numbers = torch.tensor(SPECIAL, dtype=getattr(torch, dtype))
    x, y = numbers.repeat(len(SPECIAL)), numbers.repeat_interleave(len(SPECIAL))
    for name in PAIRS.split():
        both(function(name), x, y)
    both(lambda a, b: torch.clamp(a, b, b + 1), x, y)
    both(lambda a, b: torch.where(a > b, a, b), x, y)
    if dtype == "float32":
        both(lambda a, b: torch.isclose(a, b, rtol=0.1, atol=0.5, equal_nan=True), x, y)


@case("every activation of torch.nn that has no parameters")
def activations() -> None:
    nn, x = torch.nn, values((6, 8), "float32", special=True)
    made = [nn.Threshold(0.1, 20), nn.RReLU().eval(), nn.Hardtanh(-2, 3), nn.GLU(), nn.LogSigmoid(), nn.Softplus(2, 5)]
    made += [nn.ReLU(), nn.ReLU6(), nn.Sigmoid(), nn.Hardsigmoid(), nn.Tanh(), nn.SiLU(), nn.Mish(), nn.Hardswish()]
    made += [nn.ELU(0.5), nn.CELU(2), nn.SELU(), nn.GELU("tanh"), nn.Hardshrink(0.3), nn.LeakyReLU(0.2)]
    made += [nn.Softshrink(), nn.Softsign(), nn.Tanhshrink(), nn.Softmin(-1), nn.Softmax(-1), nn.LogSoftmax(-1)]
    made += [nn.Identity()]
    for activation in made:
        number = values((6, 8), "float32") if isinstance(activation, (nn.GELU, nn.Softmax, nn.Softmin)) else x
        compare(activation(number.npu()), activation(number))
        if hasattr(activation, "inplace"):
            activation.inplace = True
            compare(activation(number.npu()), activation(number.clone()))


@case("derivatives")
def derivatives() -> None:
    def f(activation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        result = activation(x)
        result.backward(torch.ones_like(result) * 3)
        assert x.grad is not None
        return result.detach(), x.grad

    x = values((6, 8), "float32")
    target = values((6, 8), "float32", 1)
    elu = [lambda t: F.elu(t, 0.5), lambda t: F.elu(t * 1, 0.5, inplace=True)]
    for activation in (torch.tanh, torch.relu, F.hardtanh, *elu, lambda t: t.softmax(-1), lambda t: t.softmax(0)):
        compare(f(activation, x.npu()), f(activation, x))
    for loss in (F.mse_loss, F.smooth_l1_loss):
        for reduction in ("none", "mean", "sum"):
            compare(
                f(lambda t, loss=loss, how=reduction: loss(t, target.npu(), reduction=how), x.npu()),
                f(lambda t, loss=loss, how=reduction: loss(t, target, reduction=how), x),
            )


@case("batch normalisation keeps its statistics")
def batch_norm() -> None:
    def f(device: str) -> list[Tensor]:
        layer = torch.nn.BatchNorm1d(5, momentum=0.2).to(device)
        results = [layer(values((7, 5, 3), "float32", seed).to(device)).detach() for seed in (1, 2)]
        assert layer.running_mean is not None
        assert layer.running_var is not None
        results += [layer.running_mean, layer.running_var, layer.eval()(values((7, 5), "float32").to(device)).detach()]
        return results

    compare(f("npu"), f("cpu"), tolerance=1e-5)


def divide(mode: str) -> Callable[..., Any]:
    return lambda x, y: torch.div(x, y, rounding_mode=mode)


@case("signs of quotients")
def signs() -> None:
    for dtype in ("float32", "float64", "int64", "int8"):
        kind = getattr(torch, dtype)
        x, y = torch.tensor([7, -7, 7, -7, 6, -6], dtype=kind), torch.tensor([2, 2, -2, -2, 3, -3], dtype=kind)
        for f in (divide("floor"), divide("trunc"), torch.remainder, torch.fmod, torch.floor_divide):
            compare(f(x.npu(), y.npu()), f(x, y))
            compare(f(x.npu(), -3), f(x, -3))


@case("operands of different dtypes")
def mixed() -> None:
    for a in EVERY:
        for b in EVERY:
            x, y = values((3, 4), a, 1), values((4,), b, 2)
            for f in (torch.add, torch.mul, torch.eq, torch.lt):
                compare(f(x.npu(), y.npu()), f(x, y), tolerance=8e-3 if "bfloat16" in (a, b) else 1e-3)


@case("integer arithmetic wraps")
def wraps() -> None:
    for dtype in INTEGERS:
        x = torch.full((5,), torch.iinfo(getattr(torch, dtype)).max, dtype=getattr(torch, dtype))
        compare((x.npu() + x.npu(), x.npu() * x.npu()), (x + x, x * x))


@case("a number beside halves")
def numbers() -> None:
    """CANN rounds it to the tensor's type, but for products and quotients of bfloat16, for floor and for fmod."""
    for kind in (torch.float16, torch.bfloat16):
        x = torch.tensor([33.3, 2.7, -5.1], dtype=kind)
        rounded = torch.tensor(33.3, dtype=kind)
        for f in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.add, torch.sub, torch.remainder):
            compare(f(x.npu(), 33.3), f(x.float(), rounded.float()).to(f(x, x).dtype))
        exact = rounded.float() if kind == torch.float16 else torch.tensor(33.3)
        compare((x.npu() * 33.3, x.npu() / 33.3), ((x.float() * exact).to(kind), (x.float() / exact).to(kind)), 1e-9)
        compare(torch.fmod(x.npu(), 0.1), torch.fmod(x.double(), 0.1).to(kind), 1e-9)
        compare(x.npu().div(0.1, rounding_mode="floor"), x.double().div(0.1, rounding_mode="floor").to(kind), 1e-9)
    assert bool(torch.eq(torch.tensor([33.3], dtype=torch.float16).npu(), 33.3))


@case_of("comparison and logic in place", EVERY)
def in_place(dtype: str) -> None:
    x, y = values((3, 4), dtype), values((3, 4), dtype, 1)
    for name in ("eq_", "ne_", "lt_", "le_", "gt_", "ge_"):
        compare(getattr(x.npu(), name)(y.npu()), getattr(x.clone(), name)(y))
        compare(getattr(x.npu(), name)(1), getattr(x.clone(), name)(1))
    for name in ("logical_and_", "logical_or_", "logical_xor_"):
        compare(getattr(x.npu(), name)(y.npu()), getattr(x.clone(), name)(y))
    compare(x.npu().logical_not_(), x.clone().logical_not_())


@case("a number before a tensor, and in place")
def number_first() -> None:
    def f(x: Tensor, i: Tensor) -> list[Tensor]:
        results = [2 + x, torch.tensor(2.0) + x, 2 - x, 2 / x, 7 % x, 2**x, 7 % i, 5 & i, 5 | i, 5 ^ i]
        for name in ("add_", "sub_", "mul_", "div_", "remainder_", "fmod_", "floor_divide_", "pow_", "clamp_max_"):
            results.append(getattr(x.clone(), name)(2))
        for name in ("add_", "sub_", "remainder_", "fmod_", "bitwise_and_", "bitwise_or_", "bitwise_xor_"):
            results.append(getattr(i.clone(), name)(5))
        results += [x.clone().div_(2, rounding_mode=mode) for mode in ("trunc", "floor")]
        return [*results, x.clamp_max(1), i.clone().scatter_(0, i[:2, :3] % 3, 9)]

    x, i = values((3, 4), "float32", low=0.5), values((3, 4), "int64", 1, low=0)
    compare(f(x.npu(), i.npu()), f(x, i))


@case("masked_fill of integers with a fraction")
def masked_fill() -> None:
    mask = torch.tensor([True, False, True])
    for kind in (torch.int8, torch.int32, torch.int64, torch.bool):
        filled = torch.zeros(3, dtype=kind).npu().masked_fill(mask.npu(), 1.5)
        compare(filled, torch.tensor([1, 0, 1], dtype=kind))


# ---- Along dimensions ----------------------------------------------------------------------------------------------


@case_of("NaN and infinities along a dimension", FLOATS)
def special_rows(dtype: str) -> None:
    x = values((3, 4, 5), dtype, special=True)
    for name in REDUCTIONS.split():
        for dim in (0, -1):
            both(lambda t, name=name, dim=dim: function(name)(t, dim=dim), x)  # type: ignore[misc]
    both(lambda t: (t.sum(), t.mean(), t.max(), t.min(), t.norm(), t.norm(float("inf")), t.norm(1)), x)


@case("norms")
def norms() -> None:
    x = values((3, 4, 5), "float32", special=True)[1:]
    for order in (0, 1, 2, 3, float("inf"), -float("inf")):
        both(lambda t, order=order: torch.linalg.vector_norm(t, order, dim=1), x)
    refuses("LpNormReduceV2", lambda: torch.linalg.vector_norm(x.npu(), 0.5))


@case("a million elements")
def large() -> None:
    x = values((1000, 1000), "float32", low=0)
    y, exact = x.npu(), x.double()
    compare((y.sum(), y.t().sum(0), y.mean(1)), (exact.sum().float(), exact.sum(1).float(), exact.mean(1).float()))
    compare((y.t() + 1, y.max(), y.argmax(), y.tanh()), (x.t() + 1, x.max(), x.argmax(), x.tanh()))


# ---- Products ------------------------------------------------------------------------------------------------------

PRODUCTS = ((1, 4, 64), (3, 64, 2), (5, 1, 1), (4, 0, 3), (0, 4, 3), (130, 700, 33), (2, 3, 0))


def near(got: Tensor, a: Tensor, b: Tensor, extra: Tensor | None = None) -> None:
    """The exact product a @ b, to an error that follows from the magnitude of what is summed."""
    want, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if extra is not None:
        want, scale = want + extra.double(), scale + extra.double().abs()
    assert got.device.type == "npu"
    assert (got.dtype, got.shape) == (a.dtype, want.shape)
    allowed = TOLERANCE[str(a.dtype).split(".")[1]]
    assert bool(((got.cpu().double() - want).abs() <= allowed * scale).all())


@case_of("linear", FLOATS)
def linear(dtype: str) -> None:
    for m, k, n in PRODUCTS:
        x, w, b = values((m, k), dtype, 1), values((n, k), dtype, 2), values((n,), dtype, 3)
        near(F.linear(x.npu(), w.npu(), b.npu()), x, w.t(), b)
        near(F.linear(x.npu(), w.npu()), x, w.t())


@case_of("mm", FLOATS)
def mm(dtype: str) -> None:
    for m, k, n in PRODUCTS:
        x, y = values((m, k), dtype, 1), values((k, n), dtype, 2)
        near(torch.mm(x.npu(), y.npu()), x, y)
        near(torch.mm(y.npu().t(), x.npu().t()), y.t(), x.t())
        near(torch.mm(x.npu()[::2], y.npu()[:, ::2]), x[::2], y[:, ::2])


@case("addmm")
def addmm() -> None:
    x, y, c = values((3, 4), "float32", 1), values((4, 5), "float32", 2), values((3, 1), "float32", 3)
    compare(torch.addmm(c.npu(), x.npu(), y.npu(), beta=0.5, alpha=2), torch.addmm(c, x, y, beta=0.5, alpha=2))
    nan = torch.full((5,), math.nan)
    compare(torch.addmm(nan.npu(), x.npu(), y.npu(), beta=0), torch.addmm(nan, x, y, beta=0))


@case("a row has the same bits alone and in a batch")
def rows() -> None:
    x, w, b = (values(shape, "float32", seed).npu() for seed, shape in enumerate(((63, 300), (70, 300), (70,))))
    batch = F.linear(x, w, b).cpu()
    for i in range(63):
        assert torch.equal(F.linear(x[i : i + 1], w, b).cpu()[0], batch[i])


@case("NaN in a product")
def nan_product() -> None:
    x, y = values((3, 4), "float32", special=True), values((4, 2), "float32", 1)
    compare(x.npu() @ y.npu(), x @ y)


# ---- Lists of tensors ----------------------------------------------------------------------------------------------


@case("lists of tensors")
def lists() -> None:
    def f(device: str, dtype: str) -> list[Tensor]:
        shapes = ((3, 4), (7,), (), (0,))
        a, b, c = ([values(shape, dtype, seed, low=1).to(device) for shape in shapes] for seed in (1, 2, 3))
        results = [*torch._foreach_add(a, 1.5), *torch._foreach_mul(a, 0.3), *torch._foreach_sqrt(a)]
        results += [*torch._foreach_addcmul(a, b, c, 0.7), *torch._foreach_addcdiv(a, b, c, 0.7)]
        results += [*torch._foreach_lerp(a, b, 0.2), *torch._foreach_lerp(a, b, 0.8)]
        results += [*torch._foreach_norm(a, 2), *torch._foreach_norm(a, 1)]
        results += torch._foreach_div(a, [2.0, 3.0, 4.0, 5.0])
        results += torch._foreach_addcdiv(a, b, c, torch.tensor([2.0, 3.0, 4.0, 5.0]))
        torch._foreach_add_(a, 2.5)
        return [*results, *a]

    for dtype in FLOATS:
        compare(f("npu", dtype), f("cpu", dtype), 2e-2 if dtype == "bfloat16" else None)
    whole = [torch.tensor([1, 2], dtype=torch.int32)] * 2
    compare(torch._foreach_mul([x.npu() for x in whole], 3), torch._foreach_mul(whole, 3))


@case("a training step")
def training() -> None:
    def f(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)]
        net = torch.nn.Sequential(*layers).to(device)
        steps = torch.optim.Adam(net.parameters(), lr=0.01)
        for seed in range(5):
            loss = F.mse_loss(net(values((9, 4), "float32", seed).to(device)), torch.ones(9, 1, device=device))
            steps.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            steps.step()
        return [parameter.detach() for parameter in net.parameters()]

    compare(f("npu"), f("cpu"))


# ---- Make, move, select --------------------------------------------------------------------------------------------


@case_of("host to device and back", EVERY)
def round_trip(dtype: str) -> None:
    for shape in SHAPES:
        x = values(shape, dtype, special=True)
        y = x.npu().cpu()
        assert y.dtype == x.dtype
        assert torch.equal(y.contiguous().view(torch.uint8) if shape else y, x.view(torch.uint8) if shape else x) or (
            not shape and bool(x.isnan())
        )


@case_of("cast", EVERY)
def cast(dtype: str) -> None:
    x = values((5, 9), dtype, low=0)
    x[0] = 0
    for to in EVERY:
        kind = getattr(torch, to)
        both(lambda t, kind=kind: torch.zeros(t.shape, dtype=kind, device=t.device).copy_(t), x)
        # torch_npu has .to make float32 of what should become float64 on the device; it warns about it.
        kind = torch.float32 if to == "float64" and dtype != "float64" else kind
        both(lambda t, kind=kind: t.to(kind), x)


@case("halves round to nearest")
def halves() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for kind in (torch.float16, torch.bfloat16):
        every = bits.view(kind)
        compare(every.npu().float(), every.float())
        finite = every.float()[every.isfinite()]
        above = torch.nextafter(finite, torch.tensor(math.inf))
        between = torch.cat([above, finite * 1.0005, finite * (1 + 2**-9), finite * (1 + 2**-12)])
        compare(between.npu().to(kind), between.to(kind), tolerance=1e-30)


@case("make from Python and NumPy")
def make_more() -> None:
    compare(torch.arange(1, 2, 0.125, device="npu"), torch.arange(1, 2, 0.125))
    compare(torch.as_tensor(numpy.arange(3.0), device="npu"), torch.arange(3.0, dtype=torch.float64))


@case_of("write through a view", EVERY)
def views(dtype: str) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        x[:, 1::2] = y[:, :2]
        x[0] = 1
        x.t()[0].fill_(0)
        x[2].zero_()
        return x

    x, y = values((3, 4), dtype), values((3, 4), dtype, 1)
    compare(f(x.npu(), y.npu()), f(x, y))


@case("scatter")
def scatter() -> None:
    index = torch.tensor([[0, 1, 1], [2, 0, 0]])
    for dtype in EVERY:
        x, y = values((4, 3), dtype), values((2, 3), dtype, 1)
        compare(x.npu().scatter(0, index.npu(), y.npu()), x.scatter(0, index, y))
        compare(x.npu().scatter(1, index.npu(), 1), x.scatter(1, index, 1))
        compare(x.npu().t().scatter_add(1, index.t().npu(), y.t().npu()), x.t().scatter_add(1, index.t(), y.t()))


@case("the nonzero elements of a scalar")
def nonzero() -> None:
    for number in (0.0, 3.0):
        x = torch.tensor(number)
        compare((x.npu().nonzero(), torch.argwhere(x.npu())), (x.nonzero(), torch.argwhere(x)))


@case("a change of format")
def formats() -> None:
    x = values((2, 3, 4, 5), "float32")
    compare(torch_npu.npu_format_cast(x.npu(), 3), x)
    compare(torch_npu.npu_format_cast(x.npu().half()[0, 0], 29), x.half()[0, 0])


@case("print")
def show() -> None:
    numbers = (values((3, 4), "float32", special=True), torch.zeros(0), torch.tensor(1.5))
    for x in (*numbers, torch.arange(5), torch.tensor([True, False])):
        assert str(x.npu()).replace(", device='npu:0'", "") == str(x)


@case("draw")
def draw() -> None:
    def sample(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        mean, std = torch.zeros(300, 100, device="npu"), torch.full((100,), 2.0, device="npu")
        return [
            torch.randn(300, 100, device="npu"),
            torch.normal(mean, 1.0),
            torch.normal(0.0, std.expand(300, 100)) / 2,
            torch.distributions.Normal(mean, std).rsample() / 2,
            torch.rand(300, 100, device="npu") * 12**0.5 - 3**0.5,
            torch.bernoulli(torch.full((300, 100), 0.5, device="npu")) * 2 - 1,
            torch.multinomial(torch.ones(300, 2, device="npu"), 100, replacement=True) * 2.0 - 1,
        ]

    for a, b, c in zip(sample(1), sample(1), sample(2), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert abs(a.cpu().mean()) < 0.03
        assert abs(a.cpu().std() - 1) < 0.03


# ---- What is refused, through torch_npu ----------------------------------------------------------------------------


def refuses(message: str, f: Callable[[], Any]) -> None:
    error = "no error"
    try:
        f()
        torch.npu.synchronize()
    except RuntimeError as caught:
        error = str(caught)
    assert message in error, error


@case("an operator that is not simulated is an error that names it")
def missing() -> None:
    x = torch.ones(3, 3, device="npu")
    refuses("Sinh", lambda: torch.sinh(x))
    refuses("special_bessel_j0", lambda: torch.special.bessel_j0(x))  # torch_npu would compute it on the CPU
    compare(x + 1, torch.ones(3, 3) + 1)


@case("no activation and no product of float64")
def double() -> None:
    x = torch.ones(3, 3, dtype=torch.float64, device="npu")
    refuses("aclnnMatmul", lambda: x @ x)
    refuses("aclnnRelu", lambda: x.relu())
    compare(x + x, torch.ones(3, 3, dtype=torch.float64) * 2)


# ---- What is refused, through the C interface ----------------------------------------------------------------------

FLOAT, FLOAT16, INT32, INT16, INT64, DOUBLE, BOOL = 0, 1, 3, 6, 9, 11, 12  # aclDataType
ND, FRACTAL_NZ = 2, 29  # aclFormat
NULL_ARGUMENT, INVALID_ARGUMENT, DEVICE_ERROR = 161001, 161002, 507015


class Acl:
    """Calls libopapi as torch_npu does, but with arguments that it would never pass."""

    def __init__(self) -> None:
        self.op, self.rt = ctypes.CDLL("libopapi.so"), ctypes.CDLL("libascendcl.so")
        for create in ("Tensor", "Scalar", "IntArray", "TensorList"):
            getattr(self.op, f"aclCreate{create}").restype = ctypes.c_void_p
        self.rt.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.memory = torch.zeros(64, device="npu")  # what the tensors below are views of
        torch.npu.synchronize()

    def tensor(self, *shape: int, **given: Any) -> ctypes.c_void_p:
        strides = given.get("strides") or [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        dims, steps = (ctypes.c_int64 * len(shape))(*shape), (ctypes.c_int64 * len(shape))(*strides)
        address = given.get("address", self.memory.data_ptr())
        handle = self.op.aclCreateTensor(
            dims,
            ctypes.c_uint64(len(shape)),
            given.get("dtype", FLOAT),
            steps,
            ctypes.c_int64(given.get("offset", 0)),
            given.get("format", ND),
            (ctypes.c_int64 * 1)(given.get("storage", 32)),
            ctypes.c_uint64(1),
            ctypes.c_void_p(address),
        )
        return ctypes.c_void_p(handle)

    def scalar(self, number: float) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.op.aclCreateScalar(ctypes.byref(ctypes.c_float(number)), FLOAT))

    def dims(self, *values: int) -> ctypes.c_void_p:
        array = (ctypes.c_int64 * len(values))(*values)
        return ctypes.c_void_p(self.op.aclCreateIntArray(array, ctypes.c_uint64(len(values))))

    def list(self, *tensors: ctypes.c_void_p) -> ctypes.c_void_p:
        array = (ctypes.c_void_p * len(tensors))(*(tensor.value for tensor in tensors))
        return ctypes.c_void_p(self.op.aclCreateTensorList(array, ctypes.c_uint64(len(tensors))))

    def message(self) -> str:
        return (self.rt.aclGetRecentErrMsg() or b"").decode()

    def plan(self, name: str, *arguments: Any) -> tuple[int, ctypes.c_void_p]:
        executor = ctypes.c_void_p()
        size = ctypes.c_uint64()
        code = self.op[f"{name}GetWorkspaceSize"](*arguments, ctypes.byref(size), ctypes.byref(executor))
        return code, executor

    def refused(self, code: int, words: str, name: str, *arguments: Any) -> None:
        got, executor = self.plan(name, *arguments)
        text = self.message()
        assert got == code, f"{got} instead of {code}: {text}"
        assert not executor
        assert f"{name}GetWorkspaceSize: {words}" in text, text

    def run(self, name: str, *arguments: Any) -> tuple[int, int]:
        """The code of the launch and that of the synchronisation, on a stream of its own."""
        code, executor = self.plan(name, *arguments)
        assert code == 0, self.message()
        stream = ctypes.c_void_p()
        assert self.rt.aclrtCreateStream(ctypes.byref(stream)) == 0
        workspace = torch.empty(1024, dtype=torch.uint8, device="npu")
        launched = self.op[name](ctypes.c_void_p(workspace.data_ptr()), ctypes.c_uint64(1024), executor, stream)
        synchronised = self.rt.aclrtSynchronizeStream(stream)
        self.rt.aclrtDestroyStreamForce(stream)
        return launched, synchronised


@case("a launch without its workspace")
def workspace() -> None:
    acl = Acl()
    host = (ctypes.c_char * 1024)()
    for address, size in ((None, 0), (None, 1024), (ctypes.addressof(host), 1024), (acl.memory.data_ptr(), 16)):
        code, executor = acl.plan("aclnnRelu", acl.tensor(2), acl.tensor(2))
        assert code == 0
        assert acl.op.aclnnRelu(ctypes.c_void_p(address), ctypes.c_uint64(size), executor, None) == 161002
        assert "aclnnRelu: the workspace is not the device memory asked for" in acl.message()


@case("null arguments")
def null() -> None:
    acl = Acl()
    acl.refused(NULL_ARGUMENT, "self is null", "aclnnRelu", None, acl.tensor(2))
    acl.refused(NULL_ARGUMENT, "out is null", "aclnnRelu", acl.tensor(2), None)
    acl.refused(NULL_ARGUMENT, "other is null", "aclnnMul", acl.tensor(2), None, acl.tensor(2))
    acl.refused(NULL_ARGUMENT, "alpha is null", "aclnnAdd", acl.tensor(2), acl.tensor(2), None, acl.tensor(2))
    acl.refused(NULL_ARGUMENT, "dim is null", "aclnnLogSumExp", acl.tensor(2), None, False, acl.tensor())
    acl.refused(NULL_ARGUMENT, "tensors is null", "aclnnCat", None, ctypes.c_int64(0), acl.tensor(2))
    assert acl.op.aclnnReluGetWorkspaceSize(acl.tensor(2), acl.tensor(2), None, None) == NULL_ARGUMENT
    assert "workspaceSize is null" in acl.message()
    assert acl.op.aclnnRelu(None, ctypes.c_uint64(0), None, None) == NULL_ARGUMENT
    assert "aclnnRelu: executor is null" in acl.message()


@case("exact GELU, which torch_npu calls in its compatible mode")
def exact_gelu() -> None:
    acl = Acl()
    acl.memory[:8] = torch.linspace(-3, 3, 8).npu()
    torch.npu.synchronize()
    for mode, approximate in enumerate(("none", "tanh")):
        assert acl.run("aclnnGeluV2", acl.tensor(8), ctypes.c_int64(mode), acl.tensor(8, offset=8)) == (0, 0)
        compare(acl.memory[8:16], F.gelu(torch.linspace(-3, 3, 8), approximate=approximate))
    acl.refused(INVALID_ARGUMENT, "approximate: 2", "aclnnGeluV2", acl.tensor(8), ctypes.c_int64(2), acl.tensor(8))


@case("wrong dtypes")
def wrong_dtypes() -> None:
    acl, x = Acl(), Acl().tensor(2)
    double, flag, whole, short, half = (acl.tensor(2, dtype=dtype) for dtype in (DOUBLE, BOOL, INT64, INT16, FLOAT16))
    acl.refused(INVALID_ARGUMENT, "self: dtype DOUBLE", "aclnnRelu", double, double)
    acl.refused(INVALID_ARGUMENT, "out: dtype INT64, expected FLOAT", "aclnnRelu", x, whole)
    acl.refused(INVALID_ARGUMENT, "out: a result of dtype FLOAT", "aclnnMul", x, x, whole)
    acl.refused(INVALID_ARGUMENT, "out: a result of dtype FLOAT", "aclnnExp", whole, whole)
    acl.refused(INVALID_ARGUMENT, "out: dtype FLOAT", "aclnnIsFinite", x, x)
    acl.refused(INVALID_ARGUMENT, "self: dtype INT16", "aclnnInplaceMaskedFillScalar", short, flag, acl.scalar(1))
    acl.refused(INVALID_ARGUMENT, "self: dtype DOUBLE", "aclnnMish", double, double)
    acl.refused(INVALID_ARGUMENT, "output: dtype FLOAT, expected DOUBLE", "aclnnTanhBackward", double, x, double)
    acl.refused(INVALID_ARGUMENT, "x: dtype INT64", "aclnnForeachSqrt", acl.list(whole), acl.list(whole))
    mixed = acl.list(x, half)
    acl.refused(INVALID_ARGUMENT, "x: dtype FLOAT16, expected FLOAT", "aclnnForeachSqrt", mixed, mixed)
    acl.refused(INVALID_ARGUMENT, "self: dtype BOOL", "aclnnSub", flag, x, acl.scalar(1), x)
    acl.refused(INVALID_ARGUMENT, "self: dtype FLOAT", "aclnnBitwiseAndTensor", x, x, x)
    acl.refused(INVALID_ARGUMENT, "out: dtype FLOAT", "aclnnArgMax", x, ctypes.c_int64(0), False, acl.tensor())
    acl.refused(INVALID_ARGUMENT, "out: dtype FLOAT, expected INT64", "aclnnCast", x, INT64, x)
    acl.refused(INVALID_ARGUMENT, "index: dtype FLOAT", "aclnnGather", x, ctypes.c_int64(0), x, x)
    acl.refused(INVALID_ARGUMENT, "self: dtype COMPLEX64", "aclnnRelu", acl.tensor(2, dtype=16), x)
    acl.refused(INVALID_ARGUMENT, "self: format 29", "aclnnRelu", acl.tensor(2, format=FRACTAL_NZ), x)


@case("wrong shapes")
def wrong_shapes() -> None:
    acl = Acl()
    x, row, matrix = acl.tensor(3), acl.tensor(4), acl.tensor(3, 4)
    dim = ctypes.c_int64
    acl.refused(INVALID_ARGUMENT, "out: shape [4], expected [3]", "aclnnRelu", x, row)
    acl.refused(INVALID_ARGUMENT, "shapes [3] and [4] do not broadcast", "aclnnMul", x, row, x)
    acl.refused(INVALID_ARGUMENT, "out: shape [4], expected [3, 4]", "aclnnMul", matrix, row, row)
    acl.refused(INVALID_ARGUMENT, "src: shape [3, 4] does not broadcast", "aclnnInplaceCopy", row, matrix)
    acl.refused(INVALID_ARGUMENT, "dim: 2 is outside", "aclnnSoftmax", matrix, dim(2), matrix)
    acl.refused(INVALID_ARGUMENT, "dim: -1 appears twice", "aclnnLogSumExp", matrix, acl.dims(1, -1), False, x)
    acl.refused(INVALID_ARGUMENT, "out: shape [4], expected [3]", "aclnnLogSumExp", matrix, acl.dims(1), False, row)
    acl.refused(INVALID_ARGUMENT, "shapes [3, 4] and [3, 4] cannot", "aclnnMm", matrix, matrix, acl.tensor(3, 3), 0)
    acl.refused(INVALID_ARGUMENT, "self: shape [3], expected two", "aclnnMm", x, matrix, row, 0)
    acl.refused(INVALID_ARGUMENT, "self: more than 8", "aclnnRelu", acl.tensor(*[1] * 9), acl.tensor(*[1] * 9))
    square, numbers = acl.tensor(4, 4), (acl.scalar(1), acl.scalar(1))
    words = "self: shape [3] does not broadcast to [3, 4]"
    acl.refused(INVALID_ARGUMENT, words, "aclnnAddmm", x, matrix, square, *numbers, matrix, 0)
    none, mean = dim(0), dim(1)
    acl.refused(INVALID_ARGUMENT, "out: shape [3], expected []", "aclnnMseLoss", x, x, mean, x)
    acl.refused(INVALID_ARGUMENT, "out: shape [], expected [3]", "aclnnMseLoss", x, x, none, acl.tensor())
    acl.refused(INVALID_ARGUMENT, "reduction: 3", "aclnnMseLoss", x, x, dim(3), x)
    acl.refused(INVALID_ARGUMENT, "out: shape [4], expected [3]", "aclnnForeachSqrt", acl.list(x), acl.list(row))
    acl.refused(INVALID_ARGUMENT, "out: 1 tensors, expected 2", "aclnnForeachSqrt", acl.list(x, x), acl.list(x))
    index = acl.tensor(3, 4, dtype=INT64, storage=12)
    acl.refused(INVALID_ARGUMENT, "src: of another rank", "aclnnScatterAdd", matrix, dim(0), index, x, matrix)
    tall = acl.tensor(4, 4, dtype=INT64, storage=16)
    words = "index: shape [4, 4] exceeds [3, 4]"
    acl.refused(INVALID_ARGUMENT, words, "aclnnScatterAdd", matrix, dim(0), tall, matrix, matrix)


@case("views outside of their storage")
def wrong_views() -> None:
    acl = Acl()
    acl.refused(INVALID_ARGUMENT, "self: view of shape [33]", "aclnnRelu", acl.tensor(33), acl.tensor(33))
    acl.refused(INVALID_ARGUMENT, "self: view of shape [2]", "aclnnRelu", acl.tensor(2, offset=31), acl.tensor(2))
    acl.refused(INVALID_ARGUMENT, "self: view of shape [2]", "aclnnRelu", acl.tensor(2, strides=[32]), acl.tensor(2))
    acl.refused(INVALID_ARGUMENT, "self: no device memory", "aclnnRelu", acl.tensor(2, address=0), acl.tensor(2))
    assert not acl.tensor(2, strides=[-1])
    assert "aclCreateTensor: negative stride" in acl.message()


@case("handles that are used up")
def stale() -> None:
    acl = Acl()
    x = acl.tensor(2)
    assert acl.op.aclDestroyTensor(x) == 0
    assert acl.op.aclDestroyTensor(x) == INVALID_ARGUMENT
    code, executor = acl.plan("aclnnRelu", acl.tensor(2), acl.tensor(2))
    assert code == 0
    assert acl.op.aclnnTanh(None, ctypes.c_uint64(0), executor, None) == INVALID_ARGUMENT
    assert "aclnnTanh: executor is one of aclnnRelu" in acl.message()


@case("faults of the device")
def faults() -> None:
    acl = Acl()
    host = (ctypes.c_float * 32)()
    on_host = acl.tensor(2, address=ctypes.addressof(host))
    assert acl.run("aclnnRelu", acl.tensor(2), acl.tensor(2)) == (0, 0)
    assert acl.run("aclnnRelu", on_host, acl.tensor(2)) == (0, DEVICE_ERROR)
    assert "aclnnRelu: a tensor of shape [2] and dtype FLOAT is outside of allocated device memory" in acl.message()
    assert acl.run("aclnnRelu", acl.tensor(2), on_host) == (0, DEVICE_ERROR)
    five = torch.tensor([5], device="npu")
    index = acl.tensor(1, dtype=INT64, address=five.data_ptr(), storage=1)
    assert acl.run("aclnnGather", acl.tensor(2), ctypes.c_int64(0), index, acl.tensor(1)) == (0, DEVICE_ERROR)
    assert "aclnnGather: index 5 is out of bounds for a dimension of size 2" in acl.message()
    zeros = acl.tensor(2, dtype=INT32)
    assert acl.run("aclnnFloorDivide", zeros, zeros, zeros) == (0, DEVICE_ERROR)
    assert "aclnnFloorDivide: integer division by zero" in acl.message()
    assert acl.run("aclnnRelu", acl.tensor(2), acl.tensor(2)) == (0, 0)


@case("an index out of bounds")  # the last, because the default stream remembers the fault
def bounds() -> None:
    x = torch.ones(3, device="npu")
    refuses("507015", lambda: x[torch.tensor([3], device="npu")].cpu())


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]))
