#!/bin/sh
# Everything that needs a GPU, in one run of at most ten minutes. Needs torch and triton; the part with the engine also
# what the engine imports, and says so where that is missing. Prints a table and writes gpu-results.json.
#
#   benchmarks/gpu/run.sh [--out FILE] [--parts correctness ceilings kernels lora sampling end_to_end] [--tiny]
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m benchmarks.gpu.run "$@"
