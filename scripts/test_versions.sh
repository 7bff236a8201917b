#!/usr/bin/env bash
# The short tests with the newest and with the lowest versions that pyproject.toml allows, for every
# interpreter that is at hand; the lowest ones with the oldest interpreter alone.
#
#     scripts/test_versions.sh [newest|lowest|both] ["3.11 3.13"]     # both, and all, by default
set -euo pipefail
which="${1:-both}"
pythons="${2:-3.11 3.12 3.13 3.14}"
cd "$(dirname "$0")/.."
uv="${UV:-uv}"
if command -v pyenv > /dev/null; then  # its python3.12 starts only where a version of it is chosen
    PYENV_VERSION="$(pyenv versions --bare | paste -sd: -)"
    export PYENV_VERSION
fi

try_out() {  # interpreter, name, more arguments of the resolver
    local place=".venv-versions/$1-$2"
    "$uv" venv --quiet --clear --python "$(command -v "$1")" "$place"
    "$uv" pip install --quiet --python "$place/bin/python" "${@:3}" --editable '.[test]'
    "$place/bin/python" -c "
import sys, torch, numpy
print('$2', 'python', sys.version.split()[0], 'torch', torch.__version__, 'numpy', numpy.__version__)"
    OMP_NUM_THREADS=1 "$place/bin/pytest" -q -n 2 -m "not slow and not long"
}

for version in $pythons; do
    python="python$version"
    "$python" --version > /dev/null 2>&1 || { echo "$python is not at hand"; continue; }
    if test "$which" != lowest; then try_out "$python" newest --upgrade; fi
    if test "$which" != newest -a "$version" = 3.11; then
        try_out "$python" lowest --resolution lowest-direct
    fi
done
