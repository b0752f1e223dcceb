// SPDX-License-Identifier: Apache-2.0
// What a static libstdc++ and libgcc lack in a library that is to load into any process and to leave nothing behind. Linked
// into libcqsa and into each plugin.
#include <dlfcn.h>
#include <link.h>

#include <cstddef>
#include <cstdint>

#ifdef CQSA_STATIC_LIBSTDCXX
// The static libstdc++ keeps a pool for exceptions thrown without memory, which nothing gives back when the library is unloaded.
namespace __gnu_cxx {
void __freeres();
}
namespace {
__attribute__((destructor)) void give_back_exception_pool() { __gnu_cxx::__freeres(); }
}  // namespace
#endif

#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 35)
// A static libgcc made for glibc 2.35 or newer finds the unwind tables with this function of that glibc, which would be the
// only reason why the library needs more than 2.34. So it gets one that works everywhere, as libgcc itself had before. Without
// -static-libgcc nobody calls it.
namespace {

bool contains(const dl_phdr_info& object, const ElfW(Phdr) & segment, uintptr_t address) {
  const uintptr_t start = object.dlpi_addr + segment.p_vaddr;
  return segment.p_type == PT_LOAD && address >= start && address - start < segment.p_memsz;
}

struct unwind_question {
  uintptr_t address;
  dl_find_object* answer;
};

// For dl_iterate_phdr: 0 goes on to the next object.
int find_unwind_table(dl_phdr_info* object, size_t, void* data) {
  const auto& question = *static_cast<unwind_question*>(data);
  dl_find_object& answer = *question.answer;
  answer = {};
  bool inside = false;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = object->dlpi_phdr[i];
    void* const start = reinterpret_cast<void*>(object->dlpi_addr + segment.p_vaddr);
    if (segment.p_type == PT_GNU_EH_FRAME) answer.dlfo_eh_frame = start;
    if (!contains(*object, segment, question.address)) continue;
    inside = true;
    answer.dlfo_map_start = start;
    answer.dlfo_map_end = static_cast<char*>(start) + segment.p_memsz;
  }
  return inside && answer.dlfo_eh_frame != nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) int _dl_find_object(void* address, dl_find_object* answer) noexcept {
  unwind_question question = {reinterpret_cast<uintptr_t>(address), answer};
  return dl_iterate_phdr(find_unwind_table, &question) != 0 ? 0 : -1;
}
#endif
