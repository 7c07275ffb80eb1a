// Runs recorded kernel calls under an emulator: reads memory and calls from a file, and writes the memory back.
//
// The file is made of 64-bit integers: the number of regions, each one's bytes and contents (filled up to 8 bytes); the
// number of calls, each a function's number, its words, and the words that are addresses as word, region and offset.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

extern "C" {
int linear(const void*);
int attention(const void*);
int quantised_linear(const void*);
}

namespace {

int (*const kFunctions[])(const void*) = {linear, attention, quantised_linear};

int64_t next(FILE* file) {
  int64_t value = 0;
  if (fread(&value, sizeof value, 1, file) != 1) exit(3);
  return value;
}

struct Region {
  int64_t bytes;
  std::vector<int64_t> words;
};

}  // namespace

int main(int, char** arguments) {
  FILE* from = fopen(arguments[1], "rb");
  std::vector<Region> regions(next(from));
  for (Region& region : regions) {
    region.bytes = next(from);
    region.words.resize((region.bytes + 7) / 8);
    if (fread(region.words.data(), 8, region.words.size(), from) != region.words.size()) return 3;
  }
  for (int64_t calls = next(from); calls > 0; calls--) {
    const auto function = kFunctions[next(from)];
    std::vector<int64_t> words(next(from));
    for (int64_t& word : words) word = next(from);
    for (int64_t places = next(from); places > 0; places--) {
      const int64_t word = next(from), region = next(from), offset = next(from);
      words[word] = reinterpret_cast<int64_t>(regions[region].words.data()) + offset;
    }
    if (const int failed = function(words.data())) return 10 + failed;
  }
  FILE* to = fopen(arguments[2], "wb");
  for (const Region& region : regions) fwrite(region.words.data(), 8, region.words.size(), to);
  return fclose(to);
}
