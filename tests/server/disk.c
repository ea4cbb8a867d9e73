/* Preloaded into a process: its disk fails below a folder, as the file $CHAOS_DISK says: two native ints, an errno (0 for
 * none, -1 if reads fail with EIO, too) and milliseconds that every write takes; then the folder's path, ending with 0.
 * It reaches SQLite and files that are open, which no patch of Python's functions and no remount does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const volatile struct disk { int error, slow_ms; char folder[4088]; } *disk;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("CHAOS_DISK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *page = mmap(0, sizeof *disk, PROT_READ, MAP_SHARED, file, 0);
  if (page != MAP_FAILED) disk = page;
  close(file);
}

static int below(const char *path) {
  size_t length = strlen((const char *)disk->folder);
  return length && path && !strncmp(path, (const char *)disk->folder, length);
}

static int is_there(int fd) {
  char link[32], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return below(path);
}

static int fails(int at) {  /* `at`: the file is below the folder */
  if (!at) return 0;
  for (int waited = 0; waited < disk->slow_ms; waited += 10) {
    struct timespec time = {0, 10000000L};
    nanosleep(&time, 0);
  }
  if (!disk->error) return 0;
  errno = disk->error < 0 ? EIO : disk->error;
  return 1;
}

#define ACTIVE (disk && (disk->error || disk->slow_ms))
#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define WRITE_FD(name, fd, parameters, arguments, result) \
  result name parameters { REAL(name); if (ACTIVE && fails(is_there(fd))) return -1; return real arguments; }
#define WRITE_PATH(name, path, parameters, arguments) \
  int name parameters { REAL(name); if (ACTIVE && disk->error != ENOSPC && fails(below(path))) return -1; return real arguments; }
#define READ_FD(name, fd, parameters, arguments) \
  ssize_t name parameters { REAL(name); \
    if (disk && disk->error < 0 && is_there(fd)) { errno = EIO; return -1; } return real arguments; }

WRITE_FD(write, fd, (int fd, const void *data, size_t size), (fd, data, size), ssize_t)
WRITE_FD(pwrite, fd, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), ssize_t)
WRITE_FD(pwrite64, fd, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), ssize_t)
WRITE_FD(writev, fd, (int fd, const struct iovec *data, int count), (fd, data, count), ssize_t)
WRITE_FD(pwritev, fd, (int fd, const struct iovec *data, int count, off_t at), (fd, data, count, at), ssize_t)
WRITE_FD(pwritev64, fd, (int fd, const struct iovec *data, int count, off64_t at), (fd, data, count, at), ssize_t)
WRITE_FD(pwritev2, fd, (int fd, const struct iovec *data, int count, off_t at, int flags), (fd, data, count, at, flags), ssize_t)
WRITE_FD(pwritev64v2, fd, (int fd, const struct iovec *data, int count, off64_t at, int flags), (fd, data, count, at, flags), ssize_t)
WRITE_FD(fsync, fd, (int fd), (fd), int)
WRITE_FD(fdatasync, fd, (int fd), (fd), int)
WRITE_FD(ftruncate, fd, (int fd, off_t size), (fd, size), int)
WRITE_FD(ftruncate64, fd, (int fd, off64_t size), (fd, size), int)
READ_FD(read, fd, (int fd, void *data, size_t size), (fd, data, size))
READ_FD(pread, fd, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
READ_FD(pread64, fd, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
READ_FD(preadv, fd, (int fd, const struct iovec *data, int count, off_t at), (fd, data, count, at))
READ_FD(preadv64, fd, (int fd, const struct iovec *data, int count, off64_t at), (fd, data, count, at))
READ_FD(preadv2, fd, (int fd, const struct iovec *data, int count, off_t at, int flags), (fd, data, count, at, flags))
READ_FD(preadv64v2, fd, (int fd, const struct iovec *data, int count, off64_t at, int flags), (fd, data, count, at, flags))
WRITE_PATH(rename, to, (const char *from, const char *to), (from, to))
WRITE_PATH(unlink, path, (const char *path), (path))

int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  return ACTIVE && access(path, F_OK) && fails(below(path)) ? -1 : real(path, mode);
}

int posix_fallocate(int fd, off_t at, off_t size) {
  REAL(posix_fallocate);
  return ACTIVE && fails(is_there(fd)) ? errno : real(fd, at, size);
}

int posix_fallocate64(int fd, off64_t at, off64_t size) {
  REAL(posix_fallocate64);
  return ACTIVE && fails(is_there(fd)) ? errno : real(fd, at, size);
}

/* A full disk refuses new files, a read-only one refuses to open files for writing, a broken one refuses all. */
static int refused(const char *path, int flags) {
  int writes = flags & (O_WRONLY | O_RDWR);
  if (!disk || !disk->error || !below(path)) return 0;
  if (disk->error < 0 || (disk->error == ENOSPC ? (flags & O_CREAT) && access(path, F_OK) : writes || flags & O_CREAT)) {
    errno = disk->error < 0 ? EIO : disk->error;
    return 1;
  }
  return 0;
}

#define OPEN(name, parameters, path, arguments) \
  int name parameters { REAL(name); \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
    return refused(path, flags) ? -1 : real arguments; }

OPEN(open, (const char *path, int flags, ...), path, (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), path, (path, flags, mode))
OPEN(openat, (int at, const char *path, int flags, ...), path, (at, path, flags, mode))
OPEN(openat64, (int at, const char *path, int flags, ...), path, (at, path, flags, mode))
