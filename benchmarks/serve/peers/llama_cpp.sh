#!/usr/bin/env bash
# llama-server with a GGUF file, 32 slots of 4,096 tokens with KV of their own, and prefix reuse. Adapters are loaded, and
# applied where a request asks.
# Usage: MODEL=model.gguf [ADAPTERS=a0.gguf,a1.gguf] [LLAMA_SERVER=llama-server] [THREADS=2] llama_cpp.sh PORT
#
# ``python -m benchmarks.serve.make_adapters`` writes adapters as GGUF too.
set -euo pipefail
lora=()
[ -z "${ADAPTERS:-}" ] || lora=(--lora-scaled "${ADAPTERS//,/:0.0,}:0.0")
exec "${LLAMA_SERVER:-llama-server}" --model "${MODEL:?a GGUF file}" --host 127.0.0.1 --port "$1" \
  --threads "${THREADS:-$(nproc)}" --parallel 32 --ctx-size 131072 --no-kv-unified --cont-batching \
  --cache-prompt --cache-reuse 64 --flash-attn auto --jinja "${lora[@]}"
