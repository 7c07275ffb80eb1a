#!/bin/sh
# Everything that needs a GPU, in one run of at most ten minutes. Needs torch and triton; the part with the engine also
# what the engine imports, and says so where that is missing. Prints a table and writes gpu-results.json, which is whole
# after every part: each has a process of its own, and one that fails is in the results with its traceback.
#
#   benchmarks/gpu/run.sh [--out FILE] [--parts correctness engine ceilings kernels products quantised lora states experts sampling end_to_end drafts server ranks] [--tiny]
set -eu
cd "$(dirname "$0")/../.."
# A machine without the package installed runs this checkout.
python=${PYTHON:-python3}
"$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('rootgraft') is None)" || {
  mkdir -p build/root && ln -sfn ../.. build/root/rootgraft
  PYTHONPATH=$PWD/build/root${PYTHONPATH:+:$PYTHONPATH} && export PYTHONPATH
}
# The part with two ranks makes its models by the helpers of the tests.
PYTHONPATH=$PWD/tests${PYTHONPATH:+:$PYTHONPATH} && export PYTHONPATH
exec "$python" -m benchmarks.gpu.run "$@"
