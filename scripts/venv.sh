#!/usr/bin/env bash
# venv.sh DIR REQUIREMENT: make the virtual environment DIR where it is missing or its Python no longer runs, and install into it.
set -euo pipefail
dir=$1 requirement=$2

works() { # a Python 3.11-3.13 that can make virtual environments; a shim that only exists is not enough
  "$@" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

if ! works "$dir/bin/python" || [ -n "${PYTHON:-}" ] && [ "$("$PYTHON" -V 2>&1)" != "$("$dir/bin/python" -V 2>&1)" ]; then
  found=
  for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
    if works "$candidate"; then found=$candidate && break; fi
  done
  if [ -z "$found" ]; then
    echo "no working Python 3.11, 3.12 or 3.13 with venv found (tried ${PYTHON:-python3.13 python3.12 python3.11 python3 python}); install one, or make PYTHON=/path/to/python ..." >&2
    exit 1
  fi
  echo "making $dir with $found ($("$found" -V 2>&1))" >&2
  rm -rf "$dir"
  "$found" -m venv "$dir"
fi
echo "installing $requirement into $dir" >&2
"$dir/bin/python" -m pip install -q -e "$requirement"
