// As much of a test framework as these tests need.
#ifndef TF_GRADCOMP_CUSTOM_OPS_TESTS_CHECK_H_
#define TF_GRADCOMP_CUSTOM_OPS_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (false)

#define RUN(test)                          \
  do {                                     \
    test();                                \
    std::printf("%s: passed\n", #test);    \
  } while (false)

#endif  // TF_GRADCOMP_CUSTOM_OPS_TESTS_CHECK_H_
