"""The research cycle as one command: commit train.py, run it, judge it, log it, keep it or revert it.

    uv run experiment.py run "widen the MLP to 5x" --asi '{"hypothesis": "capacity-bound"}'
    uv run experiment.py run "drop the gate" --simpler    equal within noise is enough if lines were removed
    uv run experiment.py run "rate 0.05" --confirm        a doubtful result is decided on other seeds
    uv run experiment.py noise --repeats 3                measure what one run's score varies by itself
    uv run experiment.py status | resume | check          one screen | all a fresh agent needs | would run start?
    uv run experiment.py report [--tsv | --watch]         progress.png and report.html

The log is autoresearch.jsonl. Each run's log, record, steps and diff stay in .autoresearch/runs/<run>-<commit>/.
Exit: 0 done (kept or discarded), 1 the run is logged as crash or checks_failed, 2 refused (nothing committed, no
row), 3 the baseline itself fails (train.py is as before, no row), 130 interrupted (logged, reverted).
"""

import argparse
import ast
import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TRAIN = ROOT / "train.py"
LOG = ROOT / "autoresearch.jsonl"
STATE = ROOT / ".autoresearch"
FIXED = ("prepare.py", "data.py", "autoresearch.sh", "experiment.py", "pyproject.toml")  # as in autoresearch.sh
SESSION = "refs/autoresearch/session"
TRAILER = "Autoresearch-Run: "  # marks the commits made here, so that one is found again after a kill

FLOOR_GUESS = 0.002  # bits per byte; what `run` takes for noise until `noise` has measured it
CONFIRM_PAIRS = 2  # candidate and incumbent runs that --confirm adds, each pair on its own seed
CHECKS_LIMIT = 300  # seconds for autoresearch.checks.sh
MIN_FREE_MB = 100
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
METRICS = ("peak_memory_mb", "mfu_percent", "training_seconds", "total_seconds", "num_steps", "total_tokens_m", "num_params_m")
UNMARKED = "logits repeat only to"  # a mark of prepare.py that names a limit of its check, no fault of the run
REASONS = {1: "crash", 2: "refused", 3: "nan", 4: "oom", 5: "void", 124: "timeout", 130: "interrupted"}


class Stop(Exception):
    """Ends the command with a message for people and an exit code."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


def short(text, width=60):
    return " ".join(str(text).split())[:width]


def say(text):
    print(f"experiment: {text}", file=sys.stderr, flush=True)


# ---- git and the lock ----


def git(*args, at=ROOT, text=None, hooks=False):
    """Git's output, by argument list: no text is ever a shell word. Raises Stop with git's own words."""
    command = ["git", *([] if hooks else ["-c", "core.hooksPath=/dev/null"]), *args]
    try:
        done = subprocess.run(command, cwd=at, input=text, capture_output=True, encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise Stop("git is not installed. hint: install it, the cycle is made of commits") from None
    if done.returncode:
        raise Stop(f"git {args[0]} failed: {(done.stderr + done.stdout).strip()}")
    return done.stdout.rstrip("\n")


def git_try(*args, at=ROOT):
    """Git's output, or None when git says no."""
    with contextlib.suppress(Stop):
        return git(*args, at=at)


def try_lock(file):
    """Whether we hold the file's lock now; it is given up when the file is closed or the process ends."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@contextlib.contextmanager
def lock():
    """One process at a time, and Ctrl-C waits until the end: what is inside is done whole or not at all."""
    STATE.mkdir(exist_ok=True)
    with open(STATE / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = []
        ours = [number for number in SIGNALS if signal.getsignal(number) is signal.default_int_handler]
        for number in ours:
            signal.signal(number, lambda *_: waiting.append(1))
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, signal.default_int_handler)
        if waiting:
            raise KeyboardInterrupt


# ---- the log ----


def strict_json(text):
    """A JSON object of finite numbers; raises ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    json.dumps(value, allow_nan=False)
    return value


def read_log():
    """All rows in order. Rows of other tools get our keys; half a last line or an edit by hand is passed over."""
    rows, segment = [], -1
    blank = dict.fromkeys(("commit", "status", "description", "reason", "id"), "")
    blank |= {"metrics": {}, "asi": {}, "timestamp": 0, "seconds": 0}
    for line in LOG.read_text(errors="replace").split("\n") if LOG.exists() else []:
        with contextlib.suppress(ValueError):
            row = strict_json(line)
            segment += row.get("type") == "config"
            if isinstance(row.get("run"), int) and isinstance(row.get("metric"), (int, float)):
                rows.append(blank | {"commit_id": row.get("commit")} | row | {"segment": max(segment, 0)})
    return rows


def current(rows):
    """The rows of the last segment: scores of other segments are of other data, another budget or device."""
    return [r for r in rows if r["segment"] == rows[-1]["segment"]] if rows else []


def kept(rows):
    return [r for r in rows if r["status"] == "keep" and r["metric"] > 0]


def best(rows):
    """The lowest kept score: candidates are compared with it, so that a row of 'not worse' can't drift upwards."""
    return min(kept(rows), key=lambda r: r["metric"], default=None)


def key(row):
    """Two scores can be compared only when this is equal."""
    return row.get("data_id"), float(row.get("budget") or 0), row.get("device")


def confidence(rows):
    """|best kept - baseline| / median absolute deviation of the segment's scores; None under 3 or without spread."""
    scores = [r["metric"] for r in rows if r["metric"] > 0]
    if len(scores) < 3 or not kept(rows):
        return None
    middle = statistics.median(scores)
    spread = statistics.median(abs(s - middle) for s in scores)
    gain = abs(best(rows)["metric"] - kept(rows)[0]["metric"])
    return round(gain / spread, 3) if spread and gain else None


def append(row, new_segment=False):
    """Write one row, after a config line if it opens a segment, and sync it. The caller holds the lock."""
    rows = read_log()
    new_segment = new_segment or not rows
    segment = rows[-1]["segment"] + new_segment if rows else 0
    row |= {"run": len(rows) + 1, "segment": segment}
    row["confidence"] = confidence([r for r in rows if r["segment"] == segment] + [row])
    config = {"type": "config", "name": ROOT.name, "metricName": "val_bpb", "metricUnit": "bpb", "bestDirection": "lower"}
    with open(LOG, "ab+", buffering=0) as file:
        begun = re.match(rb'{"type": ?"config"', last_line(file))  # by another tool, or before a power cut
        lines = [config, row] if new_segment and not begun else [row]
        data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) < len(data):
                raise OSError("the log could not be written whole")
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)  # half a line would stop strict readers; the next command logs the run as interrupted
            raise
    return row


def last_line(file):
    """The log's last line, mended: half a line, left by a power cut, goes aside; a whole one without an end gets it."""
    file.seek(0)
    *lines, tail = file.read().split(b"\n")
    try:
        if tail:
            strict_json(tail)
            file.write(b"\n")
            return tail
    except ValueError:
        with open(STATE / "torn.txt", "ab") as torn:
            torn.write(tail + b"\n")
        file.truncate(file.seek(0, os.SEEK_END) - len(tail))
    return lines[-1] if lines else b""


