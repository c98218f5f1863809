// The first header of every source: it takes functions from glibc as older systems have them, too.
// The newer versions differ in how they set errno, or in the library that they are in. What older
// systems have no version of is in older_systems.cc.
#pragma once

#include <cstddef>  // defines __GLIBC__

#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver dlerror, dlerror@GLIBC_2.2.5");
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver pow, pow@GLIBC_2.2.5");
#endif
