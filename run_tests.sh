#!/usr/bin/env bash
# Sets up .venv with the test tools, then runs lint, format check, type check and every test.
# Arguments, if any, go to pytest: ./run_tests.sh tests/protocol/test_codec.py -k limits
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/ensure_venv.sh" server,replay,test
cd "$root"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest "$@"
