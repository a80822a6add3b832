"""main() of train.py with the profile "full", cut small: see tests/test_full_profile.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train

SMALL = {
    "COMPILE": False,
    "DEPTH": 5,
    "ASPECT_RATIO": 8,
    "HEAD_DIM": 16,
    "TOTAL_BATCH_SIZE": 8192,
    "DEVICE_BATCH_SIZE": 2,
    "MAX_LOGITS": 2**21,
}

if __name__ == "__main__":
    for name, value in SMALL.items():
        setattr(train, name, value)
    with train.exit_codes():
        train.main()
