#!/usr/bin/env bash
# venv.sh DIR REQUIREMENT: make the virtual environment DIR where it is missing or its Python no longer runs, and install into it.
set -euo pipefail
dir=$1 requirement=$2

works() { # a Python 3.11-3.13 that can make virtual environments; a shim that only exists is not enough
  "$@" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

wanted=${PYTHON:-python3.13 python3.12 python3.11 python3 python}
usable() { # the environment that is there runs, on the Python that was asked for
  works "$dir/bin/python" && { [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -V 2>&1)" = "$("$dir/bin/python" -V 2>&1)" ]; }
}

if ! usable; then
  found=
  for candidate in $wanted; do
    if works "$candidate"; then found=$candidate && break; fi
  done
  if [ -z "$found" ]; then
    echo "found no working Python 3.11, 3.12 or 3.13 with venv (tried $wanted); install one, or give its path: make PYTHON=... demo" >&2
    exit 1
  fi
  echo "making $dir with $found ($("$found" -V 2>&1))" >&2
  rm -rf "$dir"
  "$found" -m venv "$dir"
fi
echo "installing $requirement into $dir" >&2
"$dir/bin/python" -m pip install -q -e "$requirement"
