#!/usr/bin/env bash
# One experiment, from nothing to METRIC lines.
#
#   bash autoresearch.sh            set up and prepare on first use, train for the budget, print METRIC lines
#   bash autoresearch.sh test ...   run the tests in the same environment (arguments go to pytest)
#   bash autoresearch.sh session    accept the fixed files as they are committed now (starts a new session)
#
# Exit: 0 scored, 1 crash, 2 refused configuration or usage, 3 diverged, 4 out of memory, 5 void score,
#       124 timeout, 130 interrupted. METRIC lines go to stdout, and only after exit 0; all else goes to stderr.
# Environment: AUTORESEARCH_TIME_BUDGET, _PROFILE, _DATA, _CACHE, _SEED (see README); _PYTHON uses that interpreter
#       and sets nothing up; _RUN_DIR gets the run's record (default .autoresearch/last); _HARD_LIMIT in seconds.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2

FIXED="prepare.py data.py machine.py autoresearch.sh experiment.py pyproject.toml"
SESSION=refs/autoresearch/session # a git ref: out of reach of edits, shared by all worktrees

say() { printf 'autoresearch: %s\n' "$*" >&2; }
fail() { # code, what happened: one line, the end of the log, no METRIC
  say "$2"
  if [ -s run.log ]; then
    say "last 50 lines of run.log:"
    tail -n 50 run.log >&2
  fi
  exit "$1"
}

setup() {
  PY=${AUTORESEARCH_PYTHON:-.venv/bin/python}
  if [ -n "${AUTORESEARCH_PYTHON:-}" ] || cmp -s pyproject.toml .venv/stamp; then return; fi
  rm -f run.log
  say "setting up .venv (first use, or pyproject.toml changed)"
  if command -v uv >/dev/null; then
    uv sync --quiet >&2
  else
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail 2 "needs python3 3.10 or newer. hint: install it, or uv"
    python3 -m venv .venv &&
      sed -n 's/^ *"\([a-z]*==[^"]*\)".*/\1/p' pyproject.toml >.venv/requirements.txt &&
      .venv/bin/python -m pip install --quiet --disable-pip-version-check -r .venv/requirements.txt >&2
  fi || fail 2 "could not set up .venv (see above). hint: remove .venv and try again with a network"
  cp pyproject.toml .venv/stamp
}

check_fixed() { # the fixed files are those of the commit at which the session began
  git rev-parse -q --verify HEAD >/dev/null 2>&1 || {
    say "no git commit here: that the fixed files are unchanged is not checked"
    return
  }
  git rev-parse -q --verify $SESSION >/dev/null || git update-ref $SESSION HEAD
  local changed="" f
  for f in $FIXED; do
    [ "$(git rev-parse -q --verify "$SESSION:./$f")" = "$(git hash-object --no-filters "$f" 2>/dev/null)" ] || changed+=" $f"
  done
  [ -z "$changed" ] || fail "$1" "fixed file changed since the session began ($(git rev-parse --short $SESSION)):$changed. \
hint: 'git checkout $SESSION --$changed' restores; if it was meant, commit it and run 'bash autoresearch.sh session'"
}

