#!/usr/bin/env bash
# Install OpenVINO GenAI, what its HTTP server here needs, and the exporter, where the table of speeds looks for them.
# Usage: install_openvino.sh [FOLDER] (by default below the user's cache). It needs about 6 GB of disk.
set -euo pipefail
folder="${1:-${XDG_CACHE_HOME:-$HOME/.cache}/rootgraft/table/peers/openvino}"
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet openvino-genai starlette uvicorn uvloop httptools 'optimum-intel[openvino]'
# It comes built for CUDA, and the exporter's imports fail with it beside a torch for CPUs.
"$folder/bin/pip" uninstall --quiet --yes torchvision
echo "installed: $folder/bin/python"
