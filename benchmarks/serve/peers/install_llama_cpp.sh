#!/usr/bin/env bash
# Build llama.cpp's server and its quantiser, where the table of speeds looks for them. It takes about 15 minutes on two
# cores and needs cmake, ninja and a C++ compiler. The source is the copy of llama.cpp in the package llama-cpp-python.
# Usage: install_llama_cpp.sh [FOLDER] (by default below the user's cache)
set -euo pipefail
folder="${1:-${XDG_CACHE_HOME:-$HOME/.cache}/rootgraft/table/peers/llama.cpp}"
package=llama-cpp-python version=0.3.36
mkdir -p "$folder"
cd "$folder"
archive="${package//-/_}-$version"
[ -f "$archive.tar.gz" ] || python3 -m pip download --quiet --no-deps --no-binary "$package" "$package==$version"
[ -d "$archive" ] || tar xzf "$archive.tar.gz"
source="$archive/vendor/llama.cpp"
# GCC 12 reads the tile configuration's first 8 bytes only and drops the stores of the others, so that the first AMX tile
# is an illegal instruction. A barrier before the call keeps them.
grep -q 'asm__ volatile("" ::' "$source/ggml/src/ggml-cpu/amx/mmq.cpp" ||
  sed -i 's/^    _tile_loadconfig(&tc);/    __asm__ volatile("" :: "r"(\&tc) : "memory");\n&/' \
    "$source/ggml/src/ggml-cpu/amx/mmq.cpp"
cmake -S "$source" -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
  -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
ninja -C build -j "${JOBS:-$(nproc)}" llama-server llama-quantize
mkdir -p bin
cp -a build/bin/. bin/
echo "installed: $folder/bin/llama-server"
