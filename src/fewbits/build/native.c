/* fewbits build's one C file, compiled on first use. Linux only.
 *
 * With -DLAUNCHER: the small program that stands in a compiler's place. It asks the controller when to
 * start, runs the real tool in a process group of its own, reports how it ended, and does what it is told:
 * end with that code, or run the tool again. Without a controller it becomes the real tool.
 *
 * Without: the pager, a library that is preloaded into compilers. It does nothing until SIGURG (whose default
 * is to be ignored) asks it to write the process's private memory into unlinked files and to map those files,
 * privately, in its place: the memory is free, and every page comes back from the disk when it is touched.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef LAUNCHER
#include <sys/signalfd.h>

#define FIELDS 8
#define TELL_AFTER_MS 60
#define QUICK_NS 250000000L /* what succeeds sooner is not kept: no word from the controller is awaited */
static char message[1 << 18];
static char self[4096], run_folder[4096];

static void refuse(const char *text) {
    fprintf(stderr, "fewbits build: %s\n", text);
    exit(1);
}

/* Runs that only print or list something: they need little memory and are not held up. */
static int is_light(int argc, char **argv) {
    static const char *const words[] = {"-E", "-M", "-MM", "--version", "-V", "-dumpversion", "-dumpmachine",
                                        "-dumpfullversion", "-###", "--dryrun", "-dryrun", "--help", "-h", "-qversion",
                                        "--list-gpu-arch", "--list-gpu-code", "-dumpspecs", "--preprocess",
                                        "--generate-dependencies"};
    if (argc < 2 || (argc == 2 && (strcmp(argv[1], "-v") == 0 || strcmp(argv[1], "-vV") == 0))) return 1;
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') continue;
        if (strncmp(argv[i], "-print-", 7) == 0 || strncmp(argv[i], "--print-", 8) == 0) return 1;
        for (size_t k = 0; k < sizeof words / sizeof *words; k++)
            if (strcmp(argv[i], words[k]) == 0) return 1;
    }
    return 0;
}

static int parent_of(int pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    char *end = strrchr(text, ')'), state;
    int parent = 0;
    return end && sscanf(end + 1, " %c %d", &state, &parent) == 2 ? parent : 0;
}

/* The folder of the run that we belong to: named by the environment, or, where that was cleaned, by the
 * process id of one of our ancestors. */
static int find_run(void) {
    const char *named = getenv("FEWBITS_BUILD");
    if (named && *named) {
        snprintf(run_folder, sizeof run_folder, "%s", named);
        return 1;
    }
    char root[4096];
    snprintf(root, sizeof root, "%s", self);
    char *tools = NULL;
    for (char *p = root; (p = strstr(p, "/tools/")); p++) tools = p;
    if (!tools) return 0;
    *tools = 0;
    for (int pid = getppid(); pid > 1; pid = parent_of(pid)) {
        if (snprintf(run_folder, sizeof run_folder, "%s/runs/%d", root, pid) >= (int)sizeof run_folder) return 0;
        if (access(run_folder, F_OK) == 0) return 1;
    }
    return 0;
}

static int connect_to(const char *folder) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int dir = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) return -1;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/sock", dir);
    while (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
        if (errno == EINTR) continue;
        if (errno == EAGAIN) { /* the queue of new connections is full */
            usleep(2000);
            continue;
        }
        close(fd);
        fd = -1;
        break;
    }
    close(dir);
    return fd;
}

static void tell(int fd, const char *format, ...) {
    char text[8192];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n >= (int)sizeof text) n = sizeof text - 1;
    while (send(fd, text, n, MSG_NOSIGNAL) < 0 && errno == EINTR) {}
}

/* Wait for an order; its NUL-separated fields. Returns their number, or 0 when the controller is gone. */
static int hear(int fd, char **fields, int max) {
    ssize_t n;
    while ((n = recv(fd, message, sizeof message - 1, 0)) < 0 && errno == EINTR) {}
    if (n <= 0) return 0;
    message[n] = 0;
    int count = 0;
    for (char *p = message; p < message + n && count < max; p += strlen(p) + 1) fields[count++] = p;
    return count;
}

static void write_all(int fd, const char *data, size_t size) {
    while (size > 0) {
        ssize_t n = write(fd, data, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            struct pollfd wait = {.fd = fd, .events = POLLOUT};
            poll(&wait, 1, -1);
            continue;
        }
        if (n <= 0) return;
        data += n;
        size -= n;
    }
}

static void pour(int from, int to) {
    ssize_t n;
    if (from < 0) return;
    lseek(from, 0, SEEK_SET);
    while ((n = read(from, message, sizeof message)) > 0) write_all(to, message, n);
}

static void forget(int fd) {
    if (fd >= 0 && ftruncate(fd, 0) == 0) lseek(fd, 0, SEEK_SET);
}

