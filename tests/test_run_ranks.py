"""One experiment over several processes: AUTORESEARCH_RANKS, or the GPUs that prepare.py sees."""

import pytest
from helpers import PREPARE, Checkout, git, is_alive, make_checkout

from harness.common import UserError
from harness.ranks import number_of_ranks, rank_environments

# The rank that the test names fails after all are up; the others wait for it, as in an all-reduce.
FAILING = """
import os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
Path(f"pid{rank}").write_text(str(os.getpid()))
while not all(Path(f"pid{r}").exists() for r in range(3)):
    time.sleep(0.02)
print("rank", rank, "is up", flush=True)
if rank == "FAILS":
    END
time.sleep(600)
"""

GLOO = """
import os
import torch
import torch.distributed as dist
import prepare
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    prepare.evaluate(total.item())
    print(f"METRIC val_bpb={total.item():.6f}\\nMETRIC threads={os.environ['OMP_NUM_THREADS']}")
dist.destroy_process_group()
"""


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(make_checkout(tmp_path / "clone", GLOO))


@pytest.mark.slow
def test_two_ranks_train_together_and_print_one_score(checkout):
    done = checkout.run(AUTORESEARCH_RANKS="2", OMP_NUM_THREADS="1", RANK="7", WORLD_SIZE="9")
    assert done.returncode == 0, done.err
    assert done.out == "\nMETRIC val_bpb=3.000000\nMETRIC threads=1\n"


@pytest.mark.parametrize("fails", ["0", "2"])
@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("print('loss is nan'); sys.exit(3)", 3, "diverged: loss is nan"),
        ("print('no room'); sys.exit(4)", 4, "out of memory (killed or reported): no room"),
        ("os.kill(os.getpid(), 9)", 4, "out of memory (killed or reported): rank FAILS is up"),
        ("sys.exit('lost')", 1, "train.py crashed (exit code 1): lost"),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_its_code_and_words(
    checkout, fails, end, code, message
):
    train = FAILING.replace("END", end).replace("FAILS", fails)
    done = checkout.run(train, AUTORESEARCH_RANKS="3")
    assert done.returncode == code, done.err
    assert done.err.splitlines()[1] == f"autoresearch: {message.replace('FAILS', fails)}"
    assert done.err.count(message.replace("FAILS", fails)) == 1
    assert not any(is_alive(checkout.pid(f"pid{rank}")) for rank in range(3))


@pytest.mark.slow
def test_a_timeout_ends_all_ranks(checkout):
    train = FAILING.replace("END", "pass").replace("FAILS", "0")
    done = checkout.run(train, AUTORESEARCH_RANKS="3", AUTORESEARCH_HARD_LIMIT="2")
    assert done.returncode == 124
    assert not any(is_alive(checkout.pid(f"pid{rank}")) for rank in range(3))


def test_a_train_py_for_one_process_is_told_how_to_run(checkout):
    alone = "import prepare\nprint(f'METRIC val_bpb={prepare.evaluate(1.25):.6f}')\n"
    done = checkout.run(alone, AUTORESEARCH_RANKS="2")
    assert done.returncode == 5
    assert "recorded 2 scores in one run. hint: a train.py for one process needs" in done.err
    assert checkout.run(alone, AUTORESEARCH_RANKS="1").returncode == 0


def test_there_is_a_rank_for_each_gpu_unless_a_number_is_asked_for():
    assert number_of_ranks(None, {}) == number_of_ranks(None, {"gpus": 0}) == 1
    assert number_of_ranks(None, {"gpus": 8}) == 8
    assert number_of_ranks(2, {"gpus": 8}) == number_of_ranks(2, {"gpus": 0}) == 2
    with pytest.raises(UserError, match="AUTORESEARCH_RANKS=4, but there are 2 GPUs"):
        number_of_ranks(4, {"gpus": 2})


def test_the_gpus_that_prepare_sees_are_used(checkout):
    (checkout.root / "prepare.py").write_text(PREPARE.replace('"cache": "",', '"gpus": 3,'))
    git(checkout.root, "commit", "-qam", "three GPUs")
    train = FAILING.replace("END", "sys.exit(3)").replace("FAILS", "1")
    assert checkout.run(train).returncode == 3
    assert (checkout.root / ".autoresearch/last/rank2.log").read_text() == "rank 2 is up\n"


def test_ranks_share_the_cores_and_one_address():
    first, second = rank_environments({"HOME": "/h"}, 2)
    assert (first.pop("RANK"), second.pop("RANK")) == ("0", "1")
    assert (first.pop("LOCAL_RANK"), second.pop("LOCAL_RANK")) == ("0", "1")
    assert first == second and first["WORLD_SIZE"] == "2" and int(first["OMP_NUM_THREADS"]) >= 1
    assert rank_environments({"HOME": "/h"}, 1) == [{"HOME": "/h"}]


UNIFORM = """
import os
import torch
import torch.distributed as dist
from prepare import Tokenizer, evaluate_bpb
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    dist.init_process_group("gloo")
tokenizer = Tokenizer.from_directory()

class Uniform(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(tokenizer.get_vocab_size()))
    def forward(self, x):
        return self.table.expand(*x.shape, -1)

bpb = evaluate_bpb(Uniform(), tokenizer, 64)
if int(os.environ.get("RANK", 0)) == 0:
    print(f"METRIC val_bpb={bpb:.6f}")
"""


@pytest.mark.slow
def test_the_real_evaluator_gives_two_ranks_the_score_of_one(tmp_path, prepared):
    checkout = Checkout(make_checkout(tmp_path / "clone", UNIFORM, prepare=None))
    checkout.environment |= prepared
    one = checkout.run()
    two = checkout.run(AUTORESEARCH_RANKS="2", OMP_NUM_THREADS="1")
    assert (one.returncode, two.returncode) == (0, 0), one.err + two.err
    assert one.out == two.out and one.out.startswith("\nMETRIC val_bpb=")
