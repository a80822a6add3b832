"""The parts of tests/gpu_session.py that train: speed, memory, profile, resuming, float16.

Without a GPU a small model takes the place of `full`: its figures say nothing, the way is the same.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gpu_runner import Notes

GIB = 2**30
# What takes the place of `full` on a CPU: other constants of the profile, other knobs
SMALL_PROFILE = {"vocab_size": 1024, "seq_len": 256}
SMALL_KNOBS = {"COMPILE": False, "DEPTH": 2, "ASPECT_RATIO": 16, "HEAD_DIM": 16}
SMALL_KNOBS |= {"TOTAL_BATCH_SIZE": 2**10, "DEVICE_BATCH_SIZE": 2}


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def set_profile() -> None:
    """Make the profile `full` of this process that of the session: less text to be scored."""
    import prepare

    rows = 256 if on_gpu() else 16
    full = replace(prepare.PROFILES["full"], data="embedded")
    if not on_gpu():
        full = replace(full, **SMALL_PROFILE)
    prepare.PROFILES["full"] = replace(full, eval_tokens=rows * full.seq_len)


def trainer(seconds: float, **knobs):
    """The module train.py with this time budget and these knobs; small ones on a CPU."""
    os.environ["AUTORESEARCH_TIME_BUDGET"] = str(seconds)
    set_profile()
    import train

    if not on_gpu():
        knobs = SMALL_KNOBS | knobs
        train.machine.peak_flops = unmeasured_peak  # float16 products take minutes on a CPU
    for name, value in knobs.items():
        setattr(train, name, value)
    return train


def unmeasured_peak(device, dtype) -> tuple[None, str]:
    return None, "not measured on a CPU in this session"


def training(notes: Notes, seconds: float, *arguments: str, **knobs) -> None:
    """train.main() with its summary noted, and how long it took to compile.

    Its folder, with steps.jsonl, has the name of the notes without their suffix.
    """
    train = trainer(seconds, **knobs)
    from harness import training_log  # after trainer: it sets the environment

    run_dir = notes.path.with_suffix("")
    run_dir.mkdir()
    os.environ["AUTORESEARCH_RUN_DIR"] = str(run_dir)
    fit_batch, print_values = train.fit_batch, training_log.print_values

    def timed_fit_batch(run, clock):
        start = time.perf_counter()
        fit_batch(run, clock)
        notes.add(compile_and_two_steps_seconds=time.perf_counter() - start)
        notes.add(rows_at_once=run.rows)

    def noted_summary(values):
        print_values(values)
        notes.add(**{name: value for name, value in values.items() if value is not None})

    train.fit_batch = timed_fit_batch
    training_log.print_values = noted_summary
    sys.argv = ["train.py", *arguments]
    train.main()


def losses(run_dir: Path) -> dict[int, float]:
    """The recorded losses of a run by step; {} before the first."""
    path = run_dir / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records}


def full(notes: Notes) -> None:
    """Train `full` for 60 s, compiled for the first time, and score it."""
    training(notes, 60 if on_gpu() else 4)
    values = notes.values
    speed = values["total_tokens_M"] * 1e6 / values["training_seconds"]
    recorded = list(losses(notes.path.with_suffix("")).values())
    notes.add(tokens_per_second=speed, first_loss=recorded[0], last_loss=recorded[-1])
    notes.add(mfu_percent=values.get("mfu_percent", "unknown"))


def started(train):
    """A Run that is compiled and fits into memory."""
    import prepare

    run = train.setup()
    train.fit_batch(run, prepare.Clock())
    return run


def do_steps(train, run, count: int, load: bool = True) -> tuple[float, list[float]]:
    """(ms per step, loss of each step); load=False repeats one batch."""
    import prepare

    prepare.synchronize()
    start = time.perf_counter()
    found = []
    for _ in range(count):
        train.set_schedules(run.optimizer, 0.1, run.step)
        loss = 0.0
        for _ in range(run.micro_steps):
            loss = loss + train.add_gradients(run, run.model)
            if load:
                run.batch = next(run.loader)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad(set_to_none=True)
        run.step += 1
        found.append(loss)
    prepare.synchronize()
    return 1000 * (time.perf_counter() - start) / count, [loss.item() for loss in found]


def memory(notes: Notes) -> None:
    """Memory of a step, at the rows that train.py asks for."""
    import torch

    from harness import device as machine

    train = trainer(60)
    run = started(train)
    notes.add(rows_wanted=train.DEVICE_BATCH_SIZE, rows_at_once=run.rows)
    notes.add(peak_gib=machine.peak_memory_mb(run.device) / 1024)
    if not on_gpu():
        return
    do_steps(train, run, 1)
    free, total = torch.cuda.mem_get_info()
    notes.add(card_gib=total / GIB, free_gib=free / GIB)
    before = torch.cuda.memory_allocated()
    x, y, _ = run.batch
    with run.autocast():
        loss = run.model(x, y)
    kept = torch.cuda.memory_allocated() - before
    notes.add(weights_and_optimizer_gib=before / GIB, kept_for_backward_gib=kept / GIB)
    notes.add(reserved_gib=torch.cuda.max_memory_reserved() / GIB, loss=loss.item())


def profile(notes: Notes) -> None:
    """Stalls of the loader, then ten steps by kernel."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    gpu = on_gpu()
    train = trainer(60)
    run = started(train)
    count = 10 if gpu else 2
    do_steps(train, run, count // 2)
    step_ms = do_steps(train, run, count)[0]
    repeated_ms = do_steps(train, run, count, load=False)[0]
    notes.add(step_ms=step_ms, step_ms_without_loader=repeated_ms)
    activities = [ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded:
        do_steps(train, run, count)
    kind = DeviceType.CUDA if gpu else DeviceType.CPU
    kernels = []
    for event in recorded.key_averages():
        if event.device_type == kind:
            spent = event.self_device_time_total if gpu else event.self_cpu_time_total
            kernels.append((spent / 1000 / count, event.count / count, event.key))
    kernels.sort(reverse=True)
    busy = sum(ms for ms, _, _ in kernels)
    notes.add(kernels_ms=busy)
    if gpu:  # of the step without the profiler, which slows the CPU but not the kernels
        notes.add(idle_percent=100 * max(0.0, 1 - busy / step_ms))
    rows = [
        {"ms": ms, "calls": calls, "percent": 100 * ms / busy, "kernel": key[:64]}
        for ms, calls, key in kernels[:15]
    ]
    notes.add(by_kernel=rows)


# train.py in a process that is killed: with a record of every step, and often a checkpoint
WORKER = """
import sys
from pathlib import Path
from gpu_training import Notes, training
from harness import training_log

training_log.RECORDS = 1e9
training(Notes(Path(sys.argv[1])), 60, sys.argv[2], CHECKPOINT_EVERY=2)
"""


def start_training(notes: Notes, name: str, argument: str) -> subprocess.Popen:
    """Training in a process of its own: the second start finds the compiled code."""
    command = [sys.executable, "-c", WORKER, str(notes.work / f"{name}.json"), argument]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(command, cwd=notes.work, env=environment)


def kill_when(process: subprocess.Popen, condition: Callable[[], object]) -> None:
    """Wait until the condition holds, then kill -9; RuntimeError when the process ends first."""
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"training ended by itself with exit code {process.returncode}")
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()


def resume(notes: Notes) -> None:
    """Kill a training run some steps after a checkpoint, go on from it, compare the losses."""

    def steps_after_checkpoint() -> bool:
        saved = [int(path.stem) for path in notes.work.glob("checkpoints/*/*.pt")]
        done = [step for step in losses(notes.work / "killed") if saved and step > min(saved)]
        return len(done) >= 3

    kill_when(start_training(notes, "killed", "--save"), steps_after_checkpoint)
    before = losses(notes.work / "killed")

    def some_steps() -> bool:
        return len(losses(notes.work / "resumed")) >= 3

    # The oldest checkpoint, so that both runs did the steps that follow
    oldest = min(notes.work.glob("checkpoints/*/*.pt"))
    notes.add(checkpoint_gib=oldest.stat().st_size / GIB, checkpoint_step=int(oldest.stem))
    kill_when(start_training(notes, "resumed", f"--resume={oldest}"), some_steps)
    after = losses(notes.work / "resumed")
    warm = json.loads((notes.work / "resumed.json").read_text())["values"]
    notes.add(compile_and_two_steps_seconds_warm=warm["compile_and_two_steps_seconds"])
    common = sorted(set(before) & set(after))
    notes.add(steps_done_twice=common)
    difference = max(abs(before[step] - after[step]) for step in common)
    notes.add(largest_difference_of_loss=difference)
    if not difference < 0.1:
        raise RuntimeError(f"the losses do not go on as they were: {difference:.3f} apart")


def float16(notes: Notes) -> None:
    """The way of cards without bfloat16: loss scaling, attention without flash, eager."""
    import torch

    train = trainer(60, COMPILE=False, DEVICE_BATCH_SIZE=16 if on_gpu() else 1)
    train.machine.compute_dtype = lambda device: torch.float16
    run = started(train)
    step_ms, found = do_steps(train, run, 20 if on_gpu() else 3)
    notes.add(first_loss=found[0], last_loss=found[-1], loss_scale=run.scaler.get_scale())
    notes.add(step_ms=step_ms)
    if not all(map(math.isfinite, found)) or found[-1] > found[0]:
        raise RuntimeError(f"the loss does not fall: {found[0]:.3f} ... {found[-1]:.3f}")
