"""Checkpoints: save while training, find the newest one that fits, go on from it; the options."""

import argparse
import hashlib
import sys
import time
from pathlib import Path
from types import ModuleType

import torch

import prepare
from harness.common import UserError, atomic_file

FOLDER = Path("checkpoints")  # below it, a folder for each run
KEPT = 2  # checkpoints of a run

# Knobs of train.py that change nothing in what is computed
FREE_KNOBS = {"ATTENTION", "COMPILE", "CHECKPOINT_EVERY", "PREVIEW_EVERY", "DEVICE_BATCH_SIZE"}
PLAIN = (int, float, str, bool, tuple)


def knobs_of(module: ModuleType) -> dict[str, str]:
    """The constants of train.py that a resumed run must share, as text."""
    found = {}
    for name, value in vars(module).items():
        if name.isupper() and isinstance(value, PLAIN) and name not in FREE_KNOBS:
            found[name] = repr(value)
    return found


def differences(mine: dict, theirs: dict) -> str:
    """In words, what differs between this run and that of a checkpoint: "" if nothing does."""
    names = [n for n in {**theirs, **mine} if mine.get(n) != theirs.get(n)]
    return "; ".join(f"{n} {theirs.get(n, 'unset')}, not {mine.get(n, 'unset')}" for n in names)


def parse_arguments() -> argparse.Namespace:
    """The options of train.py: save, resume (a path, "newest" or None), sample (a number)."""
    parser = argparse.ArgumentParser(description="Train the model for the time budget.")
    add = parser.add_argument
    add("--save", action="store_true", help="keep the two newest checkpoints in checkpoints/")
    add("--resume", nargs="?", const="newest", metavar="PATH", help="go on from a checkpoint")
    add("--sample", type=int, default=0, metavar="N", help="continue N training texts at the end")
    return parser.parse_args()


class Saver:
    """Writes the checkpoints of one run, and loads those of an earlier one.

    Rank 0 writes: all ranks hold the same weights and the same state of the optimizer.
    """

    def __init__(self, module: ModuleType, enabled: bool):
        """module: train.py, whose knobs say which run a checkpoint belongs to."""
        self.enabled = enabled
        self.knobs = knobs_of(module)
        self.knobs["data_id"] = prepare.load_manifest(prepare.settings().cache)["data_id"]
        self.source = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
        self.folder = FOLDER / time.strftime("%Y%m%d-%H%M%S")

    def save(self, run, finished: bool = False) -> None:
        """Keep the state of a run: its parts, and how far it is. A full disk is only a warning."""
        if not self.enabled or prepare.ranks()[0]:
            return
        state = {
            "knobs": self.knobs,
            "source": self.source,
            "step": run.step,
            "elapsed": run.elapsed,
            "finished": finished,
            "random": torch.get_rng_state(),
            "parts": {name: part.state_dict() for name, part in parts_of(run).items()},
        }
        path = self.folder / f"{run.step:08d}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in sorted(self.folder.glob("*.pt"))[:-KEPT]:
                old.unlink()
            with atomic_file(path) as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            print(f"checkpoint: {path} not written ({error}); training goes on", file=sys.stderr)
            return
        for old in sorted(self.folder.glob("*.pt"))[:-KEPT]:
            old.unlink(missing_ok=True)

    def resume(self, run, wanted: str) -> None:
        """Continue the run of a checkpoint: "newest" (the newest one that fits) or its path.

        Raises:
            UserError: no checkpoint fits, with the reason for each; its run has finished; the code
            of the model was edited.
        """
        if wanted == "newest":
            paths = sorted(FOLDER.glob("*/*.pt"), reverse=True)
        else:
            paths = [Path(wanted)]
        if not paths:
            raise UserError(
                f"no checkpoint in {FOLDER.resolve()}. hint: 'train.py --save' writes them"
            )
        reasons = []
        for path in paths:
            state, reason = self.try_load(path, run.device)
            if state is not None:
                break
            reasons.append(f"{path} {reason}")
            print(f"skipped    {reasons[-1]}", flush=True)
        else:
            raise UserError(
                f"no checkpoint fits: {'; '.join(reasons[:5])}. "
                "hint: set the knobs as they were, or start again without --resume"
            )
        if state["finished"]:
            raise UserError(
                f"the run of {path} has finished ({state['elapsed']:.0f} s). "
                "hint: start a new one without --resume, or name an earlier file with --resume PATH"
            )
        if state["source"] != self.source:
            print("resumed    train.py was edited since, its knobs are the same", flush=True)
        try:
            for name, part in parts_of(run).items():
                part.load_state_dict(state["parts"][name])
        except (RuntimeError, ValueError, KeyError) as error:  # other names, shapes or groups
            text = str(error).strip().replace("\n", " ")[:300]
            raise UserError(
                f"{path} does not fit the model of this train.py: {text}. "
                "hint: put train.py back as it was, or start again without --resume"
            ) from None
        torch.set_rng_state(state["random"].cpu())
        run.step = state["step"]
        run.elapsed = state["elapsed"]
        self.folder = path.parent
        run.log.say("resumed", f"{path}, step {run.step}, {run.elapsed:.0f} s")

    def try_load(self, path: Path, device: torch.device) -> tuple[dict | None, str]:
        """(state, "") or (None, why this file does not fit)."""
        try:
            state = torch.load(path, map_location=device, weights_only=True)
            knobs = state["knobs"]
        except Exception as error:  # truncated, empty, not ours: torch has a dozen errors for it
            text = str(error).partition("\n")[0][:120]
            return None, f"is missing or damaged ({type(error).__name__}: {text})"
        different = differences(self.knobs, knobs)
        return (None, f"has {different}") if different else (state, "")


def parts_of(run) -> dict:
    """The parts of a run that have a state."""
    return {"model": run.model, "optimizer": run.optimizer, "scaler": run.scaler, "log": run.log}
