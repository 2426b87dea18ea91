/* The CUDA runtime of pretended GPUs: no kernel runs, and device memory is the host's, zeroed.
 *
 * PRETENDED_GPUS in the environment says how many there are. Whatever of the runtime torch calls and
 * stands not here succeeds and does nothing (build_stubs.py). */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY ((size_t)80 << 30)

static __thread int current = 0;

/* Every allocation, so that a pointer can be told from one of ordinary memory. */
struct allocation {
    char *start;
    size_t size;
    enum cudaMemoryType type;
    int device;
};
static struct allocation *allocations = NULL;
static size_t num_allocations = 0, room = 0, used = 0;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t allocate(void **pointer, size_t size, enum cudaMemoryType type) {
    *pointer = calloc(1, size ? size : 1);
    if (!*pointer) return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    if (num_allocations == room) {
        room = room ? 2 * room : 1024;
        allocations = realloc(allocations, room * sizeof *allocations);
    }
    allocations[num_allocations++] = (struct allocation){*pointer, size, type, current};
    if (type == cudaMemoryTypeDevice) used += size;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static cudaError_t release(void *pointer) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_allocations; i++)
        if (allocations[i].start == pointer) {
            if (allocations[i].type == cudaMemoryTypeDevice) used -= allocations[i].size;
            allocations[i] = allocations[--num_allocations];
            free(pointer);
            break;
        }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t n) { return allocate(p, n, cudaMemoryTypeDevice); }
cudaError_t cudaFree(void *p) { return release(p); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) { return allocate(p, n, cudaMemoryTypeHost); }
cudaError_t cudaFreeHost(void *p) { return release(p); }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeUnregistered;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_allocations; i++) {
        struct allocation *each = &allocations[i];
        if ((char *)p >= each->start && (char *)p < each->start + each->size) {
            a->type = each->type;
            a->device = each->device;
            a->devicePointer = a->hostPointer = (void *)p;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *n) {
    char *number = getenv("PRETENDED_GPUS");
    *n = number ? atoi(number) : 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *d) { *d = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { current = d; return cudaSuccess; }
cudaError_t cudaInitDevice(int d, unsigned a, unsigned b) { current = d; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    *total = MEMORY;
    *unused = MEMORY - ((size_t)1 << 29) - used;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int d) {
    strncpy(id, "0000:01:00.0", n);
    return cudaSuccess;
}

/* An H100, as far as torch asks. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "Pretended H100");
    p->major = 9;
    p->totalGlobalMem = MEMORY;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = 52428800;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int d) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        default: *value = 0;
    }
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->ptxVersion = a->binaryVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int size, size_t shared, unsigned flags) {
    *n = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int size, size_t shared) {
    *n = 2;
    return cudaSuccess;
}

/* Copies are real, and done at once. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
    memmove(to, from, n);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) {
    memmove(to, from, n);
    return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s) {
    memmove(to, from, n);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t s) {
    for (size_t i = 0; i < height; i++) memmove((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t n) { memset(to, value, n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t s) { memset(to, value, n); return cudaSuccess; }

/* Streams and events are numbers, and always done. */
static long next_handle = 16;
static void *handle(void) { return (void *)__sync_add_and_fetch(&next_handle, 16); }
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = handle(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { *s = handle(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int p) { *s = handle(); return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
    *c = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = handle(); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = handle(); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return cudaSuccess; }

static int driver_call(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    *function = (void *)driver_call;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int d) { *pool = handle(); return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr a, void *value) { *(long *)value = 0; return cudaSuccess; }
