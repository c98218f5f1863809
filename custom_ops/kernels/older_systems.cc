#include "older_systems.h"

#include <new>

namespace std {
void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}  // namespace std

// If it is 0, reference counts use atomic operations.
char __libc_single_threaded = 0;