/* What a tool prints is held back until it is known that the attempt counts; a terminal gets it at once. */
static void capture(int kept[3]) {
    struct stat out, err;
    kept[1] = kept[2] = -1;
    if (!isatty(1) && fstat(1, &out) == 0) kept[1] = memfd_create("out", MFD_CLOEXEC);
    if (isatty(2) || fstat(2, &err) != 0) return;
    if (kept[1] >= 0 && out.st_dev == err.st_dev && out.st_ino == err.st_ino)
        kept[2] = kept[1];
    else
        kept[2] = memfd_create("err", MFD_CLOEXEC);
}

/* The tool's environment: ours, and the pager in front of what is preloaded already. */
static char **environment(char **order) {
    static char preload[8192], pages[4096];
    size_t count = 0;
    if (!*order[3]) return environ;
    while (environ[count]) count++;
    char **made = calloc(count + 3, sizeof *made), **last = made;
    if (!made) return environ;
    const char *before = getenv("LD_PRELOAD");
    snprintf(preload, sizeof preload, "LD_PRELOAD=%s%s%s", order[3], before && *before ? ":" : "", before ? before : "");
    snprintf(pages, sizeof pages, "FEWBITS_PAGER=%s", order[4]);
    for (char **e = environ; *e; e++)
        if (strncmp(*e, "LD_PRELOAD=", 11) != 0 && strncmp(*e, "FEWBITS_PAGER=", 14) != 0) *last++ = *e;
    *last++ = preload;
    *last++ = pages;
    return made;
}

/* In the child, which shares our memory until it becomes the tool: nothing here may write to it. */
static void prepare_child(char **order, const int kept[3], pid_t parent) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127); /* it was gone before that took effect */
    unsigned long long cap = strtoull(order[1], NULL, 10);
    struct rlimit limit;
    if (cap && getrlimit(RLIMIT_DATA, &limit) == 0) {
        if (limit.rlim_max == RLIM_INFINITY || limit.rlim_max > cap) limit.rlim_cur = cap;
        setrlimit(RLIMIT_DATA, &limit);
    }
    int fd = *order[2] ? open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        write_all(fd, order[2], strlen(order[2]));
        close(fd);
    }
    for (int i = 1; i <= 2; i++)
        if (kept[i] >= 0) dup2(kept[i], i);
}

__attribute__((noinline)) static pid_t spawn(const char *tool, char **args, char **variables, char **order,
                                            const int kept[3], const sigset_t *before) {
    pid_t parent = getpid(), pid = vfork();
    if (pid == 0) {
        prepare_child(order, kept, parent);
        sigprocmask(SIG_SETMASK, before, NULL);
        execve(tool, args, variables);
        dprintf(2, "fewbits build: cannot run %s: %s\n", tool, strerror(errno));
        _exit(127);
    }
    return pid;
}

static pid_t start(const char *tool, char **argv, char **order, int count, const int kept[3], const sigset_t *before) {
    char **args = argv;
    int replaced = count > 5 ? atoi(order[5]) : 0;
    if (replaced > 0) {
        args = calloc(replaced + 2, sizeof *args);
        args[0] = argv[0];
        char *p = order[5] + strlen(order[5]) + 1;
        for (int i = 1; i <= replaced; i++, p += strlen(p) + 1) args[i] = p;
    }
    char **variables = environment(order);
    pid_t pid = spawn(tool, args, variables, order, kept, before);
    if (args != argv) free(args);
    if (variables != environ) free(variables);
    setpgid(pid, pid);
    return pid;
}

/* Wait for the tool; pass signals on to its group. Returns the signal that came, if any. The controller is told
 * of the tool's process only when it lives for a while: of short ones it need not know. */
