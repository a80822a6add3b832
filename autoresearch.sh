#!/usr/bin/env bash
# Finds or builds the environment, then hands over to `python -m harness` (see --help for commands).
#
#   bash autoresearch.sh              one experiment: trains for the budget, prints METRIC lines
#   bash autoresearch.sh COMMAND ...  the other commands, all listed by --help
#
# AUTORESEARCH_PYTHON uses that interpreter and sets nothing up. The .venv is built by uv where that
# is installed, else by pip; and built again when pyproject.toml changed or its Python went away.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2

say() { printf 'autoresearch: %s\n' "$*" >&2; }
refuse() { say "$*"; exit 2; }

newest_python() { # the newest suitable one on PATH
  local name
  for name in python3.14 python3.13 python3.12 python3.11 python3.10 python3 python; do
    if "$name" -c 'import sys, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' \
      >/dev/null 2>&1; then
      command -v "$name"
      return
    fi
  done
  return 1
}

build() { # .venv with the pinned dependencies
  local base
  if command -v uv >/dev/null; then
    UV_PROJECT_ENVIRONMENT=.venv uv sync --quiet --inexact >&2 # keeps ray, see docs/fleet.md
    return
  fi
  base=$(newest_python) || refuse "no Python 3.10 to 3.14 with pip on PATH. hint: install one or uv"
  rm -rf .venv && "$base" -m venv .venv || return
  .venv/bin/python - >.venv/requirements.txt <<'END' || return
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
print("\n".join(project["project"]["dependencies"] + project["dependency-groups"]["dev"]))
END
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r .venv/requirements.txt >&2
}

PY=${AUTORESEARCH_PYTHON:-.venv/bin/python}
if [ -n "${AUTORESEARCH_PYTHON:-}" ]; then
  "$PY" -c 'import sys, filelock; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    refuse "AUTORESEARCH_PYTHON=$PY is no Python 3.10 or newer with our packages. hint: unset it"
else
  unset PYTHONPATH PYTHONHOME # other packages of this machine must not stand in for the pinned ones
  if ! cmp -s pyproject.toml .venv/stamp || ! "$PY" -c '' 2>/dev/null; then
    rm -f run.log # else it would be taken for the log of this command
    say "setting up .venv (first use, pyproject.toml changed, or its Python is gone)"
    build || refuse "could not set up .venv (see above). hint: remove .venv, repeat with a network"
    cp pyproject.toml .venv/stamp
  fi
fi
exec "$PY" -m harness "$@"
