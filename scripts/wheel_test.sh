#!/usr/bin/env bash
# Build wheel and source distribution into dist/, install each in an empty virtual environment
# outside the clone, and go the way of a new user there: the README's five lines and three commands
# on an example table, the demo, a configuration of one's own. Prints seconds by the clock per step.
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

step() {  # a name and a command; prints how long it took
    local name="$1" start=$SECONDS
    shift
    "$@" > log.txt 2>&1 || { cat log.txt; exit 1; }
    printf '%4d s  %s\n' $((SECONDS - start)) "$name"
}

try_out() {  # a package to install
    local began=$SECONDS
    rm -rf empty here
    mkdir here && cd here
    step "python -m venv" "$python" -m venv ../empty
    step "pip install equifed" ../empty/bin/pip install --disable-pip-version-check \
        --constraint "$root/constraints.txt" "$1"
    local equifed=../empty/bin/equifed
    ../empty/bin/python -c "
import equifed, pathlib
home = pathlib.Path(equifed.__file__).resolve()
assert pathlib.Path('$outside').resolve() in home.parents, f'{home} is not the installed one'"
    step "equifed init --examples" "$equifed" init --examples examples
    cp examples/hospitals.csv .
    sed -n '/^import equifed as ef/,/^```/p' "$root/README.md" | sed '/^```/d' > five_lines.py
    step "the README's five lines" ../empty/bin/python five_lines.py
    echo "$((SECONDS - began)) s from nothing to a report of a table"
    step "equifed fit" "$equifed" fit hospitals.csv --client hospital --target outcome --out fit
    step "equifed predict" "$equifed" predict fit hospitals.csv --out predictions.csv
    step "equifed evidence" "$equifed" evidence fit
    step "equifed demo --rounds 5" "$equifed" demo --rounds 5 --out demo
    step "equifed init" "$equifed" init hospitals.csv --client hospital --target outcome --out run.toml
    step "equifed run" "$equifed" run run.toml --out run --set rounds=20 --report
    step "equifed report" "$equifed" report run --page again.html
    test "$(wc -l < predictions.csv)" -eq "$(wc -l < hospitals.csv)"
    test -s report.html -a -s fit-evidence.zip -a -s demo/report.html -a -s run/report.html -a -s again.html
    cd ..
    echo "works outside the clone: $(basename "$1")"
}

if test "$which" != sdist; then try_out "$root"/dist/*.whl; fi
if test "$which" != wheel; then try_out "$root"/dist/*.tar.gz; fi