# ---- the verdict ----


def noise_floor(segment):
    """(floor, its source): twice the standard deviation of one run, as measured by `noise` for this segment.

    A sample's s is low on average, by c4(n) = sqrt(2 / (n-1)) * gamma(n/2) / gamma((n-1)/2) for normal scores
    (NIST/SEMATECH e-Handbook of Statistical Methods, 6.3.2), 11% at n = 3: the floor is 2 * s / c4(n).
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        noise = strict_json((STATE / "noise.json").read_text())
        n = noise["n"]
        if segment and tuple(noise["key"]) == key(segment[0]) and n > 1:
            c4 = math.sqrt(2 / (n - 1)) * math.gamma(n / 2) / math.gamma((n - 1) / 2)
            return 2 * noise["sd"] / c4, f"measured, n={n}"
    return FLOOR_GUESS, "a guess: 'noise' measures it"


def judge(score, reference, floor, lines=(0, 0), simpler=False):
    """(status, reason) by rule. `lines` is (added, removed); a gain must exceed the floor, never just equal it."""
    gain = round(reference - score, 9)  # 1 - 0.998 is a little more than 0.002 in floating point
    if gain > floor:
        return "keep", "better"
    if simpler and lines[1] > lines[0] and gain >= -floor:
        return "keep", "simpler"
    return "discard", "within noise" if gain >= -floor else "worse"


def confirmed(pairs, floor):
    """(status, reason) on the means of n (candidate, incumbent) pairs: a mean of n varies by 1/sqrt(n) of one run."""
    candidate, incumbent = (statistics.mean(side) for side in zip(*pairs, strict=True))
    status, reason = judge(candidate, incumbent, floor / math.sqrt(len(pairs)))
    return status, "confirmed" if status == "keep" else f"{reason}, confirmed"


def make_row(run, outcome, status, reason, **ours):
    """A row in the key order that the log's other readers write; numbers of a failure are 0, never a score."""
    data, score = run.data, outcome["score"]
    metrics = {name: outcome["metrics"].get(name, 0) for name in METRICS}
    metrics["millibits"] = round(1000 * score, 3)  # some readers show two decimals of the metric only
    return {
        "run": 0, "commit": data["commit"][:7], "metric": score, "metrics": metrics, "status": status,
        "description": data["description"], "timestamp": time.time_ns() // 1_000_000, "segment": 0, "confidence": None,
        "asi": data["asi"], "reason": reason, "detail": outcome["detail"], **ours,
        **{name: outcome["record"].get(name) for name in ("data_id", "budget", "device", "profile", "seed", "marks")},
        "seconds": outcome["seconds"], "commit_id": data["commit"], "id": data["id"],
    }


# ---- may a run start? ----


def check_python():
    if not find_spec("torch"):
        raise Stop(f"{sys.executable} has no torch. hint: uv run experiment.py, or .venv/bin/python experiment.py")
    return f"{sys.version.split()[0]} with torch"


