/* Loaded into all programs of a host before libc: its clock is wrong, its disk is slow or full. The file
   FAULTS_FILE says by how much; it may change at any time. FAULTS_DISK is where the disk is. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct faults { int64_t clock_ns, disk_ns, full; };
static struct faults none;
static volatile struct faults *faults = &none;
static const char *disk = "/nowhere";

#define SECOND 1000000000LL
#define UNIX_NOW 1000000000LL /* deadlines of the monotonic clock are smaller */
#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULTS_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) return;
    disk = getenv("FAULTS_DISK");
    faults = found;
}

static struct timespec moved(struct timespec at, int64_t by_ns) {
    int64_t ns = at.tv_sec * SECOND + at.tv_nsec + by_ns;
    return (struct timespec){ns / SECOND, ns % SECOND};
}

int clock_gettime(clockid_t which, struct timespec *at) {
    REAL(clock_gettime);
    int result = real(which, at);
    if (!result && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        *at = moved(*at, faults->clock_ns);
    return result;
}

time_t time(time_t *into) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME_COARSE, &at);
    if (into) *into = at.tv_sec;
    return at.tv_sec;
}

int gettimeofday(struct timeval *restrict into, void *restrict zone) {
    struct timespec at;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &at);
    *into = (struct timeval){at.tv_sec, at.tv_nsec / 1000};
    return 0;
}

/* The kernel compares deadlines with its own clock. */
static struct timespec meant(const struct timespec *deadline) {
    return deadline->tv_sec < UNIX_NOW ? *deadline : moved(*deadline, -faults->clock_ns);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict deadline) {
    REAL(sem_timedwait);
    struct timespec at = meant(deadline);
    return real(sem, &at);
}

int pthread_cond_timedwait(
    pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline
) {
    static __typeof__(pthread_cond_timedwait) *real;
    if (!real) real = (__typeof__(real))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec at = meant(deadline);
    return real(cond, mutex, &at);
}

static int is_on_disk(int fd) {
    char link[64], path[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    size_t own = strlen(disk);
    return size > (ssize_t)own && !strncmp(path, disk, own) && path[own] == '/';
}

/* Wait as the disk does; returns whether a write fails. */
static int disk_fault(int fd, int writes) {
    if ((!faults->disk_ns && !faults->full) || !is_on_disk(fd)) return 0;
    REAL(clock_gettime);
    struct timespec began, now, pause = {0, 1000000};
    real(CLOCK_MONOTONIC, &began);
    do {
        if (!faults->disk_ns) break;
        nanosleep(&pause, NULL);
        real(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - began.tv_sec) * SECOND + now.tv_nsec - began.tv_nsec < faults->disk_ns);
    if (!writes || !faults->full) return 0;
    errno = ENOSPC;
    return 1;
}

#define VECTORED(name, writes) \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t at) { \
        REAL(name); \
        return disk_fault(fd, writes) ? -1 : real(fd, parts, count, at); \
    }
#define VECTORED2(name, writes) \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t at, int flags) { \
        REAL(name); \
        return disk_fault(fd, writes) ? -1 : real(fd, parts, count, at, flags); \
    }
#define SYNC(name) \
    int name(int fd) { \
        REAL(name); \
        return disk_fault(fd, 0) ? -1 : real(fd); \
    }
VECTORED(preadv, 0)
VECTORED(preadv64, 0)
VECTORED(pwritev, 1)
VECTORED(pwritev64, 1)
VECTORED2(preadv2, 0)
VECTORED2(preadv64v2, 0)
VECTORED2(pwritev2, 1)
VECTORED2(pwritev64v2, 1)
SYNC(fsync)
SYNC(fdatasync)
