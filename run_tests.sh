#!/usr/bin/env bash
# Sets up .venv with the test tools, then runs lint, format check, type check and the tests; with --all the slow ones too.
# Further arguments go to pytest: ./run_tests.sh tests/protocol/test_codec.py -k limits
set -euo pipefail
selection=(-m "not slow")
if [ "${1:-}" = --all ]; then
    selection=()
    shift
fi
source "$(dirname "${BASH_SOURCE[0]}")/scripts/ensure_venv.sh" server,replay,test
cd "$root"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
# Files side by side, one more than there are cores, for many tests wait most of their time; torch's threads would wait
# for each other.
workers=$(($(nproc) + 1)) # asked for first: nproc heeds the variable
export OMP_NUM_THREADS=1
exec "$PYTHON" -m pytest --numprocesses "$workers" --dist loadfile "${selection[@]}" "$@"