run() {
  local budget=${AUTORESEARCH_TIME_BUDGET:-300} run_dir=${AUTORESEARCH_RUN_DIR:-.autoresearch/last} code why pid dog limit
  [[ $budget =~ ^[0-9]+([.][0-9]+)?$ ]] || fail 2 "AUTORESEARCH_TIME_BUDGET=$budget is not a number of seconds"
  limit=${AUTORESEARCH_HARD_LIMIT:-$((2 * 10#${budget%.*} + 120))}
  rm -f run.log # a number can never come from an earlier run
  mkdir -p "$run_dir" && rm -f "$run_dir/eval.jsonl" "$run_dir/steps.jsonl" "$run_dir/timeout" || fail 2 "cannot write to $run_dir"
  run_dir=$(cd "$run_dir" && pwd)
  check_fixed 2
  "$PY" prepare.py >run.log 2>&1 || fail $(($? == 130 ? 130 : 2)) "prepare.py failed: $(tail -n 1 run.log)"
  rm -f run.log

  export AUTORESEARCH_RUN_DIR=$run_dir AUTORESEARCH_RUN_ID="$(date +%s)-$$-$RANDOM" PYTHONUNBUFFERED=1
  set -m # each background job gets its own process group
  "$PY" train.py >run.log 2>&1 </dev/null &
  pid=$!
  (
    sleep "$limit"
    : >"$run_dir/timeout"
    kill -TERM -- -$pid
    sleep 10
    kill -KILL -- -$pid
  ) >/dev/null 2>&1 &
  dog=$!
  set +m
  trap 'kill -KILL -- -$pid -$dog 2>/dev/null; say interrupted; exit 130' INT TERM HUP
  wait $pid 2>/dev/null # bash would print its own 'Killed'
  code=$?
  kill -KILL -- -$dog -$pid 2>/dev/null # nothing of a run outlives it
  wait $dog 2>/dev/null
  trap - INT TERM HUP

  [ ! -e "$run_dir/timeout" ] || fail 124 "timeout: still running after $limit s, killed"
  if [ $code -ne 0 ]; then
    why=$(grep -v '^[[:space:]]*$' run.log | tail -n 1 | cut -c1-300)
    if [ $code -eq 1 ]; then # a train.py that handles no errors: its last words tell the kind
      case $why in
      *UserError:*) code=2 ;;
      *VoidScore:*) code=5 ;;
      *OutOfMemory* | *"out of memory"* | MemoryError*) code=4 ;;
      esac
    fi
    case $code in
    2) fail 2 "refused: $why" ;;
    3) fail 3 "diverged: $why" ;;
    4 | 137) fail 4 "out of memory (killed or reported): $why" ;;
    5) fail 5 "void: $why" ;;
    *) fail 1 "train.py crashed (exit code $code): $why" ;;
    esac
  fi
  check_fixed 5
  score "$run_dir/eval.jsonl"
}

score() { # print the METRIC lines if what train.py printed is what the evaluator recorded for this run
  local metrics printed recorded
  # An older train.py prints only the block after '---': its 'name: number' lines count as METRIC lines.
  metrics=$(grep -E '^METRIC [a-z_][a-z0-9_]*=-?[0-9]+(\.[0-9]+)?$' run.log ||
    awk '/^---$/ { on = 1 } on && /^[A-Za-z_0-9]+: +-?[0-9]+(\.[0-9]+)?$/ { sub(":", "", $1); print "METRIC " tolower($1) "=" $2 }' run.log)
  printed=$(sed -n 's/^METRIC val_bpb=//p' <<<"$metrics")
  [ -n "$printed" ] || fail 5 "void: train.py ended without printing val_bpb"
  [ "$(sed 's/=.*//' <<<"$metrics" | sort | uniq -d)" = "" ] || fail 5 "void: a METRIC name was printed twice"
  [ -s "$1" ] || fail 5 "void: val_bpb=$printed was printed, but evaluate_bpb recorded nothing"
  [ "$(wc -l <"$1")" -eq 1 ] || fail 5 "void: evaluate_bpb recorded $(wc -l <"$1") scores in one run"
  [ "$(field run_id "$1")" = "$AUTORESEARCH_RUN_ID" ] || fail 5 "void: the record is of another run"
  awk -v a="$(field budget "$1")" -v b="$budget" 'BEGIN { exit a + 0 != b + 0 }' ||
    fail 5 "void: trained with a budget of $(field budget "$1") s, this experiment has $budget s"
  [ "$(field seed "$1")" = "${AUTORESEARCH_SEED:-1337}" ] || fail 5 "void: the seed was changed to $(field seed "$1")"
  recorded=$(field val_bpb "$1")
  awk -v a="$printed" -v b="$recorded" 'BEGIN { exit !(a - b < 1e-6 && b - a < 1e-6) }' ||
    fail 5 "void: train.py printed val_bpb=$printed, evaluate_bpb recorded $recorded"
  [ -z "$(field marks "$1")" ] || say "marked: $(field marks "$1")"
  printf '\n%s\n' "$metrics"
}

field() { sed -n 's/.*"'"$1"'": *"\{0,1\}\([^",}]*\).*/\1/p' "$2"; }

case ${1:-run} in
run) setup && run ;;
test) setup && shift && exec "$PY" -m pytest "$@" ;;
session)
  git update-ref $SESSION HEAD || fail 2 "no git commit to start a session from"
  say "a new session starts at $(git rev-parse --short HEAD): the fixed files are $FIXED"
  ;;
*) fail 2 "unknown command '$1'. usage: bash autoresearch.sh [run | test ... | session]" ;;
esac
