# Sourced by scripts/test and scripts/demo: `setup test` or `setup demo` makes .venv fit for it.
#
# Three kinds of machine:
#   - python3 already has a CUDA torch (an NGC container, a conda environment, a cluster module):
#     .venv borrows what is there, replaces nothing, and adds only what is missing.
#   - a GPU, but no torch: .venv gets torch and the KvikIO and CuPy wheels of its CUDA version.
#   - no GPU: .venv gets exactly torch==2.13.0, so that a CPU build on this machine is taken.
#
# Environment:
#   GDS_OPTIMIZER_PYTHON  the Python (3.11 or later) to build .venv from
#   GDS_OPTIMIZER_TORCH   what to tell pip about torch, options included, instead of the above
# shellcheck shell=bash

shopt -s inherit_errexit

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repo/.venv
python=$venv/bin/python

say() { printf '%s\n' "$*" >&2; }

warn() { printf '\n*** %s\n\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

# quietly WHAT COMMAND...: run the command, show its output only if it fails.
quietly() {
  local what=$1 log
  shift
  say "setup: $what"
  log=$(mktemp)
  if ! "$@" >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    die "setup: $what failed (output above): $*"
  fi
  rm -f "$log"
}

is_recent_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# The CUDA version that torch was built for; empty for a CPU build or without torch.
torch_cuda() { "$1" -c 'import torch; print(torch.version.cuda or "")' 2>/dev/null || true; }

pip_install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

# Whether .venv borrows an installed CUDA torch; recorded when .venv is made.
is_borrowing() { [[ -e $venv/borrows-torch ]]; }

find_python() {
  local candidate
  # The active python3 first: it is the one whose torch we may borrow.
  for candidate in ${GDS_OPTIMIZER_PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if is_recent_python "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  die "no Python 3.11 or later: tried ${GDS_OPTIMIZER_PYTHON:-python3, python3.13, python3.12, python3.11};" \
    "install one or name it in GDS_OPTIMIZER_PYTHON"
}

make_venv() {
  is_recent_python "$python" && return
  local base cuda
  base=$(find_python)
  cuda=$(torch_cuda "$base")
  if [[ -n $cuda ]]; then
    say "setup: $base has torch for CUDA $cuda: using it as it is"
    # A parent that is itself a virtual environment is borrowed by a .pth file of ours:
    # `--system-site-packages` would bring its parent's packages in place of its own.
    local parent_code='import os, sys, sysconfig
if sys.prefix != sys.base_prefix:
    print("\n".join(sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})))
    configuration = open(os.path.join(sys.prefix, "pyvenv.cfg")).read().replace(" ", "").lower()
    sys.exit("include-system-site-packages=true" not in configuration)'
    local parent options=() folder
    if parent=$("$base" -c "$parent_code"); then options=(--system-site-packages); fi
    # Without a pip of its own: the borrowed one serves, and Debian's python3 may lack ensurepip.
    quietly "virtual environment" "$base" -m venv --clear --without-pip "${options[@]}" "$venv"
    for folder in $parent; do
      echo "import site; site.addsitedir('$folder')"
    done >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
    touch "$venv/borrows-torch"
  else
    quietly "virtual environment" "$base" -m venv --clear "$venv"
  fi
}

# What an installation depends on; the same key as last time means there is nothing to do.
setup_key() {
  {
    cat "$repo/pyproject.toml" "$repo/scripts/_setup.sh" "$repo/scripts/_missing.py"
    grep __version__ "$repo/gds_optimizer/__init__.py"
    printf '%s\n' "$repo" "${GDS_OPTIMIZER_TORCH:-}"
    "$python" -c 'import sys, importlib.metadata as m; print(sys.version, m.version("torch"))' 2>&1
  } | sha256sum | cut -d ' ' -f 1
}

# install_this [PIP-OPTION...] REQUIREMENT: this package, editable, without pip's build isolation:
# what is borrowed would reach into it. A setuptools that is too old is left alone, since others may
# need it, and a newer one is used for this command only.
install_this() {
  local build_tools="$venv/share/build-tools"
  if ! "$python" -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' \
    2>/dev/null && [[ ! -e $build_tools ]]; then
    quietly "setuptools" pip_install --target "$build_tools" 'setuptools>=77'
  fi
  PYTHONPATH=$build_tools quietly "gds-optimizer" pip_install --no-build-isolation "$@"
}

