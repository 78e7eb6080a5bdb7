/* Preloaded into every rank of a hop test: what rank PACED_TO reads from rank PACED_FROM comes at
 * PACED_BYTES_PER_S. Ranks tell each other their ports through files in PACED_FOLDER, each named
 * by a port and holding the rank that has it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { FDS = 4096, UNKNOWN = 0, OTHER = 1, PACED = 2, LARGE = 2048 };
static _Atomic signed char kind_of[FDS];
static _Atomic int64_t next_ns;

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int number(const char *name) {
  const char *text = getenv(name);
  return text ? atoi(text) : -1;
}

static int port_of(const struct sockaddr_storage *address) {
  if (address->ss_family == AF_INET) return ntohs(((const struct sockaddr_in *)address)->sin_port);
  if (address->ss_family == AF_INET6)
    return ntohs(((const struct sockaddr_in6 *)address)->sin6_port);
  return 0;
}

static void file_of(int port, char *path, size_t size) {
  snprintf(path, size, "%s/%d", getenv("PACED_FOLDER"), port);
}

/* Tell that a port is of this rank. */
static void announce(int fd) {
  struct sockaddr_storage own;
  socklen_t length = sizeof own;
  char path[512];
  if (getsockname(fd, (struct sockaddr *)&own, &length) || !port_of(&own)) return;
  file_of(port_of(&own), path, sizeof path);
  FILE *file = fopen(path, "w");
  if (file) {
    fprintf(file, "%d", number("RANK"));
    fclose(file);
  }
}

static int comes_from(int fd) {
  struct sockaddr_storage peer;
  socklen_t length = sizeof peer;
  char path[512];
  int rank = -1;
  if (getpeername(fd, (struct sockaddr *)&peer, &length) || !port_of(&peer)) return -1;
  file_of(port_of(&peer), path, sizeof path);
  FILE *file = fopen(path, "r");
  if (file) {
    if (fscanf(file, "%d", &rank) != 1) rank = -1;
    fclose(file);
  }
  return rank;
}

static void pace(int fd, ssize_t count) {
  if (count < LARGE || fd < 0 || fd >= FDS || number("RANK") != number("PACED_TO")) return;
  if (kind_of[fd] == UNKNOWN) kind_of[fd] = comes_from(fd) == number("PACED_FROM") ? PACED : OTHER;
  if (kind_of[fd] != PACED) return;
  int64_t cost = (int64_t)(count / atof(getenv("PACED_BYTES_PER_S")) * 1e9);
  int64_t was = atomic_load(&next_ns), now = now_ns(), due;
  do due = (was > now ? was : now) + cost;
  while (!atomic_compare_exchange_weak(&next_ns, &was, due));
  struct timespec until = {due / 1000000000LL, due % 1000000000LL};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int listen(int fd, int backlog) {
  REAL(listen);
  int result = real(fd, backlog);
  announce(fd);
  return result;
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
  REAL(connect);
  int result = real(fd, address, length);
  if (fd >= 0 && fd < FDS) kind_of[fd] = UNKNOWN;
  announce(fd);
  return result;
}

int close(int fd) {
  REAL(close);
  if (fd >= 0 && fd < FDS) kind_of[fd] = UNKNOWN;
  return real(fd);
}

ssize_t recv(int fd, void *buffer, size_t size, int flags) {
  REAL(recv);
  ssize_t count = real(fd, buffer, size, flags);
  pace(fd, count);
  return count;
}

ssize_t read(int fd, void *buffer, size_t size) {
  REAL(read);
  ssize_t count = real(fd, buffer, size);
  pace(fd, count);
  return count;
}

ssize_t readv(int fd, const struct iovec *parts, int many) {
  REAL(readv);
  ssize_t count = real(fd, parts, many);
  pace(fd, count);
  return count;
}
