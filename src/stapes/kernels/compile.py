"""Compile every kernel of the project for every GPU, on a machine that may have none, and check what came out.

What was compiled and found good is remembered in the user's cache under a key of the kernel's source and that of the
functions it calls, its constants and types, the target and Triton's version: an unchanged tree passes in seconds.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import pkgutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import stapes.kernels
from stapes.devices.machine import available_cores
from stapes.errors import DeviceError, OutputError, UsageError
from stapes.kernels import code_object
from stapes.kernels.code_object import CodeFacts, DamagedCode, amd_facts, nvidia_facts
from stapes.kernels.jit import has_triton, is_interpreted
from stapes.kernels.targets import TARGETS, CompileCase, Target


@dataclass(frozen=True)
class Outcome:
    """What became of one case on one target."""

    kernel: str
    dtype: str
    target: str
    facts: CodeFacts | None = None
    problems: tuple[str, ...] = ()
    skipped: str | None = None
    """Why it is not compiled there: the reference runs on such a GPU."""
    seconds: float = 0.0
    is_cached: bool = False


@dataclass(frozen=True)
class _Task:
    """A case by its place, which another process can find again."""

    module: str
    target: str
    number: int


def kernel_modules() -> list[str]:
    """Names of the project's files of kernels: all in this folder that have ``compile_cases``."""
    names = [f"stapes.kernels.{found.name}" for found in pkgutil.iter_modules(stapes.kernels.__path__)]
    return [name for name in names if hasattr(importlib.import_module(name), "compile_cases")]


def triton_version() -> str:
    """Of the Triton that is installed. Raises DeviceError without one, UsageError where it only interprets."""
    if not has_triton():
        raise DeviceError("kernels cannot be compiled: Triton is not installed; `pip install triton` brings it")
    if is_interpreted():
        raise UsageError("kernels cannot be compiled with TRITON_INTERPRET=1, which interprets them: unset it")
    import triton

    return triton.__version__


def cache_folder() -> Path:
    """Where the facts of what compiled before are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stapes" / "kernels"


def compile_all(
    targets: Sequence[str] = (),
    kernels: Sequence[str] = (),
    *,
    modules: Sequence[str] = (),
    workers: int | None = None,
    use_cache: bool = True,
    record: Path | None = None,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Compile and check, several at a time; by target, then by kernel.

    Args:
        targets: names out of `TARGETS`. Default: all.
        kernels: parts of the names of kernels. Default: all.
        modules: files of kernels to compile in place of the project's own.
        workers: processes. Default: one for each core.
        use_cache: whether what passed before counts.
        record: a file that names what passed, for machines with an empty cache: that is not compiled again, and what
            is compiled now is added. What is there no more is taken out where all of the table was asked for.
        report: told each outcome as it comes.

    Raises:
        DeviceError: there is no Triton.
        UsageError: a name that is no target or no kernel, or Triton only interprets.
    """
    version = triton_version()
    unknown = [name for name in targets if name not in TARGETS]
    if unknown:
        raise UsageError(f"--targets has {unknown[0]!r}: choose from {', '.join(TARGETS)}")
    chosen = [TARGETS[name] for name in targets or TARGETS]
    outcomes: dict[_Task, Outcome] = {}
    waiting: dict[_Task, Path] = {}
    keys: dict[_Task, str] = {}
    recorded = _read_record(record)
    for task, case, target in _tasks(modules or kernel_modules(), chosen, kernels):
        named = Outcome(case.name, case.dtype, target.name)
        refusal = case.skip or triton_refusal(target, version)
        keys[task] = _key(case, target, version)
        kept = cache_folder() / f"{keys[task]}.json"
        facts = _read(kept) if use_cache else None
        if refusal:
            outcomes[task] = replace(named, skipped=refusal)
        elif facts:
            outcomes[task] = replace(named, facts=facts, problems=check(case, target, facts), is_cached=True)
        elif use_cache and keys[task] in recorded:
            outcomes[task] = replace(named, is_cached=True)
        else:
            outcomes[task] = named
            waiting[task] = kept
            continue
        report(outcomes[task])
    if not outcomes:
        raise UsageError(f"--kernels {','.join(kernels)} names no kernel: run it without to see all")
    for task, outcome in _in_parallel(list(waiting), workers or available_cores()):
        outcomes[task] = replace(outcomes[task], **outcome)
        facts = outcomes[task].facts
        if facts and not outcomes[task].problems:
            _write(waiting[task], facts)
        report(outcomes[task])
    if record is not None:
        passed = {keys[task] for task, outcome in outcomes.items() if not outcome.problems and not outcome.skipped}
        is_whole = not (targets or kernels or modules)
        _write_record(record, passed if is_whole else passed | recorded, recorded)
    return list(outcomes.values())


