#ifndef JAXZERO_CORE_HOST_DEVICE_H_
#define JAXZERO_CORE_HOST_DEVICE_H_

// Marks code that g++ compiles for the CPU and nvcc for both sides.
#ifdef __CUDACC__
#define JAXZERO_HOST_DEVICE __host__ __device__
#else
#define JAXZERO_HOST_DEVICE
#endif

#endif  // JAXZERO_CORE_HOST_DEVICE_H_
