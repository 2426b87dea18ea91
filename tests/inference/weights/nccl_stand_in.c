/* The functions of NCCL over TCP and host memory, where there are no GPUs.
 *
 * Built as a shared library that vLLM and the trainer load in place of the real one. Rank 0 makes
 * the id, which is its port, and the others connect to it. Every collective begins with a header
 * from each side, and ranks that do not make the same call get an error where NCCL would wait for
 * ever. Streams are not looked at: a call has ended when it returns.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { OK = 0, INTERNAL = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6 };
enum { MAX_RANKS = 64 };

typedef struct { char internal[128]; } Id;
typedef struct { int32_t kind, dtype, root; int64_t count; } Header;
typedef struct { int rank, size, peers[MAX_RANKS]; } Comm;

static int listener = -1; /* of the id made last */
static const int WIDTH[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

static int send_all(int fd, const void *data, size_t size) {
    const char *at = data;
    while (size > 0) {
        ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
        if (n <= 0) return REMOTE;
        at += n, size -= n;
    }
    return OK;
}

static int recv_all(int fd, void *data, size_t size) {
    char *at = data;
    while (size > 0) {
        ssize_t n = recv(fd, at, size, 0);
        if (n <= 0) return REMOTE;
        at += n, size -= n;
    }
    return OK;
}

const char *ncclGetErrorString(int result) {
    switch (result) {
    case OK: return "no error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE: return "remote process exited or there was a network error";
    default: return "internal error";
    }
}

int ncclGetVersion(int *version) { return *version = 22903, OK; }

int ncclGetUniqueId(Id *id) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&address, length) || listen(listener, MAX_RANKS)) return INTERNAL;
    getsockname(listener, (void *)&address, &length);
    memset(id, 0, sizeof *id);
    int32_t place[2] = {ntohs(address.sin_port), listener};
    memcpy(id->internal, place, sizeof place);
    return OK;
}

int ncclCommInitRank(Comm **made, int size, Id id, int rank) {
    int32_t place[2], one = 1;
    memcpy(place, id.internal, sizeof place);
    if (size < 2 || size > MAX_RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
    Comm *comm = calloc(1, sizeof *comm);
    comm->rank = rank, comm->size = size;
    if (rank == 0) {
        for (int i = 1; i < size; i++) {
            int32_t peer[2];
            int fd = accept(place[1], NULL, NULL);
            if (fd < 0 || recv_all(fd, peer, sizeof peer)) return REMOTE;
            if (peer[1] != size || peer[0] < 1 || peer[0] >= size || comm->peers[peer[0]])
                return INVALID_USAGE;
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            comm->peers[peer[0]] = fd;
        }
        close(place[1]);
    } else {
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(place[0]),
                                      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        int32_t me[2] = {rank, size};
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (void *)&address, sizeof address)) return REMOTE;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (send_all(fd, me, sizeof me)) return REMOTE;
        comm->peers[0] = fd;
    }
    return *made = comm, OK;
}

/* Whether all ranks are about to make the same call. */
static int agree(Comm *comm, Header mine) {
    Header theirs;
    if (comm == NULL) return INVALID_ARGUMENT;
    for (int peer = 0; peer < comm->size; peer++) {
        if (peer == comm->rank || (comm->rank && peer)) continue;
        if (send_all(comm->peers[peer], &mine, sizeof mine)) return REMOTE;
        if (recv_all(comm->peers[peer], &theirs, sizeof theirs)) return REMOTE;
        if (theirs.kind != mine.kind || theirs.root != mine.root || theirs.dtype != mine.dtype ||
            theirs.count != mine.count) {
            fprintf(stderr, "rank %d: kind %d dtype %d count %ld, rank %d: %d %d %ld\n", comm->rank,
                    mine.kind, mine.dtype, (long)mine.count, peer, theirs.kind, theirs.dtype,
                    (long)theirs.count);
            return INVALID_USAGE;
        }
    }
    return OK;
}

int ncclBroadcast(const void *from, void *to, size_t count, int dtype, int root, Comm *comm,
                  void *stream) {
    int result = agree(comm, (Header){.kind = 1, .dtype = dtype, .root = root, .count = count});
    if (result != OK || root != 0) return result != OK ? result : INVALID_USAGE;
    size_t size = count * WIDTH[dtype];
    if (comm->rank) return recv_all(comm->peers[0], to, size);
    for (int peer = 1; peer < comm->size; peer++)
        if (send_all(comm->peers[peer], from, size)) return REMOTE;
    if (to != from) memcpy(to, from, size);
    return OK;
}

int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int op, Comm *comm,
                  void *stream) {
    int result = agree(comm, (Header){.kind = 2, .dtype = dtype, .root = op, .count = count});
    if (result != OK || dtype != 7 || op != 0) return result != OK ? result : INVALID_USAGE;
    size_t size = count * sizeof(float);
    if (comm->rank) {
        if (send_all(comm->peers[0], from, size)) return REMOTE;
        return recv_all(comm->peers[0], to, size);
    }
    float *sum = malloc(size), *part = malloc(size);
    memcpy(sum, from, size);
    for (int peer = 1; peer < comm->size && result == OK; peer++) {
        result = recv_all(comm->peers[peer], part, size);
        for (size_t i = 0; i < count; i++) sum[i] += part[i];
    }
    for (int peer = 1; peer < comm->size && result == OK; peer++)
        result = send_all(comm->peers[peer], sum, size);
    memcpy(to, sum, size);
    free(sum), free(part);
    return result;
}

/* What waits in another thread returns; nothing is freed, which that thread may still use. */
int ncclCommAbort(Comm *comm) {
    if (comm == NULL) return INVALID_ARGUMENT;
    for (int peer = 0; peer < comm->size; peer++)
        if (comm->peers[peer]) shutdown(comm->peers[peer], SHUT_RDWR);
    return OK;
}

/* vLLM looks these up when it loads the library, and a weight transfer calls none of them. */
#define UNUSED(name) int name(void) { return INTERNAL; }
UNUSED(ncclReduce) UNUSED(ncclAllGather) UNUSED(ncclReduceScatter) UNUSED(ncclSend)
UNUSED(ncclRecv) UNUSED(ncclCommDestroy) UNUSED(ncclCommSuspend) UNUSED(ncclCommResume)
UNUSED(ncclGroupStart) UNUSED(ncclGroupEnd) UNUSED(ncclCommWindowRegister)
UNUSED(ncclCommWindowDeregister) UNUSED(ncclCommQueryProperties)
