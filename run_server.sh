#!/usr/bin/env bash
# Sets up .venv on the first start, then serves. All arguments go to the server: ./run_server.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/ensure_venv.sh" server,replay
# -P: the folder one happens to stand in is not searched for packages.
exec "$PYTHON" -P -m policy_server "$@"
