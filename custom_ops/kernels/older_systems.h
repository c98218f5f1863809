// The first header of every source, so that the library loads into older systems than this one: it
// takes functions from glibc as they have them, too. The newer versions differ in how they set
// errno, or in the library that they are in. older_systems.cc has what they have no version of.
#pragma once

#include <cstddef>  // defines __GLIBC__

#define GRADCOMP_HIDDEN __attribute__((visibility("hidden")))

#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver dlerror, dlerror@GLIBC_2.2.5");
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver pow, pow@GLIBC_2.2.5");
#endif

// The headers of libstdc++ use these. They see them first here, because only the first declaration
// can hide a symbol.
namespace std {
[[noreturn]] GRADCOMP_HIDDEN void __throw_bad_array_new_length();
}
extern "C" GRADCOMP_HIDDEN char __libc_single_threaded;
