#!/usr/bin/env bash
# llama-server with the same GGUF file, 16 slots and prefix reuse.
# Usage: MODEL=model.gguf [LLAMA_SERVER=llama-server] [THREADS=2] llama_cpp.sh PORT
set -euo pipefail
exec "${LLAMA_SERVER:-llama-server}" --model "${MODEL:?a GGUF file}" --host 127.0.0.1 --port "$1" \
  --threads "${THREADS:-$(nproc)}" --parallel 16 --ctx-size 65536 --cont-batching \
  --cache-prompt --cache-reuse 64 --flash-attn auto --jinja
