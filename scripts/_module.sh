# Sourced by scripts that run a module of this clone: by .venv if there is one, else by python3.

run_module() { # run_module MODULE ARGUMENT...
  local repo python
  repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  python=$repo/.venv/bin/python
  [[ -x $python ]] || python=python3
  "$python" -c 'import torch' 2>/dev/null || {
    echo "${0##*/}: $python has no torch: run scripts/demo once, which sets up .venv" >&2
    exit 1
  }
  PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m "$@"
}
