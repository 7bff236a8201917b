#!/usr/bin/env bash
# Build wheel and source distribution into dist/, install each in an empty virtual environment
# outside the clone, and go the way of the README there: demo, examples, init, run, predict, report,
# evidence.
#
#     scripts/wheel_test.sh [wheel|sdist|both]     # both by default
set -euo pipefail
which="${1:-both}"
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-python3}"
outside="$(mktemp -d)"
trap 'rm -rf "$outside"' EXIT
cd "$outside"
unset PYTHONPATH

"$python" -m venv building
building/bin/pip install --quiet --disable-pip-version-check build
rm -rf "$root/dist"
building/bin/python -m build --outdir "$root/dist" "$root"

try_out() {  # a package to install
    rm -rf empty here
    "$python" -m venv empty
    empty/bin/pip install --quiet --disable-pip-version-check \
        --constraint "$root/constraints.txt" "$1"
    mkdir here && cd here
    local equifed=../empty/bin/equifed
    ../empty/bin/python -c "
import equifed, pathlib
home = pathlib.Path(equifed.__file__).resolve()
assert pathlib.Path('$outside').resolve() in home.parents, f'{home} is not the installed one'"
    "$equifed" demo --rounds 5 --out demo
    "$equifed" init --examples examples
    "$equifed" init examples/hospitals.csv --client hospital --target outcome --out run.toml
    "$equifed" run run.toml --out run --set rounds=20 --report
    "$equifed" predict run examples/hospitals.csv --out predictions.csv
    "$equifed" report run --page again.html
    "$equifed" evidence run
    local rows=$(($(wc -l < predictions.csv)))
    test "$rows" -eq "$(wc -l < examples/hospitals.csv)"
    test -s demo/report.html -a -s run/report.html -a -s again.html -a -s run-evidence.zip
    cd ..
    echo "works outside the clone: $(basename "$1")"
}

if test "$which" != sdist; then try_out "$root"/dist/*.whl; fi
if test "$which" != wheel; then try_out "$root"/dist/*.tar.gz; fi
