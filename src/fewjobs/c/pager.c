/* The pager: a library that is preloaded into compilers. Compiled on first use; Linux only.
 *
 * It does nothing until SIGURG (whose default is to be ignored) asks it to write the process's private memory into
 * unlinked files and to map those files, privately, in its place: the memory is free, and every page comes back
 * from the disk when it is touched.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_REGIONS 4096
#define MAX_FILES 200
#define CHUNK (8UL << 20)
#define SMALLEST (256UL << 10) /* regions below it are left alone */

typedef struct { uintptr_t start, end; uint64_t offset, inode; int pageable; } region;
static region regions[MAX_REGIONS];
static struct { int fd; uint64_t inode; } files[MAX_FILES];
static int num_files, num_regions;
static char folder[3072];
static char text[16384];
static uint64_t pagemap[2048];
static size_t page_bytes = 4096;

static int backing_file(void) {
    if (num_files >= MAX_FILES) return -1;
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) { /* a file system without O_TMPFILE */
        static char name[4096];
        static unsigned serial;
        snprintf(name, sizeof name, "%s/page-%d-%u", folder, (int)getpid(), serial++);
        fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd >= 0) unlink(name);
    }
    if (fd < 0) return -1;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, 300);
    if (high >= 0) {
        close(fd);
        fd = high;
    }
    /* Far longer than the region: mremap may let the mapping grow, and past the end there would be SIGBUS. */
    struct stat facts;
    if ((ftruncate(fd, (off_t)1 << 42) < 0 && ftruncate(fd, (off_t)1 << 38) < 0) || fstat(fd, &facts) < 0) {
        close(fd);
        return -1;
    }
    files[num_files].fd = fd;
    files[num_files].inode = facts.st_ino;
    return num_files++;
}

static int file_of(uint64_t inode) {
    for (int i = 0; i < num_files; i++)
        if (inode && files[i].inode == inode) return i;
    return -1;
}

static uint64_t number(const char **at, unsigned base) {
    uint64_t value = 0;
    for (;; (*at)++) {
        unsigned c = (unsigned char)**at, digit = c - '0' < 10u ? c - '0' : c - 'a' < 6u ? c - 'a' + 10 : 99;
        if (digit >= base) return value;
        value = value * base + digit;
    }
}

/* One line of /proc/self/maps, if it is private writable memory that may be paged. */
static int parse_line(const char *line, region *r) {
    r->start = number(&line, 16);
    r->end = number((line++, &line), 16);
    r->pageable = strncmp(line, " rw-p ", 6) == 0 && r->end - r->start >= SMALLEST;
    line += 6;
    r->offset = number(&line, 16);
    line = strchr(line + 1, ' '); /* past the device */
    if (!line) return 0;
    r->inode = number((line++, &line), 10);
    while (*line == ' ') line++;
    uintptr_t ours = (uintptr_t)regions;
    if (r->start <= ours && ours < r->end) return 0;
    if (r->inode) return strncmp(line, folder, strlen(folder)) == 0; /* ours: even the smallest counts */
    return r->pageable && (!*line || strcmp(line, "[heap]") == 0 || strncmp(line, "[anon", 5) == 0);
}

static int list_regions(void) {
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), count = 0;
    size_t held = 0;
    ssize_t n;
    while (fd >= 0 && (n = read(fd, text + held, sizeof text - 1 - held)) > 0) {
        held += n;
        text[held] = 0;
        char *line = text, *end;
        while ((end = strchr(line, '\n'))) {
            *end = 0;
            if (parse_line(line, &regions[count]) && ++count == MAX_REGIONS) { /* not all can be known */
                close(fd);
                return 0;
            }
            line = end + 1;
        }
        held -= line - text;
        memmove(text, line, held);
    }
    if (fd >= 0) close(fd);
    return count;
}

static int wrote; /* whether the chunk had to be written */

