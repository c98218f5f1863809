// What the headers of libstdc++ use, and older libraries lack.
#include <new>

#define GRADCOMP_HIDDEN __attribute__((visibility("hidden")))

namespace std {
[[noreturn]] GRADCOMP_HIDDEN void __throw_bad_array_new_length() {
  throw std::bad_array_new_length();
}
}  // namespace std

// If it is 0, reference counts use atomic operations.
extern "C" GRADCOMP_HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;
