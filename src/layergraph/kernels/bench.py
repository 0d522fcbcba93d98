"""``layergraph bench kernels``: time an op beside its baselines and beside a floor measured in the same run.

The floor of an op is the time a plain copy takes that moves as many bytes as the op must: each input read once, each
result written once. Everything is timed in turns, so that a machine that slows down slows all of it. An op whose
numbers are wrong is not timed. Baselines are the references that the tests use.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
import torch
from torch import Tensor

from layergraph.errors import InputError, PromiseError
from layergraph.kernels import bench_report, ops

OPS = {"shadow_inject": ops.INJECT, "shadow_update": ops.UPDATE, "shadow_update_inject": ops.UPDATE_INJECT}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: What can be timed: the op called by itself (kernels on a GPU), the plain-torch reference, ``torch.compile`` of that
#: reference, and the op in an AOTInductor package.
VARIANTS = ("op", "eager", "inductor", "aoti")
# Relative Frobenius error against float64 beyond which numbers are wrong rather than rounded.
ALLOWED_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclasses.dataclass(frozen=True)
class Result:
    """One variant at one size. Times are microseconds: the median of rounds, the quartiles around it, and the fastest.

    On a machine that others use too, the fastest round is one that nobody interrupted.
    """

    op: str
    variant: str
    tokens: int
    d: int
    r: int
    u: int
    hidden: str
    weight: str
    device: str
    median_us: float
    lower_us: float
    upper_us: float
    best_us: float
    rounds: int
    bytes: int
    floor_us: float
    floor_best_us: float
    error: float

    @property
    def gb_per_s(self) -> float:
        """Bytes the op must move over the time it took."""
        return self.bytes / self.median_us / 1e3

    @property
    def percent_of_floor(self) -> float:
        """100 where the op is as fast as the copy of as many bytes."""
        return 100 * self.floor_us / self.median_us

    def as_dict(self) -> dict[str, Any]:
        """Fields and derived numbers, for JSON."""
        numbers = dataclasses.asdict(self)
        for name in ("median_us", "lower_us", "upper_us", "best_us", "floor_us", "floor_best_us"):
            numbers[name] = round(numbers[name], 3)
        return {**numbers, "gb_per_s": round(self.gb_per_s, 2), "percent_of_floor": round(self.percent_of_floor, 1)}


def arguments(
    op: str, tokens: int, d: int, r: int, u: int, hidden: torch.dtype, weight: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    """Random arguments of one op: states ``[tokens, d]``, weights scaled so that every part of the result matters."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = weight) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    states = (draw(tokens, d, dtype=hidden), draw(tokens, d, dtype=hidden))
    mlps = [(draw(u, d, scale=d**-0.5), draw(u), draw(d, u, scale=u**-0.5), draw(d)) for _ in range(2)]
    inject = (draw(r, d, scale=d**-0.5), draw(d, r, scale=r**-0.5), torch.tensor(0.3, device=device))
    chosen = {"shadow_inject": inject, "shadow_update": mlps[0] + mlps[1]}
    return states + chosen.get(op, mlps[0] + mlps[1] + inject)


def bytes_moved(op: str, given: Sequence[Tensor]) -> int:
    """The fewest bytes the op can move: every argument read once, every result written once."""
    results = {"shadow_inject": given[:1], "shadow_update": given[1:2], "shadow_update_inject": given[:2]}[op]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*given, *results))