static int write_range(int fd, uintptr_t from, uintptr_t to, uint64_t offset) {
    wrote = 1;
    while (from < to) {
        ssize_t n = pwrite(fd, (void *)from, to - from, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return 0;
        from += n;
        offset += n;
    }
    return 1;
}

/* Write the pages of [from, to) that are not in the file as they are; `all` writes clean file pages too. */
static int write_chunk(int map, int fd, uintptr_t from, uintptr_t to, uint64_t offset, int all) {
    uintptr_t at = from, begun = 0;
    while (at < to) {
        size_t count = (to - at) / page_bytes;
        if (count > sizeof pagemap / sizeof *pagemap) count = sizeof pagemap / sizeof *pagemap;
        ssize_t n = pread(map, pagemap, count * 8, at / page_bytes * 8);
        if (n != (ssize_t)(count * 8)) return 0;
        for (size_t i = 0; i < count; i++, at += page_bytes) {
            int here = (pagemap[i] >> 62) != 0, clean = (pagemap[i] >> 61) & 1;
            int dirty = all || (here && !clean);
            if (dirty && !begun) begun = at;
            if (!dirty && begun) {
                if (!write_range(fd, begun, at, offset + (begun - from))) return 0;
                begun = 0;
            }
        }
    }
    return !begun || write_range(fd, begun, to, offset + (begun - from));
}

/* Whether another mapping shows a part of the same file: mremap may have grown one over what follows it. Then
 * neither may write there. */
static int is_shared(const region *r) {
    for (int i = 0; i < num_regions; i++) {
        const region *o = &regions[i];
        if (o == r || o->inode != r->inode) continue;
        if (o->offset < r->offset + (r->end - r->start) && r->offset < o->offset + (o->end - o->start)) return 1;
    }
    return 0;
}

static void page_out(int map, region *r) {
    int known = r->inode && !is_shared(r) ? file_of(r->inode) : -1, file = known < 0 ? backing_file() : known;
    if (file < 0) return;
    int fd = files[file].fd;
    uint64_t base = known < 0 ? 0 : r->offset;
    for (uintptr_t at = r->start; at < r->end; at += CHUNK) {
        uintptr_t to = at + CHUNK < r->end ? at + CHUNK : r->end;
        uint64_t offset = base + (at - r->start);
        /* Nothing is given up before it is written: a full disk leaves the rest where it is. */
        wrote = 0;
        if (!write_chunk(map, fd, at, to, offset, known < 0 && r->inode != 0)) return;
        if (known < 0) {
            if (mmap((void *)at, to - at, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, offset) == MAP_FAILED)
                return;
        } else {
            syscall(SYS_madvise, at, to - at, MADV_DONTNEED);
        }
        if (!wrote) continue; /* clean pages are the kernel's to drop */
        sync_file_range(fd, offset, to - at, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
        posix_fadvise(fd, offset, to - at, POSIX_FADV_DONTNEED);
    }
    if (known < 0) r->inode = files[file].inode, r->offset = 0;
}

static int num_threads(void) {
    int fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC), count = 0;
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    const char *line = strstr(text, "\nThreads:\t");
    if (line) line += 10, count = number(&line, 10);
    return count;
}

static void on_request(int number) {
    int saved = errno, map = -1;
    (void)number;
    /* Another thread could write between our copy and the change of mapping. */
    if (num_threads() == 1) map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (map >= 0) {
        num_regions = list_regions();
        for (int i = 0; i < num_regions; i++)
            if (regions[i].pageable) page_out(map, &regions[i]);
        close(map);
    }
    errno = saved;
}

/* After a fork two processes read the same files: neither may write to them again. */
static void after_fork(void) {
    for (int i = 0; i < num_files; i++) close(files[i].fd);
    num_files = 0;
}

/* Allocators expect zeros after MADV_DONTNEED; a private mapping of a file would give its old bytes back. */
int madvise(void *start, size_t size, int advice) {
    uintptr_t from = (uintptr_t)start, to = from + (size + page_bytes - 1) / page_bytes * page_bytes;
    for (int i = 0; advice == MADV_DONTNEED && i < num_regions; i++) {
        if (from < regions[i].start || regions[i].end < to || from == to) continue;
        void *got = mmap(start, to - from, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        if (got == start) return 0;
    }
    return (int)syscall(SYS_madvise, start, size, advice);
}

static int is_leaf(void) {
    static const char *const leaves[] = {"cc1", "cc1plus", "cudafe++", "cicc", "ptxas", "lto1", "f951", "nvlink", "cc1obj"};
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    char *name = strrchr(path, '/');
    for (size_t i = 0; name && i < sizeof leaves / sizeof *leaves; i++)
        if (strcmp(name + 1, leaves[i]) == 0) return 1;
    return 0;
}

__attribute__((constructor)) static void ready(void) {
    const char *named = getenv("FEWBITS_PAGER");
    if (!named || strlen(named) >= sizeof folder || !is_leaf()) return;
    strcpy(folder, named);
    page_bytes = sysconf(_SC_PAGESIZE);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pthread_atfork(NULL, after_fork, after_fork);
    struct sigaction action = {.sa_handler = on_request, .sa_flags = SA_RESTART};
    sigaction(SIGURG, &action, NULL);
}
