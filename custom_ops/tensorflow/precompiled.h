// What takes most of the time to compile in the files of this folder: setup.py compiles it once.
#ifndef TF_GRADCOMP_TENSORFLOW_PRECOMPILED_H_
#define TF_GRADCOMP_TENSORFLOW_PRECOMPILED_H_

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/util/work_sharder.h"

#endif  // TF_GRADCOMP_TENSORFLOW_PRECOMPILED_H_