def run(
    op: str,
    d: int,
    r: int,
    tokens: Sequence[int],
    dtype: str,
    against: Sequence[str],
    *,
    u: int | None = None,
    weight_dtype: str = "float32",
    device: str = "cpu",
    seconds: float = 1.0,
    variants: dict[str, Callable[..., Any]] | None = None,
) -> list[Result]:
    """Time one op at several sizes.

    Args:
        op: ``shadow_inject``, ``shadow_update`` or ``shadow_update_inject``.
        d, r: width and bottleneck; ``u`` is the update's bottleneck, r if None.
        tokens: rows, one result each.
        dtype: dtype of the hidden states; ``weight_dtype`` that of the adapter.
        against: variants besides the op itself, of :data:`VARIANTS`.
        device: ``cpu`` or ``cuda``; on CUDA calls are captured in a graph and its replays are timed.
        seconds: time spent on each size, for all variants together; at least five rounds are made.
        variants: functions to time instead of those that ``against`` names, by name.

    Returns:
        One :class:`Result` for each size and variant, the op first.

    Raises:
        InputError: an unknown op, dtype or variant, or a size below 1.
        PromiseError: a variant's numbers are wrong; nothing is timed then.
    """
    _check_request(op, d, r, tokens, dtype, weight_dtype, against)
    u = r if u is None else u
    hidden, weight = DTYPES[dtype], DTYPES[weight_dtype]

    def make(count: int) -> tuple[Tensor, ...]:
        return arguments(op, count, d, r, u, hidden, weight, device)

    results: list[Result] = []
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        timed = variants or _variants(op, ("op", *(name for name in against if name != "op")), make, folder)
        for count in tokens:
            given = make(count)
            errors = {name: _error(op, name, function, given) for name, function in timed.items()}
            size = bytes_moved(op, given)
            source = torch.randn(max(1, size // 8), device=device)
            calls: dict[str, Callable[[], Any]] = {
                name: functools.partial(function, *given) for name, function in timed.items()
            }
            calls["floor"] = functools.partial(torch.empty_like(source).copy_, source)
            taken_by = times(calls, device, seconds)
            floor = taken_by.pop("floor")
            for name, taken in taken_by.items():
                lower, median, upper = statistics.quantiles(taken, n=4)
                results.append(
                    Result(
                        op=op,
                        variant=name,
                        tokens=count,
                        d=d,
                        r=r,
                        u=u,
                        hidden=dtype,
                        weight=weight_dtype,
                        device=device,
                        median_us=median,
                        lower_us=lower,
                        upper_us=upper,
                        best_us=min(taken),
                        rounds=len(taken),
                        bytes=size,
                        floor_us=statistics.median(floor),
                        floor_best_us=min(floor),
                        error=errors[name],
                    )
                )
    return results


def _check_request(
    op: str, d: int, r: int, tokens: Sequence[int], dtype: str, weight_dtype: str, against: Sequence[str]
) -> None:
    choices: list[tuple[str, str, Iterable[str]]] = [
        ("op", op, OPS),
        ("dtype", dtype, DTYPES),
        ("weight dtype", weight_dtype, DTYPES),
    ]
    choices += [("variant", name, VARIANTS) for name in against]
    for what, value, known in choices:
        if value not in known:
            raise InputError(f"bench kernels: unknown {what}", expected=", ".join(known), found=repr(value))
    for what, number in (("d", d), ("r", r), *(("tokens", count) for count in tokens)):
        if number < 1:
            raise InputError(f"bench kernels: {what} is too small", expected="1 or more", found=str(number))


class _OpModule(torch.nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = OPS[op]

    def forward(self, *given: Tensor) -> Any:
        return self.op(*given)


def _variants(
    op: str, names: Sequence[str], make: Callable[[int], tuple[Tensor, ...]], folder: str
) -> dict[str, Callable[..., Any]]:
    reference = ops.DECOMPOSITIONS[OPS[op]]

    def package() -> Any:
        given = make(4)
        rows = torch.export.Dim("rows", min=1, max=1 << 20)
        shapes = ({0: rows}, {0: rows}, *[None] * (len(given) - 2))
        program = torch.export.export(_OpModule(op).eval(), given, dynamic_shapes={"given": shapes})
        path = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/{op}.pt2")
        return torch._inductor.aoti_load_package(path)

    makers: dict[str, Callable[[], Callable[..., Any]]] = {
        "op": lambda: OPS[op],
        "eager": lambda: reference,
        "inductor": lambda: torch.compile(reference, fullgraph=True, dynamic=False),
        "aoti": package,
    }
    return {name: makers[name]() for name in names}


def _error(op: str, name: str, function: Callable[..., Any], given: Sequence[Tensor]) -> float:
    """The larger relative error of a variant's results against float64; raises if it is no rounding error."""
    wide = [tensor if tensor.dim() == 0 else tensor.double() for tensor in given]
    wanted, found = ops.DECOMPOSITIONS[OPS[op]](*wide), function(*given)
    pairs = zip(wanted, found, strict=True) if isinstance(wanted, tuple) else [(wanted, found)]
    worst = 0.0
    for right, result in pairs:
        error = ((result.double() - right).norm() / right.norm()).item()
        worst = error if math.isnan(error) else max(worst, error)
    allowed = ALLOWED_ERROR[given[0].dtype]
    if not worst <= allowed:
        raise PromiseError(
            f"bench kernels: {op} ({name}) gives wrong numbers at {tuple(given[0].shape)}; not timed",
            expected=f"relative error up to {allowed:g} against float64",
            found=f"{worst:g}",
        )
    return worst


def times(calls: dict[str, Callable[[], Any]], device: str, seconds: float) -> dict[str, list[float]]:
    """Microseconds a call, one figure a round; every round times every call, so that drift hits all of them alike.

    Args:
        calls: what to time, by name.
        device: ``cpu``, or ``cuda``: calls are captured in a graph and its replays timed.
        seconds: how long to go on; at least five rounds are made.
    """
    clock = _cuda_clock if device == "cuda" else _cpu_clock
    timers = {name: clock(call) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(taken.values()))) < 5:
        for name, timer in timers.items():
            taken[name].append(timer() * 1e6)
    return taken


def _cpu_clock(call: Callable[[], Any]) -> Callable[[], float]:
    for _ in range(3):
        call()
    start = time.perf_counter()
    call()
    # A round lasts 1 ms or so: long beside the clock's steps, short beside what a scheduler gives to others.
    repeats = max(1, min(2000, int(1e-3 / max(time.perf_counter() - start, 1e-7))))

    def timer() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    return timer


def _cuda_clock(call: Callable[[], Any], repeats: int = 20) -> Callable[[], float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timer() -> float:
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e-3 / repeats

    return timer


@click.command("kernels")
@click.option("--op", "names", multiple=True, type=click.Choice(list(OPS)), help="Op to time; all three if not given.")
@click.option("--d", default=4096, show_default=True, help="Width of the hidden states.")
@click.option("--r", default=8, show_default=True, help="Rank of the inject.")
@click.option("--u", type=int, help="Width of the update's bottleneck; r if not given.")
@click.option("--tokens", default="1,512,4096", show_default=True, help="Rows, separated by commas.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(list(DTYPES)), help="Hidden states.")
@click.option("--weight-dtype", default="float32", show_default=True, type=click.Choice(list(DTYPES)), help="Adapter.")
@click.option("--against", default="eager,inductor", show_default=True, help="Of: " + ", ".join(VARIANTS) + ".")
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--threads", type=int, help="CPU threads; torch's own choice if not given.")
@click.option("--seconds", default=1.0, show_default=True, help="Time spent on each size.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write results and the machine line here.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False), help="Write a plot (PNG) here.")
def kernels_command(
    names: tuple[str, ...],
    d: int,
    r: int,
    u: int | None,
    tokens: str,
    dtype: str,
    weight_dtype: str,
    against: str,
    device: str,
    threads: int | None,
    seconds: float,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Time the shadow ops beside plain torch and a measured floor."""
    try:
        counts = [int(part) for part in tokens.split(",")]
    except ValueError as error:
        raise click.BadParameter(
            f"expected numbers separated by commas, found {tokens!r}", param_hint="--tokens"
        ) from error
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("no GPU is available to torch", param_hint="--device")
    if threads is not None:
        torch.set_num_threads(threads)
    results: list[Result] = []
    chosen = [name for name in against.split(",") if name]
    try:
        for name in names or tuple(OPS):
            results += run(
                name, d, r, counts, dtype, chosen, u=u, weight_dtype=weight_dtype, device=device, seconds=seconds
            )
    except (InputError, PromiseError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(", ".join(f"{key} {value}" for key, value in bench_report.machine_line().items()))
    click.echo(f"d {d}, r {r}, u {u or r}, hidden {dtype}, adapter {weight_dtype}, {device}")
    click.echo(bench_report.table(results))
    if json_path:
        bench_report.write_json(results, json_path)
    if plot_path:
        bench_report.plot(results, plot_path)


if __name__ == "__main__":
    kernels_command()


__all__ = [
    "ALLOWED_ERROR",
    "DTYPES",
    "OPS",
    "VARIANTS",
    "Result",
    "arguments",
    "bytes_moved",
    "kernels_command",
    "run",
    "times",
]
