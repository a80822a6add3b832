"""The fixed machinery around train.py and prepare.py; `python -m harness --help` lists it."""