def check_disk():
    free = shutil.disk_usage(ROOT).free / 2**20
    if free < MIN_FREE_MB:
        raise Stop(f"{free:.0f} MB free, a run wants {MIN_FREE_MB}. hint: old run folders in .autoresearch/runs may go")
    cache = Path(os.environ.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch").expanduser()
    return f"{free / 1024:.1f} GB free; the data in {cache} {'are there' if cache.exists() else 'are made by the first run'}"


def check_git():
    """The branch takes commits that belong to nobody else."""
    start = "git add -A && git commit -m start"
    switch = f"hint: git switch -c autoresearch/{time.strftime('%b%d').lower()}"
    try:
        git("rev-parse", "--git-dir")
    except Stop as stop:  # no repository, one of another owner, or no git
        raise Stop(f"{stop}. hint: if there is no repository yet: git init -b autoresearch/start && {start}") from None
    if git_try("cat-file", "-e", "HEAD:./train.py") is None:
        raise Stop(f"train.py is in no commit yet. hint: {start}")
    if git_try("var", "GIT_AUTHOR_IDENT") is None or git_try("var", "GIT_COMMITTER_IDENT") is None:
        raise Stop("git has no identity. hint: git config user.name NAME && git config user.email ADDRESS")
    branch = git_try("symbolic-ref", "-q", "--short", "HEAD")
    if branch is None:
        raise Stop(f"HEAD is detached: commits here would belong to no branch. {switch}")
    default = git_try("symbolic-ref", "-q", "--short", "refs/remotes/origin/HEAD") or ""
    if branch in ("main", "master", default.removeprefix("origin/")):
        raise Stop(f"on the default branch '{branch}'. {switch}")
    return f"branch {branch} at {git('rev-parse', '--short', 'HEAD')}"


def check_fixed():
    """The fixed files are those of the commit at which the session began: the rule of autoresearch.sh."""
    if git_try("rev-parse", "-q", "--verify", SESSION) is None:
        git("update-ref", SESSION, "HEAD")
    changed = [name for name in FIXED if git_try("rev-parse", "-q", "--verify", f"{SESSION}:./{name}")
               != git_try("hash-object", "--no-filters", name)]
    if changed:
        names = " ".join(changed)
        raise Stop(f"fixed file changed since the session began: {names}. hint: 'git checkout {SESSION} -- {names}' "
                   "restores; if it was meant, commit it and run 'bash autoresearch.sh session'")
    return f"unchanged since {git('rev-parse', '--short', SESSION)}"


def check_edits():
    """Only train.py may differ from HEAD, and all that it imports is committed: that is what will run."""
    train = git("rev-parse", "--show-prefix") + "train.py"
    others = [name for name in git("diff", "--name-only", "-z", "HEAD").split("\0") if name not in ("", train)]
    if others:
        raise Stop(f"changed, and not part of an experiment: {' '.join(others[:9])}. "
                   "hint: commit or stash; only train.py may differ from HEAD")
    try:
        tree = ast.parse(TRAIN.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise Stop(f"train.py does not parse: {error}. hint: fix it, no run was spent") from None
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [[node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names] for node in imports]
    modules = {name.split(".")[0] for several in names for name in several}
    for path in git("ls-files", "--others", "--", ":(glob)*.py", ":(glob)*/__init__.py").splitlines():
        if path.split("/")[0].removesuffix(".py") in modules:
            raise Stop(f"train.py imports {path}, which is not committed, so no run can see it. hint: put the code into train.py")
    return "nothing but train.py differs from HEAD"


def check_idea():
    if train_changed():
        return "train.py changed"
    if present_baseline():
        raise Stop("train.py did not change since HEAD, except in comments or whitespace. hint: edit it first")
    return "the next run makes the baseline"


CHECKS = (check_python, check_disk, check_git, check_fixed, check_edits, check_idea)


def train_changed():
    """Whether train.py differs from HEAD in more than comments and whitespace."""
    with contextlib.suppress(SyntaxError, ValueError, OSError):
        return ast.dump(ast.parse(git("show", "HEAD:./train.py"))) != ast.dump(ast.parse(TRAIN.read_bytes()))
    return True  # one of them does not parse


def time_budget():
    with contextlib.suppress(ValueError):
        return float(os.environ.get("AUTORESEARCH_TIME_BUDGET") or 300)
    raise Stop("AUTORESEARCH_TIME_BUDGET is not a number of seconds")


# ---- the open record: what is under way, readable after a kill ----


class Run:
    """A run folder and its record, called open-<id> until all is settled; the process that owns it holds its lock."""

    def __init__(self, folder):
        self.folder = folder
        self.data = strict_json((folder / "record.json").read_text())
        self.tree = STATE / "worktrees" / self.data["id"]

    @classmethod
    def open(cls, kind, description, commit, asi):
        """`kind` is candidate, baseline or probe. The caller holds the lock."""
        name = secrets.token_hex(6)
        folder = STATE / "runs" / f"open-{kind}-{name}"
        folder.mkdir(parents=True)
        owner = open(folder / "lock", "w")  # noqa: SIM115  held until this process ends
        try_lock(owner)
        (folder / "reserve").write_bytes(bytes(2**20))  # given back for the row and the revert, should the disk be full
        data = {"id": name, "kind": kind, "description": description, "asi": asi or {}, "commit": commit}
        data |= {"parent": git("rev-parse", "HEAD"), "branch": git("symbolic-ref", "HEAD")}
        write_synced(folder / "record.json", data)
        run = cls(folder)
        run.owner = owner
        return run

    def save(self, **changes):
        self.data |= changes
        write_synced(self.folder / "record.json", self.data)

    def checkout(self, commit):
        """A clean detached worktree; returns the folder in it that corresponds to ours."""
        self.clear()
        git("worktree", "add", "--quiet", "--detach", str(self.tree), commit)
        return self.tree / git("rev-parse", "--show-prefix")

    def clear(self):
        """Remove the worktree, but for the run's log."""
        log = self.tree / git("rev-parse", "--show-prefix") / "run.log"
        if log.exists():
            log.replace(self.folder / "run.log")
        shutil.rmtree(self.tree, ignore_errors=True)
        git("worktree", "prune")

    def close(self, row, otherwise="interrupted"):
        """Keep the folder under its final name: that of its row, or what it was instead."""
        self.clear()
        for spare in ("lock", "reserve"):
            (self.folder / spare).unlink(missing_ok=True)
        target = folder_of(row) if row else self.folder.with_name(f"{otherwise}-{self.data['id']}")
        if target.exists():  # of a log that was deleted and begun again
            target.rename(f"{target}-before-{self.data['id']}")
        self.folder = self.folder.rename(target)


def write_synced(path, data):
    """Replace a file whole or not at all, also when the power goes."""
    new = path.with_suffix(".new")
    with open(new, "w") as file:
        json.dump(data, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def folder_of(row):
    return STATE / "runs" / f"{row['run']}-{row['commit']}"


def open_folders(kind="*"):
    return sorted((STATE / "runs").glob(f"open-{kind}-*"))


# ---- one measurement in its own worktree ----


def start_time(pid):
    """When a process began, to tell it from a later one of the same number; '' when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    with contextlib.suppress(OSError):
        return subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return ""


def stop_process(pid):
    """TERM lets autoresearch.sh end its train.py; KILL after ten seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
        for _ in range(100):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            os.killpg(pid, 0)
            time.sleep(0.1)
        os.killpg(pid, signal.SIGKILL)


def call(run, command, here, env, log, limit=None):
    """Run a command in its own process group; returns exit code (124 past the limit) and stdout. Ends with us."""
    with open(run.folder / log, "wb") as stderr:
        child = subprocess.Popen(command, cwd=here, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=stderr, text=True, errors="replace", start_new_session=True)
        try:
            run.save(pid=child.pid, started=start_time(child.pid))
            printed, _ = child.communicate(timeout=limit)
            return child.returncode, printed
        except subprocess.TimeoutExpired:
            return 124, ""
        finally:
            stop_process(child.pid)


def measure(run, commit, seed=None, gpu=None):
    """Run the commit's train.py through autoresearch.sh and return what came of it, after the record it left."""
    here = run.checkout(commit)
    git("checkout", "--quiet", SESSION, "--", *[f for f in FIXED if (ROOT / f).exists()], at=here)
    env = {**os.environ, "AUTORESEARCH_PYTHON": sys.executable, "AUTORESEARCH_RUN_DIR": str(run.folder)}
    for name in ("AUTORESEARCH_CACHE", "AUTORESEARCH_DATA"):  # relative paths are meant from here
        path = ROOT / Path(env.get(name, "")).expanduser()
        if env.get(name) and (path.exists() or name == "AUTORESEARCH_CACHE"):  # data may also have a name: embedded
            env[name] = str(path)
    env |= {} if seed is None else {"AUTORESEARCH_SEED": str(seed)}
    env |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    say(f"running {short(run.data['description'])!r}; its log: {here / 'run.log'}")
    begin = time.monotonic()
    code, printed = call(run, ["bash", "autoresearch.sh"], here, env, "harness.log")
    outcome = read_outcome(run.folder, code, printed) | {"seconds": round(time.monotonic() - begin, 1)}
    checks = next((c for c in (here / "autoresearch.checks.sh", ROOT / "autoresearch.checks.sh") if c.exists()), None)
    if checks and outcome["status"] == "scored":
        code, _ = call(run, ["bash", "-c", 'bash "$0" >&2', str(checks)], here, env, "checks.log", CHECKS_LIMIT)
        if code:
            detail = f"autoresearch.checks.sh ended with {code}" + f" after {CHECKS_LIMIT} s" * (code == 124)
            outcome |= {"status": "checks_failed", "reason": "checks_failed", "detail": detail}
    return outcome


def failure(reason, detail):
    """The outcome of a run without a score; numbers of a failure are 0."""
    return {"status": "crash", "reason": reason, "detail": detail, "score": 0, "metrics": {}, "record": {}, "seconds": 0}


def read_outcome(folder, code, printed):
    """Status, reason, score, metrics and record of a run that ended with this exit code of autoresearch.sh."""
    said = [line[14:] for line in (folder / "harness.log").read_text(errors="replace").splitlines()
            if line.startswith("autoresearch: ") and "last 50 lines" not in line]
    if code:
        return failure(REASONS.get(code, "crash"), said[-1][:300] if said else f"autoresearch.sh ended with {code}")
    try:
        record = strict_json((folder / "eval.jsonl").read_text())
        score = round(float(record["val_bpb"]), 6)
        if not 0 < score < math.inf:
            raise ValueError(f"val_bpb {score} is not a positive number")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return failure("void", f"no usable record: {error}")
    found = re.findall(r"^METRIC (\w+)=(-?[0-9.]+)$", printed, re.M)
    scored = {"score": score, "metrics": {name.lower(): float(value) for name, value in found}, "record": record}
    marks = [mark for mark in (record.get("marks") or "").split("; ") if mark and not mark.startswith(UNMARKED)]
    if marks:  # steps outside the clock, overlong training: no fair score, so it is never the incumbent
        return scored | {"status": "discard", "reason": "marked", "detail": "; ".join(marks)}
    return scored | {"status": "scored", "reason": "", "detail": ""}


@contextlib.contextmanager
def extra_run(kind, description, commit, asi=None, **how):
    """Measures a commit that is no candidate, and yields (run, outcome) under the lock. There is nothing to revert."""
    with lock():
        run = Run.open(kind, description, commit, asi)
    try:
        outcome = measure(run, commit, **how)
    except BaseException:
        with lock():
            mend(run)
        raise
    with lock():
        yield run, outcome


# ---- keep or revert ----


def commit_candidate(run):
    """Commit train.py alone. A hook that refuses leaves everything as it was. The caller holds the lock."""
    description, before = run.data["description"], TRAIN.read_bytes()
    message = f"experiment: {short(description)}\n\n{description}\n\n{TRAILER}{run.data['id']}\n"
    try:
        git("commit", "--quiet", "--file=-", "--", "train.py", text=message, hooks=True)
    except Stop as refusal:
        TRAIN.write_bytes(before)
        run.close(None, "refused")
        raise Stop(f"{refusal}\nnothing was committed. hint: a pre-commit hook may want train.py changed") from None
    run.save(commit=git("rev-parse", "HEAD"))
    diff = git("diff-tree", "-p", run.data["parent"], run.data["commit"], "--", "train.py")
    (run.folder / "train.diff").write_text(diff + "\n", errors="replace")


def settle(run, row):
    """Do what the row says: keep, or revert exactly this commit. Safe to repeat. The caller holds the lock."""
    incumbent = next(reversed(kept(current(read_log()))), None)  # None in a log that was deleted meanwhile
    if git_try("rev-parse", "-q", "--verify", run.data["branch"]) is None:
        say(f"{run.data['branch']} is gone: nothing to revert")
    else:
        if row["status"] != "keep":
            revert(run, incumbent)
        if incumbent and len(open_folders("candidate")) == 1:  # ours; with runs side by side the last one does it
            restore_incumbent(run, incumbent)
        sync_checkout(run)
    run.close(row)


def is_ancestor(old, new):
    return git_try("merge-base", "--is-ancestor", old, new) is not None


def revert(run, incumbent):
    commit = run.data["commit"]
    if incumbent and is_ancestor(commit, incumbent["commit_id"]):
        return say(f"the change {commit[:7]} stays: kept run {incumbent['run']} was measured with it")
    message = f'Revert "{git("log", "-1", "--format=%s", commit)}"\n\nThis reverts commit {commit}.'
    if not commit_on_branch(run, message, "revert", "--no-commit", commit):
        say(f"{commit[:7]} can't be reverted: its lines were changed since. hint: git revert {commit[:7]}")


def restore_incumbent(run, incumbent):
    """With nothing under way, train.py on the branch is the incumbent's, byte for byte as it was measured.

    Reverts alone don't ensure that when runs overlap: one may be built upon another's commit that goes later.
    A commit that a person made since then ends the rule: nothing of theirs is taken back.
    """
    good, branch = incumbent["commit_id"], run.data["branch"]
    if not is_ancestor(good, branch) or git("rev-parse", f"{good}:./train.py") == git("rev-parse", f"{branch}:./train.py"):
        return
    since = git("log", "--format=%B%x00", f"{good}..{branch}", "--", "train.py").split("\0")
    if all(TRAILER in message for message in since if message.strip()):
        message = f"Restore train.py of kept run {incumbent['run']}"
        commit_on_branch(run, message, "checkout", "--quiet", good, "--", "train.py")


def commit_on_branch(run, message, *change):
    """Commit what a git command stages, without touching the user's files; False when git refuses the change."""
    branch, tip = run.data["branch"], git("rev-parse", run.data["branch"])
    here = run.checkout(tip)
    if git_try(*change, at=here) is None:
        return False
    if git_try("diff", "--cached", "--quiet", "HEAD", at=here) is None:  # else it was done before
        git("commit", "--quiet", "--file=-", at=here, text=f"{message}\n\n{TRAILER}{run.data['id']}\n")
        if "blob" not in run.data:
            run.save(blob=git("rev-parse", f"{tip}:./train.py"))
        git("update-ref", branch, git("rev-parse", "HEAD", at=here), tip)
    return True


def sync_checkout(run):
    """After the branch moved: bring train.py along if the user has not edited it since, else leave it alone."""
    if "blob" not in run.data or git_try("symbolic-ref", "-q", "HEAD") != run.data["branch"]:
        return
    now = git_try("hash-object", "train.py")
    if now == run.data["blob"]:
        return git("checkout", "--quiet", "HEAD", "--", "train.py")
    git("reset", "--quiet", "--", "train.py")
    if now != git("rev-parse", "HEAD:./train.py"):
        say("train.py was edited during the run: your edits stay, with the reverted lines. hint: git diff train.py")


def finish(run, outcome, status, reason, **ours):
    """Row first, git second. The caller holds the lock."""
    (run.folder / "reserve").unlink(missing_ok=True)
    row = append(make_row(run, outcome, status, reason, **ours))
    settle(run, row)
    return row


def mend(run, detail="interrupted"):
    """Finish a run that ended halfway, from any point of it. The caller holds the lock."""
    data = run.data
    if data.get("started") and start_time(data["pid"]) == data["started"]:
        stop_process(data["pid"])
    row = next((r for r in read_log() if r["id"] == data["id"]), None)
    if not data["commit"]:
        data["commit"] = git_try("log", "-1", "--format=%H", "--fixed-strings", f"--grep={TRAILER}{data['id']}", data["branch"])
    if data["kind"] != "candidate" or not data["commit"]:  # nothing to undo: the user's edit is still in train.py
        run.close(row)
    elif row:
        settle(run, row)
    else:
        row = finish(run, failure("interrupted", detail), "crash", "interrupted")
        say(f"run {row['run']} ({short(row['description'])!r}) is logged as crash: {detail}. "
            f"hint: 'git checkout {row['commit']} -- train.py' brings its code back")


def recover():
    """Finish what a killed command left open; runs whose process lives are left alone. The caller holds the lock."""
    for folder in open_folders():
        if not (folder / "record.json").exists():  # killed before anything was done
            shutil.rmtree(folder)
            continue
        with open(folder / "lock", "w") as owner:
            if not try_lock(owner):
                continue
            index = ROOT / git("rev-parse", "--git-path", "index.lock")
            until = time.monotonic() + 5
            while index.exists():  # a git that outlived its killed command may be about to commit
                if time.monotonic() > until:
                    raise Stop(f"git is busy in this checkout. hint: if no git is running, remove {index}")
                time.sleep(0.1)
            mend(Run(folder))


# ---- the commands ----


def look(*checks):
    """Mend what a killed command left, make these checks, read the log: how every command begins."""
    with lock():
        recover()
        for check in checks:
            check()
        return read_log()


def run_command(args):
    if not args.description.strip():
        raise Stop("the description is empty. hint: say in a few words what this experiment changes")
    description = args.description.encode(errors="replace").decode()
    try:
        asi = strict_json(args.asi)
    except ValueError as error:
        raise Stop(f"--asi {args.asi[:60]!r}: {error}. hint: --asi '{{\"hypothesis\": \"...\"}}'") from None
    look(*CHECKS)
    changed, before, head = train_changed(), TRAIN.read_bytes(), git("rev-parse", "HEAD")
    if not changed:
        return report_row(baseline(args, head, description, asi))
    baseline(args, head)
    run = None
    try:
        with lock():
            check_edits()
            if TRAIN.read_bytes() != before:
                raise Stop("train.py changed while the baseline ran. hint: give the command again")
            run = Run.open("candidate", description, None, asi)
            commit_candidate(run)
        return report_row(decide(run, measure(run, run.data["commit"], gpu=args.gpu), args))
    except BaseException as error:
        if run and run.folder.name.startswith("open-"):
            with lock():
                mend(run, "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}")
        raise


def present_baseline(record=None):
    """The first row of the log's last segment, if the record's score, or one of the present budget, may follow it."""
    segment = current(read_log())
    fits = best(segment) and (key(segment[0]) == key(record) if record else key(segment[0])[1] == time_budget())
    return segment[0] if fits else None


def baseline(args, commit, description="baseline", asi=None, record=None):
    """The row that the segment begins with; where none is present, this commit is run for it. Raises Stop, code 3.

    A failed baseline gets no row: a segment begins with a score, or nothing after it could be judged.
    """
    if first := present_baseline(record):
        return first
    with open(STATE / "baseline.lock", "w") as file:
        if not try_lock(file):
            say("waiting for the baseline that another run is making")
            fcntl.flock(file, fcntl.LOCK_EX)
        if first := present_baseline(record):
            return first
        with extra_run("baseline", description, commit, asi, gpu=args.gpu) as (run, outcome):
            if outcome["status"] == "scored":
                row = append(make_row(run, outcome, "keep", "baseline", parent_metric=None), new_segment=True)
                run.close(row)
                return row
            run.close(None, "failed-baseline")
    raise Stop(f"the baseline fails as it is ({outcome['reason']}: {outcome['detail']}), so nothing can be judged. "
               f"hint: see {run.folder / 'run.log'}; then commit a train.py that runs", code=3)


def decide(run, outcome, args):
    """The verdict by rule; returns the row, appended and acted upon."""
    record, numstat = outcome["record"], git("diff-tree", "--numstat", run.data["parent"], run.data["commit"], "--", "train.py")
    lines = [int(number) for number in numstat.split()[:2]]
    if outcome["status"] == "scored" and not present_baseline(record):
        say("data, budget or device are not those of the log's last segment: a new segment needs its own baseline")
        try:
            baseline(args, run.data["parent"], record=record)
            if not present_baseline(record):
                raise Stop("the baseline was measured on other data or another device than the candidate")
        except Stop as stop:
            outcome = failure("baseline", str(stop)[:300]) | {"record": record, "seconds": outcome["seconds"]}
    with lock():
        segment = current(read_log())
        top, (floor, source) = best(segment), noise_floor(segment)
        ours = {"parent_metric": top and top["metric"], "floor": floor, "floor_source": source, "lines": lines}
        if outcome["status"] != "scored":
            return finish(run, outcome, outcome["status"], outcome["reason"], **ours)
        memory, usual = (o["metrics"].get("peak_memory_mb", 0) for o in (outcome, top))
        if usual and memory > args.budget * usual:
            say(f"warning: peak memory {memory:.0f} MB is {memory / usual:.2f} times the best run's {usual:.0f} MB")
        status, reason = judge(outcome["score"], top["metric"], floor, lines, args.simpler)
        if reason != "within noise" or not args.confirm:
            return finish(run, outcome, status, reason, **ours)
        incumbent = kept(segment)[-1]["commit_id"]
    pairs, seed = [], record.get("seed") or 1337
    for extra in range(1, CONFIRM_PAIRS + 1):
        sides = [measure_probe(commit, seed + extra, args.gpu) for commit in (run.data["commit"], incumbent)]
        pairs.append([side["score"] * (side["status"] == "scored") for side in sides])
    with lock():
        if all(map(all, pairs)):
            status, reason = confirmed(pairs, floor)
        return finish(run, outcome, status, reason, **ours, confirm=pairs)


def measure_probe(commit, seed, gpu=None):
    """One more run of a commit on another seed, for a mean; it has a folder, and no row of its own."""
    with extra_run("probe", f"{commit[:7]} on seed {seed}", commit, seed=seed, gpu=gpu) as (run, outcome):
        run.close(None, f"seed-{seed}-{commit[:7]}")
    return outcome


def report_row(row):
    """Print the verdict with its numbers; returns the exit code."""
    print("run", one_line(row).strip())
    if row["metric"] and row.get("parent_metric"):
        print(f"val_bpb {row['metric']:.6f}, best before {row['parent_metric']:.6f}, change "
              f"{row['metric'] - row['parent_metric']:+.6f}, noise floor {row['floor']:.6f} ({row['floor_source']})")
    for name in ("detail", "confirm", "marks"):
        if row.get(name):
            print(f"{name}: {row[name]}")
    log = folder_of(row) / "run.log"
    print(f"folder {log.parent.relative_to(ROOT)}")
    if row["status"] == "crash" and log.exists():
        print(f"last lines of {log}:", *log.read_text(errors="replace").splitlines()[-20:], sep="\n", file=sys.stderr)
    return int(row["status"] in ("crash", "checks_failed"))


def noise_command(args):
    segment = current(look(check_python, check_disk, check_git, check_fixed))
    if not kept(segment):
        raise Stop("nothing to measure yet. hint: uv run experiment.py run baseline")
    if args.repeats < 2:
        raise Stop(f"--repeats {args.repeats}: a standard deviation needs 2 or more")
    incumbent, scores = kept(segment)[-1], []
    for extra in range(1, args.repeats + 1):
        outcome = measure_probe(incumbent["commit_id"], (incumbent.get("seed") or 1337) + extra, args.gpu)
        if outcome["status"] != "scored" or key(outcome["record"]) != key(segment[0]):
            what = outcome["detail"] or "its data, budget or device are not those of the log"
            raise Stop(f"the incumbent {incumbent['commit']} was not scored again: {what}", code=1)
        scores.append(outcome["score"])
        say(f"{extra}/{args.repeats}: {outcome['score']:.6f}")
    noise = {"key": key(segment[0]), "commit": incumbent["commit"], "scores": scores, "n": len(scores)}
    noise |= {"mean": statistics.mean(scores), "sd": statistics.stdev(scores)}
    write_synced(STATE / "noise.json", noise)
    floor, source = noise_floor(segment)
    print(f"mean {noise['mean']:.6f}, standard deviation {noise['sd']:.6f}, n {noise['n']}; "
          f"the floor is now {floor:.6f} ({source})")
    if not noise["sd"]:
        say("all scores are equal. hint: does train.py use the seed?")


def one_line(row, width=60):
    score = f"{row['metric']:.6f}" if row["metric"] else "-"
    text = f"{short(row['description'], width)} ({row['reason']})"
    return f"{row['run']:>4} {row['commit']} {score:>9} {row['status']:<7} {text}"


def summary(rows):
    """The state of the segment in a few lines, for `status` and `resume`."""
    segment, top = current(rows), best(current(rows))
    if not top:
        return ["no scored run yet. hint: uv run experiment.py run baseline"]
    first, floor = kept(segment)[0]["metric"], noise_floor(segment)
    gain = first - top["metric"]
    lines = [
        f"best     {top['metric']:.6f} (run {top['run']}, {top['commit']}): {short(top['description'])}",
        f"baseline {first:.6f}, gain {gain:.6f} ({100 * gain / first:.2f}%), confidence {confidence(segment) or '-'}",
        f"runs     {len(segment)}, kept {len(kept(segment))} (all segments: {len(rows)})",
        f"floor    {floor[0]:.6f} ({floor[1]})",
    ]
    recent = [r for r in segment[-20:] if r["seconds"]]
    if recent:
        lines.append(f"time     {statistics.mean(r['seconds'] for r in recent):.0f} s per run")
        hours = (recent[-1]["timestamp"] - recent[0]["timestamp"]) / 3_600_000
        lines[-1] += f", {(len(recent) - 1) / hours:.1f} runs per hour" if hours else ""
    if len(segment) > 3 and not kept(segment[-3:]):
        lines.append("three runs in a row were not kept: step back, try another direction")
    return lines


def status_command(args):
    rows = look()
    print(*summary(rows), *map(one_line, rows[-5:]), sep="\n")
    with lock():
        for folder in open_folders():
            print(f"under way: {short(Run(folder).data['description'])!r}")


def resume_command(args):
    """All that an agent without memory needs, in under 4,000 characters."""
    rows = look()
    code = kept(current(rows))[-1]["commit"] if best(current(rows)) else "HEAD"
    branch = git_try("symbolic-ref", "-q", "--short", "HEAD")
    lines = [
        "GOAL  lower val_bpb (bits per byte) within the fixed time budget. Rules in full: program.md.",
        f"RULES edit train.py only; one idea per run; never edit {', '.join(FIXED)};",
        "      a gain below the noise floor is none; equal and shorter is one (--simpler); never stop by yourself.",
        f"CODE  the best train.py is that of {code}, on branch {branch}; a discarded one is in git: git show COMMIT",
        *summary(rows),
        "TRIED (newest first)" if rows else "TRIED nothing yet",
    ]
    for row in reversed(rows):
        if len("\n".join(lines)) > 3300:
            lines.append(f"     ... older ones: uv run experiment.py report --tsv ({len(rows)} rows)")
            break
        lines.append(one_line(row, 80) + (f" {json.dumps(row['asi'])[:200]}" if row["asi"] else ""))
    lines.append('NEXT  edit train.py, then: uv run experiment.py run "what it changes" --asi \'{"hypothesis": "..."}\'')
    print("\n".join(lines))


def check_command(args):
    """The same checks that `run` begins with; exit 0 only if it would start."""
    failed = 0
    look()
    for check in CHECKS:
        try:
            print(f"ok    {check.__name__[6:]}: {check()}")
        except Stop as stop:
            print(f"FAIL  {check.__name__[6:]}: {stop}")
            failed = 2
            if check is check_git:
                break  # the rest would only repeat it
    return failed


# ---- the report ----


def report_command(args):
    rows = look()
    if args.tsv:
        print("commit", "val_bpb", "memory_gb", "status", "description", sep="\t")
        for row in rows:
            score, memory = row["metric"] and f"{row['metric']:.6f}", row["metrics"].get("peak_memory_mb", 0) / 1024
            print(row["commit"], score or "", f"{memory:.1f}", row["status"], short(row["description"], None), sep="\t")
        return
    write_report(rows, args.watch)
    while args.watch:
        time.sleep(2)
        before, rows = rows, look()
        if len(rows) != len(before):
            write_report(rows, args.watch)


def write_report(rows, watch):
    floor, _ = noise_floor(current(rows))
    runs = [row | run_files(row) for row in rows]
    data = {"name": ROOT.name, "summary": summary(rows), "floor": floor, "watch": watch, "runs": runs}
    text = json.dumps(data).replace("<", "\\u003c")  # no text of the log can end the script element
    page = STATE / "report.new"
    page.write_text(PAGE.replace("/*data*/", text))
    page.replace(ROOT / "report.html")
    draw(current(rows), floor, ROOT / "progress.png")
    print("wrote report.html and progress.png", flush=True)


def run_files(row):
    """The diff and at most 150 points of the loss curve from a run's folder, if it is still there."""
    folder, diff, curve = folder_of(row), "", []
    with contextlib.suppress(OSError):
        diff = (folder / "train.diff").read_text(errors="replace").partition("\n@@")[2]
    with contextlib.suppress(OSError):
        for line in (folder / "steps.jsonl").read_text(errors="replace").split("\n"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                step = strict_json(line)
                curve.append([round(float(step["elapsed"]), 2), round(float(step["loss"]), 4)])
    more = f"\n... {len(diff) - 8000} more characters in {folder.name}/train.diff" if len(diff) > 8000 else ""
    return {"diff": diff[:8000] + more, "curve": curve[:: len(curve) // 150 + 1]}


def draw(segment, floor, path):
    """The segment as a picture: a point per run, the kept ones a labelled staircase, the noise band at the best."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 5.5), dpi=120)
    axes.set(xlabel="run", ylabel="val_bpb (lower is better)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if steps := kept(segment):
        x, y = [row["run"] for row in steps], [row["metric"] for row in steps]
        room = max(max(y) - min(y), 4 * floor, 1e-6)
        scored = [row["metric"] for row in segment if row["metric"]]
        bottom, top = min(min(y) - floor, *scored) - 0.05 * room, max(y) + 0.43 * room
        axes.set_ylim(bottom, top + 0.02 * room)
        axes.axhspan(min(y) - floor, min(y) + floor, color="#1f9d63", alpha=0.12, lw=0, label="noise band")
        other = [row for row in segment if row["status"] != "keep" and row["metric"]]
        inside, above = ([row for row in other if (row["metric"] > top) == far] for far in (False, True))
        axes.scatter([row["run"] for row in inside], [row["metric"] for row in inside], s=14, color="#9a9a9a", label="not kept")
        if above:  # bad runs must not press the others flat
            axes.scatter([row["run"] for row in above], [top] * len(above), s=18, marker="^", color="#9a9a9a", label="higher")
        failed = [row["run"] for row in segment if not row["metric"]]
        axes.scatter(failed, [top] * len(failed), s=18, marker="x", color="#c2410c", label="failed")
        axes.step([*x, segment[-1]["run"]], [*y, y[-1]], where="post", color="#1f9d63", lw=1.5)
        axes.scatter(x, y, s=30, color="#1f9d63", zorder=3, label="kept")
        free = 0
        for row in steps:  # a label where there is room for one
            if row["run"] >= free:
                free = row["run"] + max(1, len(segment) // 30)
                axes.annotate(short(row["description"], 32), (row["run"], row["metric"]), rotation=30, fontsize=7,
                              xytext=(3, 5), textcoords="offset points", parse_math=False)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, ncols=4)
        gain = y[0] - min(y)
        axes.set_title(f"{len(segment)} runs, {len(steps)} kept: {min(y):.6f}, {gain:.6f} below the baseline", loc="left")
    figure.tight_layout()
    figure.savefig(path, format="png")
    plt.close(figure)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>autoresearch</title>
<style>
:root { color-scheme: light dark; --bg: #fbfbfa; --ink: #1d1f21; --dim: #6a6f75; --line: #dddfe2; --soft: #f1f2f3;
  --keep: #117a4b; --discard: #858b92; --crash: #bf3d0a; --checks_failed: #94690a; }
@media (prefers-color-scheme: dark) { :root { --bg: #151719; --ink: #e6e8ea; --dim: #9ba1a8; --line: #33373b;
  --soft: #1f2225; --keep: #4cc38a; --discard: #878e96; --crash: #ff8a5c; --checks_failed: #e0b04a; } }
body { margin: 0 auto; padding: 16px; max-width: 1080px; background: var(--bg); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0 0 8px; } pre { overflow-x: auto; margin: 0; font-size: 12.5px; }
.dim { color: var(--dim); white-space: pre-wrap; overflow-wrap: anywhere; }
.summary { font: 13px/1.5 ui-monospace, monospace; }
.keep { --c: var(--keep); } .discard { --c: var(--discard); } .crash { --c: var(--crash); }
.checks_failed { --c: var(--checks_failed); }
svg { display: block; width: 100%; margin-top: 12px; } svg .axis { stroke: var(--line); }
svg text { fill: var(--dim); font-size: 11px; }
.step, .curve { fill: none; stroke: var(--keep); stroke-width: 1.5; } .band { fill: var(--keep); opacity: .13; }
circle, .x, .higher { cursor: pointer; fill: var(--c); } .x { stroke: var(--c); stroke-width: 2; }
.bar { display: flex; gap: 8px; margin: 12px 0; align-items: center; }
select, input { font: inherit; color: inherit; background: var(--soft); border: 1px solid var(--line);
  border-radius: 6px; padding: 5px 8px; min-width: 0; } input { flex: 1; }
table { width: 100%; border-collapse: collapse; }
td, th { padding: 5px 8px; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th button { all: unset; cursor: pointer; color: var(--dim); font-weight: 600; white-space: nowrap; }
th button:focus-visible { outline: auto; }
[aria-sort=descending] button::after { content: " \\2193"; } [aria-sort=ascending] button::after { content: " \\2191"; }
.n { text-align: right; font-variant-numeric: tabular-nums; } .text { overflow-wrap: anywhere; width: 100%; }
td.status { color: var(--c); font-weight: 600; white-space: nowrap; }
tr.run { cursor: pointer; } tr.run:hover, tr.open, .detail { background: var(--soft); }
.detail div { display: grid; gap: 10px; grid-template-columns: minmax(0, 1fr); }
.add { color: var(--keep); } .del { color: var(--crash); }
@media (max-width: 620px) { .wide { display: none; } td, th { padding: 5px 4px; font-size: 13px; } body { padding: 12px; } }
</style></head><body>
<h1></h1><div class="summary dim"></div><svg id="chart" role="img" aria-label="val_bpb of each run"></svg>
<div class="bar"><select aria-label="status"><option value="">all</option><option>keep</option><option>discard</option>
<option>crash</option><option>checks_failed</option></select>
<input type="search" placeholder="filter by text" aria-label="text"><span id="count" class="dim"></span></div>
<table><thead><tr></tr></thead><tbody></tbody></table>
<script id="data" type="application/json">/*data*/</script>
<script>
"use strict";
const $ = (selector) => document.querySelector(selector);
const data = JSON.parse($("#data").textContent), runs = data.runs;
const state = { sort: "run", down: true, status: "", text: "", open: [] };
Object.assign(state, history.state); // what is open, sorted and filtered outlives the page's own reload
const save = () => history.replaceState(state, "");

// Text of the log goes in by textContent only: it is never markup.
function element(parent, tag, attributes = {}, text = "") {
  const svg = parent instanceof SVGElement || tag === "svg";
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  node.textContent = text;
  return parent.appendChild(node);
}
const score = (r) => r.metric ? r.metric.toFixed(6) : "";
const change = (r) => r.metric && r.parent_metric ? r.metric - r.parent_metric : NaN;
const signed = (r) => Number.isNaN(change(r)) ? "" : (change(r) > 0 ? "+" : "") + change(r).toFixed(6);

const columns = [ // name, class, what is sorted by, what is shown
  ["run", "n", (r) => r.run, (r) => r.run], ["status", "status", (r) => r.status, (r) => r.status],
  ["val_bpb", "n", (r) => r.metric || NaN, score], ["change", "n wide", change, signed],
  ["seconds", "n wide", (r) => r.seconds, (r) => r.seconds.toFixed(0)],
  ["description", "text", (r) => r.description, (r) => r.description.slice(0, 200)]];

function table() {
  const value = columns.find((c) => c[0] === state.sort)[2], words = state.text.toLowerCase();
  const shown = runs.filter((r) => (!state.status || r.status === state.status) &&
    [r.description, r.reason, r.commit, JSON.stringify(r.asi)].join(" ").toLowerCase().includes(words));
  shown.sort((a, b) => {
    const x = value(a), y = value(b);
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y); // no value: last, both ways
    return (x < y ? -1 : x > y ? 1 : a.run - b.run) * (state.down ? -1 : 1);
  });
  $("thead tr").replaceChildren(); $("tbody").replaceChildren();
  for (const [name, style] of columns) {
    const order = name !== state.sort ? "none" : state.down ? "descending" : "ascending";
    const th = element($("thead tr"), "th", { class: style, "aria-sort": order });
    element(th, "button", { "data-sort": name }, name).onclick = () => {
      state.down = state.sort === name && !state.down; state.sort = name; table();
    };
  }
  for (const r of shown) {
    const tr = element($("tbody"), "tr", { class: "run " + r.status, tabindex: 0, "data-run": r.run });
    for (const [, style, , show] of columns) element(tr, "td", { class: style }, show(r));
    tr.onclick = () => toggle(r, tr);
    tr.onkeydown = (event) => { if (event.key === "Enter") toggle(r, tr); };
    if (state.open.includes(r.run)) detail(r, tr);
  }
  $("#count").textContent = shown.length + " of " + runs.length;
  save();
}

function toggle(r, tr) {
  const open = tr.classList.contains("open");
  state.open = state.open.filter((run) => run !== r.run).concat(open ? [] : [r.run]);
  if (open) { tr.classList.remove("open"); tr.nextSibling.remove(); } else detail(r, tr);
  save();
}

function detail(r, tr) {
  const row = document.createElement("tr"), box = element(element(row, "td", { colspan: 6 }), "div");
  tr.classList.add("open"); row.className = "detail"; tr.after(row);
  const facts = [r.description, [r.status, r.reason, r.detail, r.marks].filter(Boolean).join(": "),
    `commit ${r.commit}, segment ${r.segment}, data ${r.data_id ?? "-"}, ${r.device ?? "-"}, ` +
    `budget ${r.budget ?? "-"} s, seed ${r.seed ?? "-"}, ${new Date(r.timestamp).toLocaleString()}`,
    Object.entries(r.metrics).map(([name, number]) => name + " " + number).join(", ")];
  if (r.parent_metric) facts.push(`best before ${r.parent_metric.toFixed(6)}, noise floor ${r.floor} (${r.floor_source})`);
  element(box, "span", { class: "dim" }, facts.join("\\n"));
  if (Object.keys(r.asi).length) element(box, "pre", { class: "asi" }, JSON.stringify(r.asi, null, 1));
  if (r.curve.length > 1) curve(box, r.curve);
  const diff = r.diff && element(box, "pre", { class: "diff" });
  for (const line of r.diff ? r.diff.split("\\n") : [])
    element(diff, "span", { class: { "+": "add", "-": "del" }[line[0]] || "dim" }, line + "\\n");
}

const path = (points) => "M" + points.map(([x, y]) => x.toFixed(1) + " " + y.toFixed(1)).join("L");

function curve(box, points) {
  const width = Math.max(240, Math.min(560, innerWidth - 70)), height = 130;
  const svg = element(box, "svg", { viewBox: `0 0 ${width} ${height}`, style: `max-width: ${width}px` });
  const losses = points.map((p) => p[1]), low = Math.min(...losses), high = Math.max(...losses);
  const [end, last] = points[points.length - 1];
  const place = ([t, loss]) => [4 + t / (end || 1) * (width - 8), 8 + (high - loss) / (high - low || 1) * (height - 30)];
  element(svg, "path", { class: "curve", d: path(points.map(place)) });
  element(svg, "text", { x: 4, y: height - 6 }, `training loss ${high.toFixed(3)} to ${last.toFixed(3)} in ${end.toFixed(0)} s`);
}

function chart() {
  const svg = $("#chart"), width = svg.clientWidth || 800, height = Math.max(220, Math.min(360, width * 0.5)), left = 58;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const last = runs[runs.length - 1], segment = runs.filter((r) => r.segment === last.segment), first = segment[0].run;
  const kept = segment.filter((r) => r.status === "keep" && r.metric), scores = kept.map((r) => r.metric);
  if (!kept.length) return element(svg, "text", { x: 8, y: 24 }, "no scored run yet");
  const low = Math.min(...scores), high = Math.max(...scores), room = Math.max(high - low, 4 * data.floor, 1e-6);
  const all = segment.map((r) => r.metric).filter(Boolean), bottom = Math.min(low - data.floor, ...all) - 0.05 * room;
  const top = high + 0.4 * room;  // bad runs must not press the others flat
  const x = (run) => left + 8 + (run - first) / Math.max(1, last.run - first) * (width - left - 24);
  const y = (m) => 14 + (top - Math.min(m, top)) / (top - bottom) * (height - 44);
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const m = bottom + (top - bottom) * part, run = Math.round(first + part * (last.run - first));
    element(svg, "line", { class: "axis", x1: left, x2: width, y1: y(m), y2: y(m) });
    element(svg, "text", { x: left - 6, y: y(m) + 4, "text-anchor": "end" }, m.toFixed(4));
    if (segment.length > 4 || !part) element(svg, "text", { x: x(run), y: height - 8, "text-anchor": "middle" }, run);
  }
  const above = y(low + data.floor), below = y(low - data.floor);
  element(svg, "rect", { class: "band", x: left, width: width - left, y: above, height: below - above });
  const steps = kept.flatMap((r, i) => [[x(r.run), y(scores[Math.max(0, i - 1)])], [x(r.run), y(r.metric)]]);
  element(svg, "path", { class: "step", d: path([...steps, [x(last.run), y(scores[scores.length - 1])]]) });
  for (const r of segment) {
    const cx = x(r.run), cy = r.metric ? y(r.metric) : 14;
    const mark = r.metric > top ? element(svg, "path", { class: "higher " + r.status, d: `M${cx - 4} ${cy + 3}h8l-4-7z` })
      : r.metric ? element(svg, "circle", { class: r.status, cx, cy, r: r.status === "keep" ? 4.5 : 3 })
      : element(svg, "path", { class: "x " + r.status, d: `M${cx - 3} ${cy - 3}l6 6m0-6l-6 6` });
    const text = `run ${r.run} ${r.status} (${r.reason})\\n${score(r)} ${signed(r)}\\n${r.description.slice(0, 160)}`;
    element(mark, "title", {}, text);
    mark.onclick = () => {
      const tr = $(`tr[data-run="${r.run}"]`);
      if (tr && !tr.classList.contains("open")) toggle(r, tr);
      tr?.scrollIntoView({ block: "center" });
    };
  }
}

$("h1").textContent = data.name;
$(".summary").textContent = data.summary.join("\\n");
for (const [tag, name] of [["select", "status"], ["input", "text"]]) {
  $(tag).value = state[name];
  $(tag).oninput = (event) => { state[name] = event.target.value; table(); };
}
if (runs.length) { chart(); addEventListener("resize", chart); }
table();
if (data.watch) setTimeout(() => location.reload(), 5000);
</script></body></html>
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run, noise, report, *_ = (commands.add_parser(name) for name in ("run", "noise", "report", "status", "resume", "check"))
    run.add_argument("description", help="what it changes, in a few words")
    run.add_argument("--asi", default="{}", help='notes to keep with the row, a JSON object: {"hypothesis": "..."}')
    run.add_argument("--simpler", action="store_true", help="also keep it when equal within noise and shorter")
    run.add_argument("--confirm", action="store_true", help="decide a result within noise on other seeds")
    run.add_argument("--budget", type=float, default=1.5, help="warn above this multiple of the best run's memory")
    noise.add_argument("--repeats", type=int, default=3, help="runs, each on its own seed")
    for command in (run, noise):
        command.add_argument("--gpu", help="the GPU to run on (CUDA_VISIBLE_DEVICES)")
    report.add_argument("--tsv", action="store_true", help="print commit, val_bpb, memory_gb, status, description")
    report.add_argument("--watch", action="store_true", help="rewrite after every run; the page reloads itself")
    args = parser.parse_args()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    try:
        return globals()[f"{args.command}_command"](args)
    except Stop as stop:
        say(str(stop))
        return stop.code
    except OSError as error:
        say(f"{error}. hint: if the disk is full, make room; the next command finishes what is open")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
