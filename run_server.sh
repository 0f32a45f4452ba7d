#!/usr/bin/env bash
# Sets up .venv on the first start, then serves. All arguments go to the server: ./run_server.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/ensure_venv.sh" server,replay
# -P: the folder one happens to stand in is not searched for packages.
if [ $$ != 1 ]; then
    exec "$PYTHON" -P -m policy_server "$@"
fi
# A container's first process, which Python would be deaf as until it has started.
"$PYTHON" -P -m policy_server "$@" &
server=$!
trap 'kill -TERM $server' TERM INT
while true; do
    code=0
    wait $server || code=$?
    kill -0 $server 2>/dev/null || exit $code
done