# install_own EXTRA...: torch first, then this package with the extras.
install_own() {
  local extras=("$@") torch_spec cuda driver_cuda
  read -ra torch_spec <<<"${GDS_OPTIMIZER_TORCH:-$(has_gpu && echo torch || echo torch==2.13.0)}"
  quietly "${torch_spec[0]}" pip_install "${torch_spec[@]}"
  cuda=$(torch_cuda "$python")
  if has_gpu; then
    driver_cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1)
    case ${cuda%%.*} in
      12 | 13) extras+=("cu${cuda%%.*}") ;;
      *) warn "torch in .venv is built for CUDA '${cuda:-none}', wanted 12 or 13: nothing will run on" \
        "the GPU. Name another build in GDS_OPTIMIZER_TORCH and remove .venv." ;;
    esac
    if [[ -n $cuda && -n $driver_cuda && ${cuda%%.*} -gt $driver_cuda ]]; then
      warn "torch in .venv is built for CUDA $cuda, but the driver supports CUDA $driver_cuda at most:" \
        "name a build for CUDA $driver_cuda in GDS_OPTIMIZER_TORCH and remove .venv."
    fi
  elif [[ -n $cuda ]]; then
    warn "No GPU here, but pip took a torch for CUDA $cuda (several GB). For a CPU build name it in" \
      "GDS_OPTIMIZER_TORCH (\"torch==2.13.0 --index-url ...\") and remove .venv."
  fi
  install_this -e "$repo$(IFS=,; echo "${extras:+[${extras[*]}]}")"
}

# install_borrowing EXTRA...: add what is missing, and replace nothing that is there.
install_borrowing() {
  local extras=("$@") cuda missing constraints
  cuda=$(torch_cuda "$python")
  has_gpu && extras+=("cu${cuda%%.*}")
  install_this --no-deps -e "$repo"
  constraints=$venv/borrowed-versions.txt
  missing=$("$python" "$repo/scripts/_missing.py" --constraints "$constraints" "${extras[@]}")
  if [[ -n $missing ]]; then
    mapfile -t missing <<<"$missing"
    # The constraints come on top of those in PIP_CONSTRAINT, which pip reads by itself.
    quietly "${missing[*]}" pip_install --constraint "$constraints" "${missing[@]}"
  fi
}

# KvikIO's own code runs without a GPU; without its dependencies it is 16 MB, with them 2 GiB.
install_kvikio_for_cpu() {
  "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("kvikio") is None)' && return
  quietly "KvikIO without CuPy" pip_install --no-deps 'kvikio-cu13==26.10.*' 'libkvikio-cu13==26.10.*' \
    'rapids-logger==0.3.*' nvidia-cufile cuda-pathfinder
}

# setup test|demo
setup() {
  local purpose=$1
  # One at a time: the lock is on the repository's folder, and tests do not inherit it.
  (
    if command -v flock >/dev/null; then flock 9; fi
    make_venv
    for stamp in "$venv/.ready-for-test" "$venv/.ready-for-$purpose"; do
      if [[ -e $stamp && $(<"$stamp") == "$(setup_key)" ]]; then exit 0; fi
    done
    local extras=(megatron)
    if [[ $purpose == test ]]; then extras+=(dev); fi
    if is_borrowing; then install_borrowing "${extras[@]}"; else install_own "${extras[@]}"; fi
    if [[ $purpose == test ]] && ! has_gpu; then install_kvikio_for_cpu; fi
    setup_key >"$venv/.ready-for-$purpose"
  ) 9<"$repo"
}

# fetch_megatron VERSION: unpack that megatron-core, whatever Python it says it needs, together with
# what it imports and torch does not bring; prints the folder to put first on sys.path.
fetch_megatron() {
  local version=$1 machine folder="$venv/share/megatron-core-$1" partial package
  if [[ ! -e $folder ]]; then
    machine=$(uname -m)
    partial=$(mktemp -d "$venv/megatron-core.XXXXXX")
    quietly "megatron-core $version" "$python" -m pip download --quiet --disable-pip-version-check \
      --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
      --platform "manylinux_2_28_$machine" --platform "manylinux_2_24_$machine" \
      --platform "manylinux_2_17_$machine" --platform "manylinux2014_$machine" \
      --dest "$partial/wheels" "megatron-core==$version"
    mkdir "$partial/unpacked"
    quietly "unpacking megatron-core $version" \
      "$python" -m zipfile -e "$partial"/wheels/megatron_core-*.whl "$partial/unpacked"
    for package in triton==3.9.0 einops; do
      # Not into .venv: the other version is tested as most users have it, without these.
      if ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' \
        "${package%%=*}"; then
        quietly "$package for megatron-core $version" \
          pip_install --no-deps --target "$partial/unpacked" "$package"
      fi
    done
    mkdir -p "$venv/share"
    mv "$partial/unpacked" "$folder"
    rm -rf "$partial"
  fi
  echo "$folder"
}
