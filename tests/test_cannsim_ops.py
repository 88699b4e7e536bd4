"""The operators of the simulated NPU against PyTorch on the CPU, and how they refuse what they do not do.

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
    import torch_npu  # noqa: F401
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


def function(name: str) -> Callable[..., Any]:
    return getattr(torch, name, None) or getattr(F, name)  # type: ignore[no-any-return]


# ---- Element by element --------------------------------------------------------------------------------------------


def unary(name: str, dtypes: Iterable[str], f: Callable[..., Any] | None = None, special: bool = True) -> None:
    @case_of(name, dtypes)
    def run(dtype: str) -> None:
        for shape in SHAPES:
            both(f or function(name), values(shape, dtype, special=special))


for name in ("tanh", "sigmoid", "expm1", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "erf", "square"):
    unary(name, REALS)
for name in ("ceil", "floor", "round", "trunc", "isnan", "isinf"):
    unary(name, REALS)
for name in ("elu", "leaky_relu", "silu", "softplus", "hardtanh"):
    unary(name, FLOATS)
# Gelu of CANN is the approximation by tanh, whatever is asked for. (Of -inf even PyTorch makes 0 or NaN, as the length of
# the tensor is.)
unary("gelu", FLOATS, lambda x: F.gelu(x, approximate="tanh" if x.device.type == "cpu" else "none"), special=False)
unary("elu scaled", FLOATS, lambda x: F.elu(x, alpha=0.5))
unary("relu", (*FLOATS, "int32", "int64"))
unary("exp", (*REALS, "int64"))
unary("log", (*REALS, "int32"))
unary("atanh", ("float32",))
unary("neg", (*REALS, "int8", "int32", "int64"))
unary("abs", (*REALS, *INTEGERS))
unary("isfinite", (*REALS, "int64"))
unary("logical_not", EVERY)
unary("bitwise_not", (*INTEGERS, "bool"))
unary("cubed", REALS, lambda x: x**3)
unary("power of two", ("float32", "float64"), lambda x: 2**x)
unary("one minus", REALS, lambda x: 1 - x)
unary("clamp", (*REALS, "int32", "int64"), lambda x: x.clamp(-1, 2))
unary("clamp min", (*REALS, "int64"), lambda x: x.clamp(min=1))
unary("clamp max", (*REALS, "int64"), lambda x: x.clamp(max=1))


def binary(
    name: str,
    dtypes: Iterable[str],
    f: Callable[..., Any] | None = None,
    count: int = 2,
    special: bool = True,
    low: float = -3,
    scalar: bool = True,
) -> None:
    """`count` tensors that broadcast, and a tensor and a number."""
    shapes = [((3, 4),) * count, ((3, 1), (4,), (2, 3, 4))[:count], ((0, 2),) * count]
    if count == 2:
        shapes += [((), (3, 4)), ((7,), ()), ((0,), (1,)), ((2, 1, 5), (3, 1))]

    @case_of(name, dtypes)
    def run(dtype: str) -> None:
        g = f or function(name)
        for chosen in shapes:
            inputs = [values(shape, dtype, seed, special, low) for seed, shape in enumerate(chosen)]
            compare(g(*(x.npu() for x in inputs)), g(*inputs))
        both(g, *(values((600, 9), dtype, seed, special, low) for seed in range(count)))
        if scalar:
            x = values((3, 4), dtype, special=special, low=low)
            for number in (2, 1.5) if dtype in REALS else (2,):
                compare(g(x.npu(), number), g(x, number))


def divide(mode: str) -> Callable[..., Any]:
    return lambda x, y: torch.div(x, y, rounding_mode=mode)


binary("add", (*REALS, *INTEGERS))
binary("add", ("bool",), scalar=False)
binary("add alpha", ("float32", "int64"), lambda x, y: torch.add(x, y, alpha=3))
binary("sub", (*REALS, *INTEGERS))
binary("mul", EVERY)
for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    binary(name, EVERY)
binary("pow", ("float32", "float64"))
binary("div", (*REALS, *INTEGERS), low=1, special=False)
for name, f in (("div floor", divide("floor")), ("div trunc", divide("trunc")), ("remainder", None), ("fmod", None)):
    binary(name, ("float32", "int64", "int8", "uint8"), f, low=1, special=False)
for name in ("maximum", "minimum"):
    binary(name, (*REALS, *INTEGERS), scalar=False)
for name in ("logical_and", "logical_or", "logical_xor"):
    binary(name, EVERY, scalar=False)
for name in ("bitwise_and", "bitwise_or"):
    binary(name, INTEGERS)
    binary(name, ("bool",), scalar=False)
binary("clamp tensors", (*REALS, "int64"), lambda x, y, z: torch.clamp(x, y, z), 3, scalar=False)
binary("where", EVERY, lambda x, y: torch.where(x > 1, x, y), scalar=False)
binary("isclose", ("float32", "int64"), scalar=False)
binary("isclose nan", ("float32",), lambda x, y: torch.isclose(x, y, rtol=0.1, atol=0.5, equal_nan=True), scalar=False)
binary("in place", ("float32", "int64"), lambda x, y: (x + y).add_(x).mul_(y).sub_(2).add_(1).clamp_(-5, 5))
binary("masked_fill", EVERY, lambda x, y: (x + y).masked_fill(y > 1, 1), scalar=False)


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


@case("binary_cross_entropy_with_logits")
def cross_entropy() -> None:
    for shape in SHAPES:
        logits, labels = values(shape, "float32"), values(shape, "float32", 1).sigmoid()
        both(lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"), logits, labels)


@case("integer arithmetic wraps")
def wraps() -> None:
    for dtype in INTEGERS:
        x = torch.full((5,), torch.iinfo(getattr(torch, dtype)).max, dtype=getattr(torch, dtype))
        compare((x.npu() + x.npu(), x.npu() * x.npu()), (x + x, x * x))


# ---- Along dimensions ----------------------------------------------------------------------------------------------

ROWS = ((2,), (7,), (3, 4), (2, 3, 5), (600, 9))


def reduction(
    name: str,
    dtypes: Iterable[str],
    f: Callable[..., Any] | None = None,
    dims: Iterable[Any] = ((), 0, -1, (0, -1)),
    special: bool = False,
) -> None:
    @case_of(name, dtypes)
    def run(dtype: str) -> None:
        g = f or function(name)
        for shape in ROWS:
            for dim in dims:
                if isinstance(dim, tuple) and len(dim) > len(shape):
                    continue
                for keepdim in (False, True):
                    # Sums of positive numbers: after cancellation a relative error would say nothing.
                    for x in (values(shape, dtype, special=special, low=0.1), values(shape, dtype, low=0.1)):
                        both(lambda x, dim=dim, keepdim=keepdim: g(x, dim=dim, keepdim=keepdim), x)


def along(name: str, dtypes: Iterable[str]) -> None:
    reduction(name, dtypes, lambda x, dim, keepdim: function(name)(x, dim=dim), (0, -1))


reduction("sum", (*REALS, *INTEGERS, "bool"))
reduction("sum to float64", ("float32",), lambda x, **at: torch.sum(x, dtype=torch.float64, **at))
reduction("mean", REALS)
reduction("var", REALS, dims=(0, -1))
reduction("std", REALS, lambda x, **at: torch.std(x, correction=0, **at), dims=(0, -1))
reduction("logsumexp", [dtype for dtype in REALS if dtype != "float64"], dims=(0, -1, (0, -1)), special=True)
for name in ("amax", "amin"):
    reduction(name, (*REALS, "int64"), special=True)
for name in ("max", "min", "argmax", "argmin"):
    reduction(name, (*REALS, "int64"), dims=(0, -1), special=True)
for name in ("all", "any"):
    reduction(name, EVERY, dims=(0, -1))
along("softmax", REALS)
along("log_softmax", REALS)
along("cumsum", ("float32", "float64", "int64", "bool"))


@case_of("whole tensors", REALS)
def whole(dtype: str) -> None:
    for shape in (*ROWS, ()):
        for f in (torch.sum, torch.max, torch.min, torch.all, torch.any, torch.argmax):
            both(lambda x, f=f: f(x) if x.numel() else x, values(shape, dtype, low=0.5))


@case_of("prod", ("float32", "float64", "int64"))
def prod(dtype: str) -> None:
    for shape in ROWS[:4]:
        both(lambda x: (x.prod(), x.prod(-1), x.prod(0, keepdim=True)), values(shape, dtype))


@case("nothing to reduce")
def empty() -> None:
    for shape in ((0,), (3, 0), (0, 3)):
        x = torch.empty(shape)
        for f in (torch.sum, torch.all, torch.any, torch.mean, torch.prod):
            compare(f(x.npu()), f(x))
        compare((x.npu().sum(-1), x.npu().logsumexp(-1)), (x.sum(-1), x.logsumexp(-1)))


@case("a million elements")
def large() -> None:
    x = values((1000, 1000), "float32", low=0)
    y, exact = x.npu(), x.double()
    compare((y.sum(), y.t().sum(0), y.mean(1)), (exact.sum().float(), exact.sum(1).float(), exact.mean(1).float()))
    compare((y.t() + 1, y.max(), y.argmax(), y.tanh()), (x.t() + 1, x.max(), x.argmax(), x.tanh()))


@case("equal")
def equal() -> None:
    x = values((3, 4), "float32").npu()
    assert torch.equal(x, x.clone())
    assert torch.equal(x.t(), x.t().contiguous())
    assert not torch.equal(x, x + 1)
    assert not torch.equal(x, x[:2])
    assert not torch.equal(x * math.nan, x * math.nan)


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


@case_of("matmul", FLOATS)
def matmul(dtype: str) -> None:
    vectors = (((4,), (4,)), ((3, 4), (4,)), ((4,), (4, 5)))
    batches = (((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2)))
    for a, b in vectors + batches:
        x, y = values(a, dtype, 1), values(b, dtype, 2)
        near(torch.matmul(x.npu(), y.npu()), x, y)
    x, y = values((3, 1, 8), dtype, 1), values((3, 8, 2), dtype, 2)
    near(torch.bmm(x.npu(), y.npu()), x, y)


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


@case_of("copies", EVERY)
def copies(dtype: str) -> None:
    both(lambda x: x.contiguous(), values((2, 3, 4), dtype))
    both(lambda x: x.clone(), values((600, 9), dtype))
    both(lambda x: x.flatten(), values((2, 3, 4), dtype))
    both(lambda x: x.repeat(2, *[3] * x.dim()), values((2, 3), dtype))


@case_of("make", EVERY)
def make(dtype: str) -> None:
    def f(device: str) -> list[Tensor]:
        at: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
        made = [torch.zeros(3, 2, **at), torch.ones(3, 2, **at), torch.full((3,), 7, **at), torch.tensor([1, 0], **at)]
        made.append(torch.empty(2, 0, **at))
        return made if dtype == "bool" else [*made, torch.arange(7, **at), torch.arange(9, 3, -2, **at)]

    compare(f("npu"), f("cpu"))


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


@case_of("cat and stack", EVERY)
def join(dtype: str) -> None:
    x, y = values((3, 4), dtype), values((3, 4), dtype, 1)
    for dim in (0, 1, -1):
        both(lambda a, b, dim=dim: torch.cat([a, b, a], dim=dim), x, y)
        both(lambda a, b, dim=dim: torch.stack([a, b], dim=dim), x, y)
    both(lambda a, b: torch.cat([a[..., :2], b], dim=-1), x, y)
    compare(torch.cat([x.npu(), torch.ones(3, 1).npu()], 1), torch.cat([x, torch.ones(3, 1)], 1))
    compare(torch.stack([x.npu()[0, 0], y.npu()[0, 0]]), torch.stack([x[0, 0], y[0, 0]]))


@case("split, chunk and unbind")
def split() -> None:
    both(lambda x: torch.split(x, [1, 2, x.size(1) - 3], dim=1), values((4, 6, 8), "float32"))
    both(lambda x: [part.contiguous() for part in x.chunk(2)], values((4, 6), "int64"))
    both(lambda x: torch.unbind(x, 0), values((4, 6), "float32"))


@case_of("select by index", EVERY)
def select(dtype: str) -> None:
    def f(x: Tensor) -> list[Tensor]:
        index, row = torch.tensor([[3, 0], [-1, 2]], device=x.device), torch.tensor([4, 0, 2], device=x.device)
        transposed = x.transpose(0, 1)
        selected = [x[index], x[:, row], x[:, row, row], x[row % 4, :, row], x.index_select(2, row)]
        selected += [x[x > 1], x[x[:, 0, 0] > 1], torch.masked_select(x, x[0] > 1), transposed.nonzero()]
        for dim in (0, 1, 2):
            at = (torch.arange(24, device=x.device) % 4).reshape(2, 3, 4)
            selected += [x.gather(dim, at), transposed.gather(dim, at)]
        return selected

    x = values((4, 5, 6), dtype)
    compare(f(x.npu()), f(x))


@case("one_hot")
def one_hot() -> None:
    x = torch.tensor([[0, 3], [2, 1]])
    compare((F.one_hot(x.npu(), 5), F.one_hot(x.npu())), (F.one_hot(x, 5), F.one_hot(x)))


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

FLOAT, INT32, INT64, DOUBLE, BOOL, ND, FRACTAL_NZ = 0, 3, 9, 11, 12, 2, 29  # aclDataType, aclFormat
NULL_ARGUMENT, INVALID_ARGUMENT, DEVICE_ERROR = 161001, 161002, 507015


class Acl:
    """Calls libopapi as torch_npu does, but with arguments that it would never pass."""

    def __init__(self) -> None:
        self.op, self.rt = ctypes.CDLL("libopapi.so"), ctypes.CDLL("libascendcl.so")
        for create in (self.op.aclCreateTensor, self.op.aclCreateScalar, self.op.aclCreateIntArray):
            create.restype = ctypes.c_void_p
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


@case("wrong dtypes")
def wrong_dtypes() -> None:
    acl, x = Acl(), Acl().tensor(2)
    double, flag, whole = (acl.tensor(2, dtype=dtype) for dtype in (DOUBLE, BOOL, INT64))
    acl.refused(INVALID_ARGUMENT, "self: dtype DOUBLE", "aclnnRelu", double, double)
    acl.refused(INVALID_ARGUMENT, "out: dtype INT64, expected FLOAT", "aclnnRelu", x, whole)
    acl.refused(INVALID_ARGUMENT, "out: a result of dtype FLOAT", "aclnnMul", x, x, whole)
    acl.refused(INVALID_ARGUMENT, "out: a result of dtype FLOAT", "aclnnExp", whole, whole)
    acl.refused(INVALID_ARGUMENT, "out: dtype FLOAT", "aclnnEqTensor", x, x, x)
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
