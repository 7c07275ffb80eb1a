#!/usr/bin/env bash
# vLLM with prefix caching on, and cached tokens in its answers.
# Usage: MODEL=folder [VLLM=vllm] [VLLM_CPU_KVCACHE_SPACE=4] vllm.sh PORT
set -euo pipefail
exec "${VLLM:-vllm}" serve "${MODEL:?a folder in Hugging Face format}" --host 127.0.0.1 --port "$1" \
  --max-model-len 8192 --max-num-seqs 64 --enable-prefix-caching --enable-prompt-tokens-details