static int attend(int fd, int signals, pid_t pid) {
    struct pollfd waits[2] = {{.fd = signals, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
    int ended = 0, told = 0;
    for (;;) {
        siginfo_t info = {0};
        if (waitid(P_PID, pid, &info, WEXITED | WNOWAIT | WNOHANG) == 0 && info.si_pid == pid) return ended;
        int ready = poll(waits, 2, told ? -1 : TELL_AFTER_MS);
        if (ready < 0) continue;
        if (ready == 0) {
            tell(fd, "S %d", pid);
            told = 1;
            continue;
        }
        if (waits[1].revents) { /* only its end comes unasked */
            kill(-pid, SIGKILL);
            while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
            refuse("its controller is gone, so this build has stopped; start it again, what is finished is kept.");
        }
        struct signalfd_siginfo got;
        if (waits[0].revents && read(signals, &got, sizeof got) == sizeof got && got.ssi_signo != SIGCHLD) {
            ended = got.ssi_signo;
            kill(-pid, got.ssi_signo);
            kill(-pid, SIGCONT);
        }
    }
}

static long since(const struct timespec *begun) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec - begun->tv_sec > 1 ? 2000000000L : (now.tv_sec - begun->tv_sec) * 1000000000L + now.tv_nsec - begun->tv_nsec;
}

static void end_as(int status, const sigset_t *before) {
    if (WIFSIGNALED(status)) { /* the build tool sees the same end as without us */
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        signal(WTERMSIG(status), SIG_DFL);
        sigprocmask(SIG_SETMASK, before, NULL);
        kill(getpid(), WTERMSIG(status));
        exit(128 + WTERMSIG(status));
    }
    exit(WEXITSTATUS(status));
}

static void obey(int fd, const char *tool, char **argv, char **order, int count) {
    sigset_t watched, before;
    sigemptyset(&watched);
    for (const int *s = (const int[]){SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT, 0}; *s; s++) sigaddset(&watched, *s);
    sigprocmask(SIG_BLOCK, &watched, &before);
    int signals = signalfd(-1, &watched, SFD_CLOEXEC), kept[3], status = 0;
    capture(kept);
    while (count > 4 && order[0][0] == 'R') {
        struct timespec begun;
        clock_gettime(CLOCK_MONOTONIC, &begun);
        pid_t pid = start(tool, argv, order, count, kept, &before);
        if (pid < 0) refuse("cannot start another process; see ulimit -u.");
        int signal_seen = attend(fd, signals, pid);
        siginfo_t info;
        struct rusage used = {0};
        syscall(SYS_waitid, P_PID, pid, &info, WEXITED | WNOWAIT, &used);
        int code = info.si_code == CLD_EXITED ? info.si_status : -info.si_status;
        tell(fd, "E %d %ld %ld %ld %d %d %d", code, used.ru_maxrss, used.ru_utime.tv_sec * 1000000L + used.ru_utime.tv_usec,
             used.ru_stime.tv_sec * 1000000L + used.ru_stime.tv_usec, kept[1], kept[2], signal_seen);
        if (order[0][1] == 'Q' && code == 0 && !signal_seen && info.si_code == CLD_EXITED && since(&begun) < QUICK_NS) {
            close(fd);
            count = 0;
        } else {
            count = hear(fd, order, FIELDS - 1);
        }
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
        if (signal_seen || !count) break;
        if (order[0][0] == 'R') {
            forget(kept[1]);
            forget(kept[2]);
        }
    }
    char last[4096] = "";
    int override = count > 1 && order[0][0] == 'X' && *order[1] ? atoi(order[1]) : -1;
    if (count > 3 && order[0][0] == 'X') snprintf(last, sizeof last, "%s", order[3]);
    pour(kept[1], 1);
    if (kept[2] != kept[1]) pour(kept[2], 2);
    write_all(2, last, strlen(last));
    if (override >= 0) exit(override);
    end_as(status, &before);
}

int main(int argc, char **argv) {
    static char real[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n <= 0) refuse("/proc is not mounted; mount it, or build without fewbits build.");
    char *name = strrchr(self, '/') + 1, *tool = real;
    if (strcmp(name, "fewbits-launch") == 0) {
        if (argc < 2) refuse("this is the launcher of compilers; see fewbits build --help.");
        argv++, argc--;
        tool = argv[0];
    } else {
        char link[sizeof self + 16];
        snprintf(link, sizeof link, "%.*s.real/%s", (int)(name - self), self, name);
        if (readlink(link, real, sizeof real - 1) <= 0) refuse("the real tool is not known; start fewbits build again.");
        argv[0] = real;
    }
    char *inside = strstr(tool, "/tools/") ? strrchr(tool, '/') : NULL;
    if (inside) { /* CMake was given one of our names as the compiler: one launcher is enough */
        static char direct[4096];
        char link[8192];
        snprintf(link, sizeof link, "%.*s/.real/%s", (int)(inside - tool), tool, inside + 1);
        if (readlink(link, direct, sizeof direct - 1) > 0) tool = argv[0] = direct;
    }
    if (!strchr(tool, '/')) { /* a launcher's argument: look for it as a shell does, past our own folder */
        static char found[4096];
        char *path = strdup(getenv("PATH") ? getenv("PATH") : "/usr/bin:/bin"), *rest = path, *dir;
        while ((dir = strsep(&rest, ":")))
            if (!strstr(dir, "/tools/") && snprintf(found, sizeof found, "%s/%s", dir, tool) > 0 && access(found, X_OK) == 0) break;
        if (dir) tool = found;
    }
    char *order[FIELDS];
    if (!is_light(argc, argv) && find_run()) {
        int fd = connect_to(run_folder), count = 0;
        if (fd < 0) refuse("its controller is gone, so this build has stopped; start it again, what is finished is kept.");
        tell(fd, "H%d %s", (int)getppid(), tool);
        count = hear(fd, order, FIELDS - 1);
        if (!count) refuse("its controller is gone, so this build has stopped; start it again, what is finished is kept.");
        if (order[0][0] == 'X') { /* X, code, standard output, error stream */
            if (count > 2) write_all(1, order[2], strlen(order[2]));
            if (count > 3) write_all(2, order[3], strlen(order[3]));
            exit(atoi(order[1]));
        }
        if (order[0][0] == 'R') obey(fd, tool, argv, order, count);
        close(fd);
    }
    execvp(tool, argv);
    fprintf(stderr, "fewbits build: cannot run %s: %s\n", tool, strerror(errno));
    return 127;
}

#else /* the pager */
#include <pthread.h>

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
#endif