def triton_refusal(target: Target, version: str) -> str | None:
    """Why this version of Triton does not compile for a target at all."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if target.family == "rdna2" and (major, minor) >= (3, 9):
        return "Triton 3.9 and later do not compile for RDNA 2"
    return None


def compile_case(case: CompileCase, target: Target) -> CodeFacts:
    """Compile one case here and now, without any cache. Raises DamagedCode, and whatever Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = case.kernel.jit
    names: list[str] = function.arg_names
    missing = [name for name in names if name not in case.signature and name not in case.constants]
    if missing:
        raise ValueError(f"the case says nothing of the argument {missing[0]}")
    aligned = case.aligned
    if aligned is None:
        aligned = tuple(
            name
            for name, kind in case.signature.items()
            if (kind.startswith("*") or name.startswith("stride")) and name not in case.kernel.rows
        )
    source = ASTSource(
        fn=function,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    # Triton reads an AMD target by its name and an NVIDIA one by its capability's number.
    architecture = target.name if target.is_amd else int(target.name.removeprefix("sm_"))
    gpu = GPUTarget("hip" if target.is_amd else "cuda", architecture, target.wave_size)
    with _empty_triton_cache():
        compiled = triton.compile(source, target=gpu, options={"num_warps": case.warps, "num_stages": case.stages})
    if target.is_amd:
        return amd_facts(compiled.asm["hsaco"], compiled.asm["amdgcn"], compiled.metadata.shared)
    return nvidia_facts(compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata.shared, _assembler())


def check(case: CompileCase, target: Target, facts: CodeFacts) -> tuple[str, ...]:
    """What is wrong with a compiled case; nothing where it is good."""
    problems = []
    if facts.mach != target.mach:
        problems.append(f"machine {facts.mach:#x} in the ELF flags, not {target.mach:#x}")
    if case.dot in target.matrix and not facts.matrix:
        problems.append(f"a {case.dot} product without matrix instructions")
    if facts.lds_bytes > target.lds_bytes:
        problems.append(f"{facts.lds_bytes} bytes of LDS, {target.lds_bytes} are there")
    if facts.spills:
        problems.append(f"{facts.spills} {'vector registers' if target.is_amd else 'bytes of registers'} spilled")
    if facts.scalar_spills:
        problems.append(f"{facts.scalar_spills} scalar registers spilled")
    if facts.scratch_bytes and not facts.spills:
        problems.append(f"{facts.scratch_bytes} bytes of scratch memory")
    return tuple(problems)


def _tasks(
    modules: Sequence[str], targets: Sequence[Target], kernels: Sequence[str]
) -> Iterator[tuple[_Task, CompileCase, Target]]:
    for target in targets:
        for module in modules:
            for number, case in enumerate(importlib.import_module(module).compile_cases(target)):
                if not kernels or any(part in case.name for part in kernels):
                    yield _Task(module, target.name, number), case, target


def _in_parallel(tasks: Sequence[_Task], workers: int) -> Iterator[tuple[_Task, dict[str, Any]]]:
    """Outcomes as they come. LLVM ends the process over some kernels: those it does for are found one by one."""
    left = set(tasks)
    try:
        for task, outcome in _pool(tasks, min(workers, len(tasks))):
            left.remove(task)
            yield task, outcome
    except BrokenProcessPool:
        for task in sorted(left, key=tasks.index):
            try:
                yield from _pool([task], 1)
            except BrokenProcessPool:
                yield task, {"problems": ("Triton's compiler crashed",)}


def _pool(tasks: Iterable[_Task], workers: int) -> Iterator[tuple[_Task, dict[str, Any]]]:
    if not workers:
        return
    # Not forked: a caller may have threads. Torch must not start a thread for each core in each of the processes.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        futures = {pool.submit(_work, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


def _work(task: _Task) -> dict[str, Any]:
    """Compile in a process of the pool: the fields of the outcome that it settles."""
    target = TARGETS[task.target]
    case: CompileCase = list(importlib.import_module(task.module).compile_cases(target))[task.number]
    start = time.perf_counter()
    try:
        facts = compile_case(case, target)
        outcome: dict[str, Any] = {"facts": facts, "problems": check(case, target, facts)}
    except DamagedCode as error:
        outcome = {"problems": (str(error),)}
    except Exception as error:  # Triton's errors have no common class
        lines = str(error).strip().splitlines() or [""]
        outcome = {"problems": (f"{type(error).__name__}: {lines[-1][:200]}",)}
    return outcome | {"seconds": time.perf_counter() - start}


def _key(case: CompileCase, target: Target, version: str) -> str:
    parts = [
        version,
        case.kernel.jit.cache_key,  # its source, that of what it calls, and the values of globals they use
        sorted(case.signature.items()),
        sorted((name, str(value)) for name, value in case.constants.items()),
        case.aligned,
        case.warps,
        case.stages,
        repr(target.name),
        hashlib.sha256(Path(code_object.__file__).read_bytes()).hexdigest(),  # how the facts are read
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> CodeFacts | None:
    try:
        return CodeFacts(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # not there, or damaged: compiled again
        return None


def _write(path: Path, facts: CodeFacts) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all, whoever else writes it at the same time.
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(facts)), encoding="utf-8")
        temporary.replace(path)
    except OSError:  # a cache that cannot be written costs time only
        pass


def _read_record(path: Path | None) -> set[str]:
    try:
        return set(path.read_text(encoding="utf-8").split()) if path else set()
    except FileNotFoundError:
        return set()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: the record cannot be read ({error}); give another file") from error


def _write_record(path: Path, keys: set[str], before: set[str]) -> None:
    if keys == before:
        return
    try:
        path.write_text("".join(f"{key}\n" for key in sorted(keys)), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: the record cannot be written ({error}); give another file") from error


def _assembler() -> str | None:
    """NVIDIA's assembler that Triton brings and uses."""
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(90).path


@contextmanager
def _empty_triton_cache() -> Iterator[None]:
    """Triton's own cache would hide what is checked here, and would keep code for GPUs that are not here."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="stapes-kernels-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before
