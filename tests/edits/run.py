"""Run edited copies of train.py for a few steps: python tests/edits/run.py FOLDER FILE...

Each file runs in a process of its own, forked from this one, which has imported torch once. Its
folder below FOLDER gets out.txt, err.txt, code.txt, the evaluator's eval.jsonl and, where the file
is a train.py with our structure, facts.json. Sizes are small where the file does not set its own.
"""

import json
import os
import runpy
import sys
import traceback
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
import torch._dynamo  # by the model on the meta device: it takes 3 s, here once for all
import torch.nn.functional as F

import prepare
from harness.exit_codes import exit_codes

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 3
SMALL = {
    "COMPILE": False,
    "DEPTH": 2,
    "ASPECT_RATIO": 16,
    "HEAD_DIM": 16,
    "TOTAL_BATCH_SIZE": 2**10,
}


class CountingClock(prepare.Clock):
    """A budget of STEPS steps."""

    count = 0

    def done(self):
        self.count += 1
        return self.count > STEPS

    def elapsed(self):
        if self.started is None or self.training_seconds is not None:
            return super().elapsed()
        return min(max(self.count - 0.5, 0) / STEPS, 1) * prepare.TIME_BUDGET


def load(path: Path, source: str, name: str) -> types.ModuleType:
    """The file as a module that is not run as a program."""
    module = types.ModuleType(name)
    module.__file__ = str(ROOT / "train.py")  # a file from elsewhere that is read is marked
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), vars(module))
    return module


def run_train(path: Path, source: str, original: types.ModuleType) -> None:
    """main() of an edited train.py, with small sizes where the edit changed none."""
    train = load(path, source, "train")
    for knob, value in SMALL.items():
        if getattr(train, knob) == getattr(original, knob):
            setattr(train, knob, value)
    train.Clock = CountingClock
    evaluate_bpb = train.evaluate_bpb

    def evaluate_and_compare(model, tokenizer, rows, facts):
        """Is what trains what is scored? The loss beside the cross-entropy of the logits."""
        x, y, _ = next(prepare.make_dataloader(tokenizer, 4, prepare.MAX_SEQ_LEN, "train"))
        model.eval()
        with torch.no_grad():
            loss = model(x, y).item()
            logits = model(x)
        model.train()
        if not isinstance(logits, torch.Tensor):
            return evaluate_bpb(model, tokenizer, rows, facts)
        facts = {
            "loss": loss,
            "cross_entropy": F.cross_entropy(logits.flatten(0, 1), y.flatten()).item(),
            "largest_logit": logits.abs().max().item(),
            "parameters": sorted(name for name, _ in model.named_parameters()),
            "rows": rows,
        }
        Path("facts.json").write_text(json.dumps(facts))
        return evaluate_bpb(model, tokenizer, rows, facts)

    train.evaluate_bpb = evaluate_and_compare
    with exit_codes():
        train.main()


def run_forked(path: Path, source: str, folder: Path, original: types.ModuleType) -> int:
    """The exit code of the file in a child process."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        os.chdir(folder)
        for name, number in (("out.txt", 1), ("err.txt", 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        os.environ["AUTORESEARCH_RUN_DIR"] = str(folder)
        sys.argv = [str(path)]
        if "def fit_batch" in source:
            run_train(path, source, original)
        else:
            runpy.run_path(str(path), run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)  # a fork must not meet running threads
    below = Path(sys.argv[1])
    # Read before a train.py is loaded: from then on, a file from elsewhere is data that is marked
    sources = {path: path.read_text() for path in map(Path, sys.argv[2:])}
    train = ROOT / "train.py"
    original = load(train, train.read_text(), "original")
    for path, source in sources.items():
        folder = below / path.stem
        folder.mkdir()
        code = run_forked(path, source, folder, original)
        (folder / "code.txt").write_text(str(code))


if __name__ == "__main__":
    main()
