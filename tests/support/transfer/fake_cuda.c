/* A CUDA driver without a GPU: the calls mooncake.model.cuda_driver makes, over host memory, with
 * the driver's own rules about contexts, alignment and order. It can be told to fail, and writes
 * down what was asked. With -DWITH_CUDA_H the compiler checks every prototype here against NVIDIA's
 * header. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef WITH_CUDA_H
#include <cuda.h>
#else
typedef int CUresult, CUdevice, CUdevice_attribute, CUmemRangeHandleType;
typedef int CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
enum { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_INITIALIZED = 3,
       CUDA_ERROR_INVALID_DEVICE = 101, CUDA_ERROR_INVALID_CONTEXT = 201,
       CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
       CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713, CUDA_ERROR_NOT_SUPPORTED = 801 };
enum { CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117,
       CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118,
       CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124 };
enum { CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX = 0,
       CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST = 1,
       CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER = 100,
       CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER = 100,
       CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES = 200 };
#define CU_MEMHOSTREGISTER_PORTABLE 0x01
#define CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD 1
CUresult cuCtxPushCurrent_v2(CUcontext);
CUresult cuCtxPopCurrent_v2(CUcontext *);
CUresult cuMemHostRegister_v2(void *, size_t, unsigned int);
#define cuCtxPushCurrent cuCtxPushCurrent_v2
#define cuCtxPopCurrent cuCtxPopCurrent_v2
#define cuMemHostRegister cuMemHostRegister_v2
#endif

#define CONTEXT(device) ((CUcontext)(uintptr_t)(0xC0DE + (device)))
#define MOST 16
#define PAGE 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char written[65536], failing[64];
static int failure, ready, ordering, dmabufs = 1;
static int options = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST;
static struct { char *at; size_t size; int fd; } memory[MOST];
static char *pinned[MOST];
static _Thread_local CUcontext stack[MOST];
static _Thread_local int depth;

/* Writes a call down and returns what it is to fail with; 0: nothing. */
static CUresult call(const char *name, const char *format, ...) {
  pthread_mutex_lock(&lock);
  size_t used = strlen(written);
  used += snprintf(written + used, sizeof written - used, "%s", name);
  va_list values;
  va_start(values, format);
  used += vsnprintf(written + used, sizeof written - used, format, values);
  va_end(values);
  snprintf(written + used, sizeof written - used, "\n");
  CUresult code = strcmp(name, failing) ? CUDA_SUCCESS : (CUresult)failure;
  pthread_mutex_unlock(&lock);
  if (code == CUDA_SUCCESS && !ready && strcmp(name, "cuInit"))
    return CUDA_ERROR_NOT_INITIALIZED;
  return code;
}

#define BEGIN(...) \
  do { CUresult code = call(__func__, __VA_ARGS__); if (code) return code; } while (0)
#define NEEDS_CONTEXT do { if (!depth) return CUDA_ERROR_INVALID_CONTEXT; } while (0)

CUresult cuInit(unsigned int flags) {
  BEGIN(" %u", flags);
  ready = 1;
  return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
  *name = error == CUDA_ERROR_INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
        : error == CUDA_ERROR_NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED"
        : error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : NULL;
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  BEGIN(" %d", ordinal);
  if (ordinal < 0 || ordinal > 1) return CUDA_ERROR_INVALID_DEVICE;
  *device = 10 + ordinal; /* a handle, not a number */
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  BEGIN(" %d %d", (int)attribute, device);
  if (attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS) *value = options;
  else if (attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) *value = ordering;
  else if (attribute == CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) *value = dmabufs;
  else return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *name, int length, CUdevice device) {
  BEGIN(" %d", device);
  return snprintf(name, length, "0000:%02X:00.0", 0x3B + device - 10) < length
             ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  BEGIN(" %d", device);
  *context = CONTEXT(device);
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  BEGIN(" %#lx", (unsigned long)context);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  stack[depth++] = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
  BEGIN("");
  NEEDS_CONTEXT;
  *context = stack[--depth];
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister(void *address, size_t size, unsigned int flags) {
  BEGIN(" %zu %u", size, flags);
  NEEDS_CONTEXT;
  if (flags != CU_MEMHOSTREGISTER_PORTABLE) return CUDA_ERROR_INVALID_VALUE;
  for (int at = 0; at < MOST; at++)
    if (pinned[at] == address) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  volatile char *last = (char *)address + size - 1;
  *last = *last; /* all of it is there */
  for (int at = 0; at < MOST; at++)
    if (!pinned[at]) { pinned[at] = address; return CUDA_SUCCESS; }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostUnregister(void *address) {
  BEGIN("");
  NEEDS_CONTEXT;
  for (int at = 0; at < MOST; at++)
    if (pinned[at] && pinned[at] == address) { pinned[at] = NULL; return CUDA_SUCCESS; }
  return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t size,
                                       CUmemRangeHandleType type, unsigned long long flags) {
  BEGIN(" %zu %d %llu", size, (int)type, flags);
  NEEDS_CONTEXT;
  if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags) return CUDA_ERROR_INVALID_VALUE;
  if (!size || address % PAGE || size % PAGE) return CUDA_ERROR_INVALID_VALUE;
  for (int at = 0; at < MOST; at++) {
    CUdeviceptr begin = (CUdeviceptr)(uintptr_t)memory[at].at;
    if (begin && begin == address && size <= memory[at].size) {
      *(int *)handle = dup(memory[at].fd);
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target,
                                    CUflushGPUDirectRDMAWritesScope scope) {
  BEGIN(" %d %d", (int)target, (int)scope);
  NEEDS_CONTEXT;
  if (target != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX ||
      (scope != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER &&
       scope != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES))
    return CUDA_ERROR_INVALID_VALUE;
  return options & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST ? CUDA_SUCCESS
                                                               : CUDA_ERROR_NOT_SUPPORTED;
}

/* ------------------------------------------------------------ for tests */

const char *fake_log(void) { return written; }
void fake_forget_log(void) { written[0] = 0; }

void fake_fail(const char *name, int code) {
  snprintf(failing, sizeof failing, "%s", name);
  failure = code;
}

void fake_gpu(int orders, int flushes, int shows) {
  ordering = orders;
  options = flushes;
  dmabufs = shows;
}

/* Allocates memory of the "device": the host may not touch it. Begins at a multiple of 2 MiB. */
unsigned long long fake_allocate(size_t size) {
  for (int at = 0; at < MOST; at++) {
    if (memory[at].at) continue;
    char *room = mmap(NULL, size + (2 << 20), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory[at].at = (char *)(((uintptr_t)room + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1));
    memory[at].size = size;
    memory[at].fd = memfd_create("fake-cuda", 0);
    if (ftruncate(memory[at].fd, size)) return 0;
    return (uintptr_t)memory[at].at;
  }
  return 0;
}
