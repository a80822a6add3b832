"""Compare the speed of two checkouts: python tests/bench_train.py OTHER [--rounds N] [--score].

Both train side by side, each in its own process, and take turns: while one does a few steps, the
other one waits. So a machine that is busy with something else slows both by the same. Prints the
seconds of a cold and of a warm start (imports, compilation), wall and CPU time per step with their
ratios, MFU, and the parts of a step; asserts nothing. With --score both are evaluated after the
same number of steps, with the schedules that belong to it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent

# Runs train.main() of the checkout in the current folder with a clock that counts steps: it asks
# over a pipe for the permission to do the next ones, and reports what they took. A turn of n steps
# is "n" or "n profiled".
WORKER = """
import json, os, sys, time
sys.path.insert(0, ".")
began = time.perf_counter()
commands, reports = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
total = int(sys.argv[3])
del sys.argv[1:]
import prepare, train
from torch.profiler import profile

def used():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system

original = prepare.Clock

class PipedClock(original):
    allowed = count = 0
    profiler = None

    def start(self, resumed=0.0):
        super().start(resumed)
        self.report(startup=time.perf_counter() - began, startup_cpu=used())

    def report(self, **values):
        print(json.dumps(values), file=reports, flush=True)
        steps, *how = commands.readline().split()
        self.allowed = int(steps)
        self.profiler = profile() if how else None
        if self.profiler:
            self.profiler.start()
        self.wall, self.cpu, self.done_before = time.perf_counter(), used(), self.count

    def done(self):
        if self.count - self.done_before == self.allowed and self.count < total:
            steps = max(1, self.count - self.done_before)
            report = {"wall": (time.perf_counter() - self.wall) / steps}
            report["cpu"] = (used() - self.cpu) / steps
            if self.profiler:
                self.profiler.stop()
                events = self.profiler.key_averages()
                report["parts"] = [(e.key, e.self_cpu_time_total / 1e6 / steps) for e in events]
            self.report(**report)
        self.count += 1
        if self.count > total:
            prepare.Clock = original  # the evaluator refuses a patched module
        return self.count > total

    def elapsed(self):
        if self.started is None or self.training_seconds is not None:
            return super().elapsed()
        return max(self.count - 0.5, 0) * prepare.TIME_BUDGET / total

prepare.Clock = train.Clock = PipedClock
train.main()
"""


class Worker:
    """One checkout, training on command."""

    def __init__(self, folder: Path, steps: int, environment: dict):
        to_child, commands = os.pipe()
        reports, from_child = os.pipe()
        self.commands = commands
        self.reports = os.fdopen(reports)
        self.out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(to_child), str(from_child), str(steps)],
            cwd=folder, env=environment, pass_fds=(to_child, from_child), stdout=self.out,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self.start = self.read()

    def read(self) -> dict:
        return json.loads(self.reports.readline() or "{}")

    def train(self, steps: int, how: str = "") -> dict:
        os.write(self.commands, f"{steps} {how}\n".encode())
        return self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def finish(self) -> list[str]:
        """The METRIC lines."""
        self.process.wait()
        self.out.seek(0)
        return [line for line in self.out.read().splitlines() if line.startswith("METRIC")]


PARTS = {  # by the names that torch's profiler gives
    "products of the model": ("aten::mm", "aten::addmm"),
    "products of attention and Muon": ("aten::bmm", "aten::baddbmm"),
    "compiled kernels": ("CompiledFxGraph",),
    "AdamW": ("aten::_fused_adamw_",),
}


def print_parts(name: str, report: dict) -> None:
    """Where the time of a profiled step goes; the profiler itself makes it a little slower."""
    left = dict(report["parts"])
    found = {}
    for part, keys in PARTS.items():
        names = [
            k for k in left if k in keys or any(k.startswith(f"## Call {key}") for key in keys)
        ]
        found[part] = sum(left.pop(k) for k in names)
    found["everything else"] = sum(left.values())
    shown = ", ".join(f"{part} {1000 * seconds:.0f}" for part, seconds in found.items())
    print(f"{name:<6} ms of a step: {shown}")


def flops_of_step_and_peak() -> tuple[float, float]:
    """(floating-point operations of a step, the most per second on this machine).

    The step is that of this checkout's model: MFU counts the same products for both.
    """
    sys.path.insert(0, str(HERE))
    import torch

    import prepare
    import train
    from harness import device

    where = prepare.get_device()
    peak, _ = device.peak_flops(where, device.compute_dtype(where))
    config = train.build_config(prepare.VOCAB_SIZE, torch.float32)
    with torch.device("meta"):
        return train.GPT(config).flops_per_token() * train.TOTAL_BATCH_SIZE, peak


def start_workers(folders: dict, total: int, caches: Path) -> dict[str, Worker]:
    """A worker for each checkout, with a cold and a warm start."""
    workers = {}
    for name, folder in folders.items():
        cold = caches / name  # an empty folder for compiled code, the same data
        cold.mkdir()
        root = Path(os.environ.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch").expanduser()
        for path in root.iterdir():
            if path.name != "compiled":
                (cold / path.name).symlink_to(path)
        environment = os.environ | {
            "AUTORESEARCH_CACHE": str(cold),
            "PYTHONPATH": str(folder),
            "TMPDIR": str(cold),  # torch keeps the compiled header of all kernels there
        }
        for kind in ("cold", "warm"):
            if name in workers:
                workers[name].end()
            workers[name] = Worker(folder, total, environment)
            start = workers[name].start
            seconds = f"{start['startup']:.1f} s, CPU {start['startup_cpu']:.1f} s"
            print(f"{name:<6} {kind} start {seconds}")
    return workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps per turn")
    parser.add_argument("--score", action="store_true", help="evaluate both at the end")
    args = parser.parse_args()
    folders = {"this": HERE, "other": args.other.resolve()}
    taken = {name: [] for name in folders}
    caches = tempfile.TemporaryDirectory()
    total = (args.rounds + 1) * args.steps + 1  # the last one only ends the loop
    step_flops, peak = flops_of_step_and_peak()
    workers = start_workers(folders, total, Path(caches.name))
    for _ in range(args.rounds):
        for name, worker in workers.items():
            if report := worker.train(args.steps):
                taken[name].append(report)
    for kind in ("wall", "cpu"):
        medians = {n: statistics.median(r[kind] for r in reports) for n, reports in taken.items()}
        pairs = zip(*(taken[name] for name in folders), strict=False)
        ratios = sorted(mine[kind] / other[kind] for mine, other in pairs)
        spread = statistics.stdev(ratios) / len(ratios) ** 0.5
        ratio = statistics.median(ratios)
        shown = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in medians.items())
        print(f"{kind:<6} per step: {shown}; ratio {ratio:.3f} +- {spread:.3f}")
    for name, reports in taken.items():
        mfu = step_flops / peak / statistics.median(r["wall"] for r in reports)
        print(f"{name:<6} mfu {100 * mfu:.1f}% of {peak / 1e12:.2f} TFLOP/s")
    for name, worker in workers.items():
        if report := worker.train(args.steps, "profiled"):
            print_parts(name, report)
        if args.score:
            worker.train(1)
            print(f"{name:<6} {'; '.join(worker.finish())}")
        else:
            worker.end()


if __name__ == "__main__":
    main()
