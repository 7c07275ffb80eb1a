#!/usr/bin/env bash
# vLLM with prefix caching on, and cached tokens in its answers, on all cores; some memory is left to the other servers.
# Intel's OpenMP, which its environment brings, is loaded first: without it, it is much slower.
# Usage: MODEL=folder [VLLM=vllm] [VLLM_CPU_KVCACHE_SPACE=4] vllm.sh PORT [options of vllm serve]
set -euo pipefail
vllm=$(command -v "${VLLM:-vllm}")
openmp="$(dirname "$(dirname "$vllm")")/lib/libiomp5.so"
[ -n "${LD_PRELOAD:-}" ] || [ ! -f "$openmp" ] || export LD_PRELOAD="$openmp"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-4}"
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-0-$(($(nproc) - 1))}"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
exec "$vllm" serve "${MODEL:?a folder in Hugging Face format}" --host 127.0.0.1 --port "$1" \
  --max-model-len 8192 --max-num-seqs 64 --enable-prefix-caching --enable-prompt-tokens-details \
  --gpu-memory-utilization 0.5 "${@:2}"
