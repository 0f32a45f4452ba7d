# Sourced by run_server.sh and run_tests.sh: makes .venv and installs this project with the pinned versions.
# Usage: source scripts/ensure_venv.sh EXTRAS   (for example "server,replay"); sets PYTHON.

# A container's first process obeys no signal that it does not handle. A signal interrupts no command, only a `wait`.
trap 'kill $(jobs -p) 2>/dev/null || true; exit 143' TERM INT
obediently() { "$@" & wait $!; }

extras=$1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=$root/.venv/bin/python

if [ ! -x "$PYTHON" ]; then
    base=$(command -v python3.11 || command -v python3.12 || command -v python3) || {
        echo "Python 3.11 or 3.12 is needed, and no python3 is on the PATH." >&2
        exit 1
    }
    # The pinned NumPy has no wheels for later ones.
    "$base" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || {
        echo "Python 3.11 or 3.12 is needed; $base is $("$base" --version)." >&2
        exit 1
    }
    echo "Creating .venv with $("$base" --version)" >&2
    obediently "$base" -m venv "$root/.venv"
fi

# An install is done again when the pins or the project's own dependencies change.
stamp=$root/.venv/installed-${extras//,/-}
wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing dependencies [$extras] into .venv (once; a few minutes where torch must be downloaded)" >&2
    "$PYTHON" -m pip --version >/dev/null 2>&1 || obediently "$PYTHON" -m ensurepip  # where .venv was left half made
    obediently "$PYTHON" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/constraints.txt" --editable "$root[$extras]" >&2
    echo "$wanted" >"$stamp"
fi
