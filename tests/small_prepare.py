"""prepare.py with small sizes, in a process: python tests/small_prepare.py [options of prepare.py].

32 tokens a row, 40 validation rows, a vocabulary of 320; climbmix has six training shards. A hub
that does not answer is left after 2 s. What `--data` notes goes below AUTORESEARCH_CACHE.

Environment: DRILL, what goes wrong on the way:
    kill:N       SIGKILL after N events; a file written counts 100, a text encoded 1
    full disk    no file can grow over 5,000 bytes
    patient      a silent hub is waited for, 60 s
"""

import os
import resource
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import prepare
from harness import data, documents
from harness.retrying import Limits
from harness.sources import climbmix_source

DRILL = os.environ.get("DRILL", "")


def small_settings(name: str | None = None) -> prepare.Settings:
    return replace(prepare.make_settings(name), vocab_size=320, seq_len=32, eval_tokens=32 * 40)


def open_small_source(settings: prepare.Settings, num_shards: int):
    seconds = 60 if DRILL == "patient" else 2
    limits = Limits(pause=0.01, connect=seconds, read=seconds)
    if settings.data == "climbmix":
        return climbmix_source(settings, num_shards, limits, last_shard=6, tokenizer_shards=2)
    return data.open_source(settings, num_shards, limits)


def kill_after(events: int) -> None:
    left = [events]

    def counted(function, cost):
        def call(*args):
            left[0] -= cost
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        return call

    os.replace = counted(os.replace, 100)
    encode = counted(documents.DocumentEncoder.__call__, 1)
    documents.DocumentEncoder.__call__ = lambda self, text: encode(self, text)


if __name__ == "__main__":
    if DRILL.startswith("kill:"):
        kill_after(int(DRILL.removeprefix("kill:")))
    if DRILL == "full disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    checkout = Path(os.environ["AUTORESEARCH_CACHE"]) / "checkout"
    run = partial(data.main, make_settings=small_settings, open_source=open_small_source)
    run(sys.argv[1:], checkout=checkout)
