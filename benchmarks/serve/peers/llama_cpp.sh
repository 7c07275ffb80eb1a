#!/usr/bin/env bash
# llama-server with the same GGUF file, 16 slots and prefix reuse. Adapters are loaded, and applied where a request asks.
# Usage: MODEL=model.gguf [ADAPTERS=a0.gguf,a1.gguf] [LLAMA_SERVER=llama-server] [THREADS=2] llama_cpp.sh PORT
#
# Adapters in PEFT's format become GGUF by its own convert_lora_to_gguf.py.
set -euo pipefail
lora=()
[ -z "${ADAPTERS:-}" ] || lora=(--lora-scaled "${ADAPTERS//,/:0.0,}:0.0")
exec "${LLAMA_SERVER:-llama-server}" --model "${MODEL:?a GGUF file}" --host 127.0.0.1 --port "$1" \
  --threads "${THREADS:-$(nproc)}" --parallel 16 --ctx-size 65536 --cont-batching \
  --cache-prompt --cache-reuse 64 --flash-attn auto --jinja "${lora[@]}"
