#!/usr/bin/env bash
# Builds one environment: `install.sh work .venv`, `install.sh serve .venv-serve` or `install.sh docs .venv-docs`.
# Two to work with, because llm-compressor and vLLM pin different compressed-tensors; the third makes the documentation's site. Prints a line per step; pip's own words go to a log.
# `install.sh serve FOLDER WHEEL` takes assay's vLLM plugin from a wheel instead of from this clone.
# `install.sh check work serve` builds nothing; it fails with one line if these environments cannot be built here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(dirname "$here")
python=${PYTHON:-python3}

fail() {
  echo "error: $1" >&2
  exit 2
}
has_gpu() { command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; }
gib_of() { # disk space to build an environment: work takes 2.8 GiB, serve 3.4, docs 0.2
  # With CUDA 8.6 GiB are installed, from 4 GiB of wheels that pip holds twice until it is done: in its cache and in its temporary
  # folder (vLLM 0.24 and later: https://github.com/ls1intum/edutelligence/pull/682).
  if [ "$1" = docs ]; then echo 1; elif [ "$1" = serve ] && has_gpu; then echo 18; else echo 4; fi
}
check() { # check FOLDER KIND...: the Python version, and disk space for all of them
  local folder=$1 needed_gib=0 free_gib kind
  shift
  local other='give a Python 3.11 or newer: PYTHON=... with make, --python with `assay setup`'
  command -v "$python" > /dev/null || fail "$python: no such program; $other"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null ||
    fail "$python: is $("$python" --version 2>&1 | head -n 1); $other"
  for kind in "$@"; do needed_gib=$((needed_gib + $(gib_of "$kind"))); done
  free_gib=$(df -Pk "$folder" | awk 'NR == 2 {print int($4 / 1024 / 1024)}')
  [ "$free_gib" -ge "$needed_gib" ] || fail "$folder has $free_gib GiB free; $needed_gib GiB are needed to build: $*"
}

if [ "$1" = check ]; then
  check "$repository" "${@:2}"
  exit
fi
kind=$1 venv=$2 wheel=${3:-}
log=$venv/install.log
case $kind in work | serve | docs) ;; *) fail "unknown environment $kind; say work, serve or docs" ;; esac
check "$(dirname "$venv")" "$kind"

"$python" -m venv "$venv" || fail "$python cannot make an environment; install its venv module (Debian: python3-venv)"
: > "$log"
step() { # step "what" command...
  local what=$1 start=$SECONDS
  shift
  echo "  $venv: $what ..." # whole lines: the other environment may be built at the same time
  if ! "$@" >> "$log" 2>&1; then
    local reason network=
    reason=$(grep -E '^ *ERROR: ' "$log" | tail -n 1) || reason=$(tail -n 1 "$log")
    if [[ $reason == *"No matching distribution"* ]] && grep -q 'after connection broken by' "$log"; then
      network='; pip had no connection to a package index: check the network, or set PIP_INDEX_URL'
    fi
    fail "$kind environment: '$what' failed: ${reason#*ERROR: }$network; the whole log is $log"
  fi
  echo "  $venv: $what, $((SECONDS - start)) s"
}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input install "$@"; }

echo "$venv: building the $kind environment (once; takes a few minutes and up to $(gib_of "$kind") GiB; log: $log)"
# Every file is held against the hashes of NAME.hashes.txt (constraints/hashes.py), also of what PyTorch brought, which is why all is
# installed anew. PyTorch for CPUs is not: its builds differ. Nothing is built in an environment of its own, for which pip would
# fetch what no file names.
hashed() { pip --require-hashes --no-deps --no-build-isolation --force-reinstall -r "$here/$1.hashes.txt"; }
case $kind in
  work)
    step "PyTorch" pip torch==2.13.0
    step "build tools" hashed build
    step "quantize, evaluate, report and test packages" hashed work
    # On Python 3.11 nothing is left to fetch; what only newer ones need comes without a pin.
    step "assay" pip --no-build-isolation -c "$here/work.txt" -e "$repository[quantize,calibrate,ray,evaluate,swe,dev]"
    ;;
  serve)
    if has_gpu; then
      step "build tools" hashed build
      step "vLLM (CUDA)" hashed serve-cuda
      step "what vLLM needs on this Python" pip -r "$here/serve-cuda.txt"
    else
      step "PyTorch" pip torch==2.13.0
      step "build tools" hashed build
      step "vLLM (CPU)" hashed serve-cpu
    fi
    # Only the plugin is used there; assay's own requirements must not touch vLLM's.
    if [ -n "$wheel" ]; then
      step "assay's vLLM plugin" pip --no-deps --force-reinstall "$wheel"
    else
      step "assay's vLLM plugin" pip --no-deps --no-build-isolation -e "$repository"
    fi
    ;;
  docs)
    step "build tools" hashed build
    step "mkdocs and its plugins" hashed docs
    # The reference is made from assay's command line, which imports no stage until a command runs.
    step "assay's command line" pip --no-deps --no-build-isolation -e "$repository"
    ;;
esac
