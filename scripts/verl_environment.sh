#!/usr/bin/env bash
# Sets up verl with Ray, for the tests of its agent loop, in the virtual environment $1: minutes, and 2 GB.
# It has an environment of its own because it wants older transformers than the other tests have.
set -euo pipefail
python="$1/bin/python"
"${PYTHON:-python3}" -m venv "$1"
"$python" -m pip install --quiet --upgrade pip
"$python" -m pip install --quiet --constraint constraints.txt --editable '.[lab,ray,server]' 'verl[verl-core]==0.9.1' 'transformers<5.11' pytest
